"""Requests of all kinds under load, each cut at a random token and resumed with another drafter."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import load
import numpy as np

from specjax.serve import Disagreement, Engine


def campaign(made: Engine, seeds: range, threads: int = 8) -> tuple[list[str], int]:
    """Returns what went wrong, and how many planted tokens were not found."""
    drawn = np.random.default_rng(0)
    cuts = {seed: drawn.random() for seed in seeds}

    def one(seed: int) -> tuple[list[str], int]:
        asked = load.request(seed)
        whole = made.submit(asked).result(600)
        cut = int(cuts[seed] * (len(whole.tokens) + 1))
        kept, wrong = whole.tokens[:cut], []
        others = ("none", "lookup", "draft", "lookup+draft")
        other = dataclasses.replace(asked, proposer=others[seed % 4], num_drafts=None, adapter=None)
        for request in (asked, other):
            for fast in (False, True):
                handle = made.submit(request, resume=kept, fast=fast)
                rest = [token for increment in handle for token in increment.tokens]
                served = handle.result(600)
                if (served.text, [*kept, *rest]) != (whole.text, whole.tokens):
                    wrong.append(f"request {seed}, cut at {cut}, fast={fast}: {request}")
        if not kept:
            return wrong, 0
        planted = [*kept[:-1], (kept[-1] + 1) % 512]
        try:
            made.submit(other, resume=planted).result(600)
        except Disagreement as error:
            return wrong, int(error.position != cut - 1)
        return wrong, 1

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        made_of = list(pool.map(one, seeds))
    return [line for lines, _ in made_of for line in lines], sum(missed for _, missed in made_of)


def test_every_text_is_resumed():
    with load.engine(slots=4, expected=8) as made:
        assert campaign(made, range(60)) == ([], 0)
