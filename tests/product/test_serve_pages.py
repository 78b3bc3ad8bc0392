"""Engines with pages under load: the shipped pair, drafters of every kind, and a target with
states."""

from __future__ import annotations

import dataclasses
from typing import Any

import load
import numpy as np
import pytest
from hybrid_model import CAPACITY, MODEL, weights
from toys import TRANSFORMERS as toys

import specjax
from specjax import Request
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel
from specjax.serve import Engine


@pytest.mark.parametrize("pages", [20, 40])
def test_no_text_depends_on_load_or_on_pages(pages: int):
    """With and without drafts, where pages run out and where they do not."""
    seeds = list(range(2000, 2150))
    with load.engine(slots=6, cache_tokens=16 * pages, page=16) as made:
        before = made.compiled()
        served = load.under_load(made, seeds, np.random.default_rng(0), 0.2, threads=20)
        assert sorted(served) == seeds
        state = made.load()
        assert state.free_pages == state.pages == pages
        assert state.copied_tokens > 0
        assert load.differences(made, seeds, served, generated=0.05)[0] == []
        assert made.compiled() == before


def test_texts_are_those_of_slots():
    """The kernel reads pages with the bits of a cache by slot, so even log-probabilities agree."""
    seeds = list(range(2200, 2240))
    results = []
    for cache_tokens in (None, 6 * 256):
        with load.engine(slots=6, cache_tokens=cache_tokens) as made:
            served = load.under_load(made, seeds, np.random.default_rng(0), 0.0, threads=20)
            results.append({seed: load.result(one)[:3] for seed, one in served.items()})
    assert results[0] == results[1]


DRAFTERS = ("eagle3 tree", "peagle tree", "block draft", "draft 3", "mtp", "mtp layers")


def test_every_drafter_on_pages():
    """Texts of `generate`, and the drafts after a shared beginning are those after one that was
    read."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    drafters = {name: specjax.Drafter(*toys.CASES[name], name) for name in DRAFTERS}
    drafters["lookup"] = BoundDrafter(specjax.NGram(3, min_ngram=1))
    head = [3 + n % 7 for n in range(36)]
    settings: dict[str, Any] = {"slots": 3, "capacity": 64, "chunk": 16, "page": 16}
    with Engine(target, drafters, **settings, cache_tokens=16 * 8) as made:

        def submit(name: str, last: int, salt: str | None = None):
            asked = Request(
                prompts=[[*head, last]], proposer=name, max_new_tokens=12, seed=last, eos=[]
            )
            return made.submit(asked, cache_salt=salt)

        wanted = {
            last: specjax.generate(
                target, [[*head, last]], proposer="none", max_new_tokens=12, eos=[]
            ).tokens[0]
            for last in (2, 9)
        }
        for name in drafters:
            submit(name, 9).result(60)
            shared, read = submit(name, 2).result(60), submit(name, 2, name).result(60)
            assert (shared.copied, read.copied) == (32, 0), name
            assert (shared.tokens, shared.guesses, shared.stats) == (
                read.tokens, read.guesses, read.stats,
            ), name  # fmt: skip
            assert shared.tokens == wanted[2]
        together = [submit(name, 9) for name in drafters]
        assert all(handle.result(60).tokens == wanted[9] for handle in together)


def test_states_stay_by_slot():
    """A target with recurrent layers has pages for its attention."""
    target = LanguageModel(MODEL, weights(), None, (), "hybrid")
    lookup = {"lookup": BoundDrafter(specjax.NGram(3, min_ngram=1))}
    asks = [
        Request(
            prompts=[[(n + i) % 11 + 1 for i in range(5 + 3 * n)]],
            max_new_tokens=24,
            proposer=("none", "lookup")[n % 2],
        )
        for n in range(6)
    ]
    settings: dict[str, Any] = {"slots": 3, "capacity": CAPACITY, "chunk": 16, "page": 16}
    with Engine(target, lookup, **settings, cache_tokens=16 * 7) as made:
        served = [handle.result(60) for handle in [made.submit(one) for one in asks]]
        assert made.load().set_back > 0
        for one, text in zip(asks, served, strict=True):
            plain = dataclasses.replace(one, proposer=None)
            output = specjax.generate(target, plain.prompts, proposer="none", max_new_tokens=24)
            assert output.tokens[0] == text.tokens
            assert text.copied == 0
