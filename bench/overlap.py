"""python -m bench.overlap: draft and verify at the same time, against the sequential loop.

By default both models only wait for a given time in each pass, in one process with two virtual
CPU devices, so that the table shows the loop and not this machine's cores:

    sequential     v + d                               a pass of the target, and D of the draft
    overlapped     max(v, a) + (1 - h) d               a = d (D + 1) / D

h is the share of verdicts for which a proposal was ready.  It follows from the acceptance and from
how often the second guess is right where the first is wrong.  Of every way to draft (for --outcomes
outcomes, for one, in turn) the model takes the fastest, as `Overlapped` does by measured times.

With --guesses the shipped pair decodes its prompts, and the table has the hit rates with and
without the noise of the next token in the guess.

With --processes SIZE random weights are used, in two processes of one core each; the sequential
loop has both cores.  The acceptance is imposed.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

import specjax
from bench import prompts
from bench.command import Report, run
from bench.overlap_models import VOCAB, Timed, texts
from bench.overlap_options import OverlapOptions
from specjax import Decoder, DraftModel, Match, Params, Sampling, make_key, make_mesh
from specjax.measure import describe, interval, show
from specjax.options.command import parse
from specjax.overlap import Overlapped

_PROMPT = 4
_FLAG = "--xla_force_host_platform_device_count=2"


def weights(alpha: float, second: float, drafts: int, outcomes: int) -> float:
    """The probability that a verdict is among the likeliest `outcomes`."""
    full = alpha**drafts
    each = [alpha**j * (1 - alpha) * second for j in range(drafts)]
    each += [full * alpha, full * (1 - alpha) * second]
    return sum(sorted(each, reverse=True)[:outcomes])


def predicted(verify: float, draft: float, drafts: int, hits: list[float]) -> float:
    """The speed-up over the sequential loop, with the best of the ways to draft.

    Args:
      verify, draft: seconds of a pass of the target, and of all passes for a proposal.
      drafts: D.
      hits: the share of hits of each way to draft ahead.
    """
    ahead = draft * (drafts + 1) / drafts
    ways = [max(verify, ahead) + (1 - share) * draft for share in hits]
    return (verify + draft) / min(*ways, verify + draft)


def prefill(runner: Any, params: Params, length: int) -> Any:
    prompt = np.zeros((1, _PROMPT), np.int32)
    settings: dict[str, Any] = {"limit": np.array([length], np.int32)}
    settings["sampling"] = Sampling.create(1, 0.0)
    settings["key"] = jax.random.split(make_key(0), 1)
    return runner.prefill(params, prompt, np.array([_PROMPT], np.int32), **settings)


def seconds_of(runner: Any, params: Params, state: Any) -> tuple[float, Any]:
    """Seconds of a run to the end, and its state."""
    jax.block_until_ready(state)
    started = time.perf_counter()
    state = jax.block_until_ready(runner.run(params, state))
    return time.perf_counter() - started, state


def cell(ratio: float, arguments: OverlapOptions) -> Report:
    """One ratio of the draft's time to the target's."""
    drafts, length = arguments.num_drafts, arguments.new_tokens + _PROMPT
    verify, alpha, second = arguments.verify_ms, arguments.alpha, arguments.second
    target, draft = (Timed(ms, length + drafts + 2) for ms in (verify, ratio * verify / drafts))
    decoder = Decoder(target, DraftModel(draft, VOCAB, drafts), Match(), (), length)
    meshes = [make_mesh(devices=[device]) for device in jax.devices()[:2]]
    runners = {
        "sequential": decoder,
        "overlapped": Overlapped(decoder, *meshes, outcomes=arguments.outcomes),
        "ahead": Overlapped(decoder, *meshes, outcomes=arguments.outcomes, measures=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    hits: list[tuple[float, float]] = []
    for number in range(-1, arguments.rounds):  # the first round compiles, and tries the ways
        made = texts(length + drafts + 2, alpha, second, seed=max(number, 0))
        wanted = None
        for name, runner in runners.items():
            params = Params(*made)
            params = params if name == "sequential" else runner.place(params)
            spent, state = seconds_of(runner, params, prefill(runner, params, length))
            tokens = np.asarray(state.tokens)[:, :length]
            wanted = tokens if wanted is None else wanted
            np.testing.assert_array_equal(tokens, wanted)
            if number < 0:
                continue
            seconds[name].append(spent / int(state.stats.target_passes[0]))
            if name == "ahead":
                counts = runner.foresight(state)
                hits.append((float(counts.hits.sum()), float(counts.asked.sum())))
    shares = [weights(alpha, second, drafts, n) for n in {1, arguments.outcomes}]
    return {
        "ratio": ratio,
        "model": predicted(verify, ratio * verify, drafts, shares),
        "speedup": interval(seconds["sequential"], seconds["overlapped"]),
        "always": interval(seconds["sequential"], seconds["ahead"]),
        "hits": interval(*np.array(hits).T),
        "hits_of_model": weights(alpha, second, drafts, arguments.outcomes),
        "milliseconds": 1e3 * float(np.mean(seconds["sequential"])),
    }


def guesses(arguments: OverlapOptions) -> Report:
    """Hit rates of the shipped pair, which do not depend on the machine's speed."""
    folder = prompts.SHIPPED.parent
    target, draft = (specjax.load(folder / role) for role in ("target", "draft"))
    (batch, *_) = prompts.batches(target, prompts.SHIPPED, arguments.batch, None, 0)
    rows, length = len(batch), batch.shape[1] + arguments.new_tokens
    proposer = DraftModel(draft.model, target.model.vocab_size, arguments.num_drafts)
    decoder = Decoder(target.model, proposer, Match(), target.eos, length)
    meshes = [make_mesh(devices=[device]) for device in jax.devices()[:2]]
    cells = []
    print("| outcomes | guess | temperature | steps | hit rate | expected |")
    print("|---|---|---|---|---|---|")
    for outcomes in dict.fromkeys((1, arguments.outcomes)):
        for coupled in (True, False):
            made = Overlapped(decoder, *meshes, outcomes=outcomes, coupled=coupled, measures=False)
            params = made.place(Params(target.params, draft.params))
            for temperature in (0.0, 1.0):
                state = made.prefill(
                    params,
                    batch.astype(np.int32),
                    np.full(rows, batch.shape[1], np.int32),
                    limit=np.full(rows, length, np.int32),
                    sampling=Sampling.create(rows, temperature),
                    key=jax.random.split(make_key(0), rows),
                )
                counts = made.foresight(made.run(params, state))
                rate = interval(counts.hits, counts.asked)
                expected = float(counts.hoped.sum() / counts.asked.sum())
                kind = "coupled" if coupled else "likeliest"
                print(
                    f"| {outcomes} | {kind} | {temperature:g} | {counts.asked.sum()} "
                    f"| {show(rate, '.3f')} | {expected:.3f} |",
                    flush=True,
                )
                cells.append([outcomes, kind, temperature, rate, expected])
    return {"guesses": cells}


def table(cells: list[Report]) -> str:
    lines = [
        "| draft / verify | sequential, ms a step | speed-up | of the model | always ahead "
        "| hit rate | of the model |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        lines.append(
            f"| {c['ratio']:g} | {c['milliseconds']:.1f} | {show(c['speedup'], '.2f')} "
            f"| {c['model']:.2f} | {show(c['always'], '.2f')} | {show(c['hits'], '.2f')} "
            f"| {c['hits_of_model']:.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(OverlapOptions, argv, __doc__, "python -m bench.overlap")
    for name in ("alpha", "second"):
        if not 0 <= getattr(arguments, name) <= 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}; it must be in [0, 1]")
    if arguments.processes:
        from bench.overlap_processes import measure

        report = measure(arguments)
    elif jax.device_count() < 2:
        raise ValueError(f"there is one device; set XLA_FLAGS={_FLAG} and JAX_PLATFORMS=cpu")
    elif arguments.guesses:
        report = guesses(arguments)
    else:
        cells = []
        for ratio in arguments.ratios:
            cells.append(cell(ratio, arguments))
            print(table(cells[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        print(table(cells))
        report = {"machine": describe(), "cells": cells}
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
