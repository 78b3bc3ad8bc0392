"""python -m bench: specjax beside transformers, on the same weights, prompts and precision, in one process."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

import specjax
from bench import machine, prompts
from bench.command import run
from bench.contestants import Contestant, ours, theirs
from bench.drawing import draw
from bench.imposed import coins
from bench.timing import Timed, alternate
from bench.weights import SIZES, Pair, from_folders, random_folders, random_on_device
from specjax.plot import new_figure

_INT8_TARGET = "int8 target"
_GUESSERS = {"draft": "draft alone", "draft int8": "draft int8 alone", "self-int8": _INT8_TARGET}
"""Whose plain decoding tells what a guess costs; one of n-grams costs nothing to speak of."""


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    check(arguments)
    if arguments.plot:
        new_figure()  # without matplotlib, say so now rather than after the measurement
    reports = []
    for batch, length, vocab_size in itertools.product(
        arguments.batch, arguments.prompt_length or [None], arguments.vocab_size
    ):
        setting = {
            **vars(arguments),
            "batch": batch,
            "prompt_length": length,
            "vocab_size": vocab_size,
        }
        reports.append(measure(argparse.Namespace(**setting)))
        print(table(reports[-1]) + "\n", flush=True)
        if arguments.json:  # after each: the next may not come to its end
            pathlib.Path(arguments.json).write_text(json.dumps(reports, indent=1))
        if arguments.plot:
            draw(reports).savefig(arguments.plot)


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a number that cannot be measured at."""
    for name in ("vocab_size", "num_drafts", "batch", "prompt_length", "new_tokens", "rounds"):
        given = getattr(arguments, name)
        if given is not None and np.min(given) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} is {np.min(given)}; it must be at least 1"
            )
    if not 0 <= (arguments.synthetic_acceptance or 0) <= 1:
        raise ValueError(
            f"--synthetic-acceptance is {arguments.synthetic_acceptance}; it is a probability, 0 to 1"
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    made.add_argument(
        "--size", choices=sorted(SIZES), help="random weights of this many parameters"
    )
    made.add_argument("--target", help="a folder instead; without either, the shipped pair")
    made.add_argument("--draft", help="folder of its draft")
    made.add_argument(
        "--vocab-size", type=int, nargs="+", default=[32000], help="of random weights"
    )
    made.add_argument(
        "--dtype", default="float32", help="of weights and cache: float32 or bfloat16"
    )
    made.add_argument(
        "--num-drafts", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="lookaheads"
    )
    made.add_argument(
        "--batch", type=int, nargs="+", default=[1], help="prompts that are decoded together"
    )
    made.add_argument(
        "--prompt-file",
        help="real prompts, as of specjax bench; without it, those of the shipped pair, else random ones",
    )
    made.add_argument(
        "--limit-prompts", type=int, default=0, help="use the first so many real ones only; 0: all"
    )
    made.add_argument(
        "--prompt-length",
        type=int,
        nargs="+",
        help="tokens; of real prompts the last; else 32 random, 96 real",
    )
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument(
        "--synthetic-acceptance", type=float, help="impose this chance that a guess is right"
    )
    made.add_argument(
        "--proposers",
        nargs="+",
        choices=("draft", "ngram"),
        default=["draft", "ngram"],
        help="specjax: which",
    )
    made.add_argument(
        "--int8", action="store_true", help="target, draft and the target's own draft in int8, too"
    )
    made.add_argument(
        "--peers", nargs="*", choices=("plain", "draft", "ngram", "loop"), default=["plain", "draft", "ngram"],
        help="transformers: which, if any; and a compiled PyTorch loop",
    )  # fmt: skip
    made.add_argument(
        "--compiled", action="store_true", help="transformers plain under torch.compile, too"
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument(
        "--seconds", type=float, default=math.inf, help="leave out what cannot be done in this time"
    )
    made.add_argument(
        "--weights", default=str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"),
        help="folder for random weights, or `device`: draw them there and write none",
    )  # fmt: skip
    made.add_argument("--json", help="write the reports to this file, a list")
    made.add_argument("--plot", help="draw speed and speed-up against the lookahead into this file")
    return made


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the arguments ask for, of one batch, prompt length and vocabulary, as plain data."""
    began, top = time.perf_counter(), machine.ceilings()
    names = ("size", "vocab_size", "dtype", "weights", "target", "draft")
    pair = _pair(*(getattr(arguments, name) for name in names))
    target, draft = pair.target, pair.draft
    path = arguments.prompt_file or (
        None if arguments.size or arguments.target else prompts.SHIPPED
    )
    length, limit = arguments.prompt_length, arguments.limit_prompts
    asked = prompts.batches(target, path and pathlib.Path(path), arguments.batch, length, limit)

    new, width = arguments.new_tokens, max(arguments.num_drafts) + 1
    script = None
    if arguments.synthetic_acceptance is not None:
        del asked[1:]  # a script is of one batch
        # The text of a wide pass: at one row other sums round differently, and a tie may fall the other way.
        text = ours(target, None, "plain", width=width).run(asked[0], new)
        right = coins(arguments.batch, new, arguments.synthetic_acceptance, arguments.num_drafts)
        text, length = np.concatenate([asked[0], text], axis=1), asked[0].shape[1]
        script = (np.pad(text, ((0, 0), (0, width))), np.pad(right, ((0, 0), (length, width))))

    entries = [*_our_entries(pair, arguments, script), *_their_entries(pair, arguments, script)]
    timed, left = alternate(entries, asked, new, arguments.rounds, began + arguments.seconds)
    return {
        "machine": machine.describe(),
        "ceilings": top,
        "arguments": {
            k: v
            for k, v in vars(arguments).items()
            if k not in ("json", "weights", "plot", "seconds")
        },
        "parameters": {"target": target.num_params, "draft": draft.num_params if draft else None},
        "prompts": {
            "real": path is not None,
            "number": len(asked) * arguments.batch,
            "length": asked[0].shape[1],
        },
        "floor_seconds": _floor(target, arguments.dtype, top),
        "dropped": sum(t.dropped for t in timed),
        "left_out": left,
        "rows": _rows(timed, target, arguments, top),
    }


def _our_entries(pair: Pair, arguments: argparse.Namespace, script: Any) -> list[Contestant]:
    target, draft = pair.target, pair.draft if "draft" in arguments.proposers else None
    entries = [ours(target, None, "plain")]
    entries += [ours(target, None, "plain", width=gamma + 1) for gamma in arguments.num_drafts]
    if draft is not None:
        entries.append(ours(draft, None, "plain", name="draft alone"))
    for gamma in arguments.num_drafts:
        if draft is not None:
            entries.append(ours(target, draft, "draft", gamma, script))
        if "ngram" in arguments.proposers:
            entries.append(ours(target, None, "ngram", gamma, script))
    return entries + (
        _in_int8(target, draft, arguments.num_drafts, script) if arguments.int8 else []
    )


def _their_entries(pair: Pair, arguments: argparse.Namespace, script: Any) -> list[Contestant]:
    peers, entries = arguments.peers, []
    if "plain" in peers:
        entries.append(theirs(pair, "plain"))
        if arguments.compiled:
            entries.append(theirs(pair, "plain", compiled=True))
    if "loop" in peers:
        from bench.torch_loop import loop

        entries.append(loop(pair))
        entries += [
            loop(pair, gamma, script) for gamma in arguments.num_drafts if pair.draft is not None
        ]
    for gamma in (
        arguments.num_drafts if arguments.batch == 1 else ()
    ):  # assisted generation refuses a batch
        if pair.draft is not None and "draft" in peers:
            entries.append(theirs(pair, "draft", gamma, script))
        if "ngram" in peers:
            entries.append(theirs(pair, "ngram", gamma, script))
    return entries


def _in_int8(target: Any, draft: Any, lookaheads: list[int], script: Any) -> list[Contestant]:
    """The target in int8, which writes another text; the draft; and the target as its own draft."""
    small = specjax.quantise(target)
    found = [ours(small, None, "plain", name=_INT8_TARGET)]
    if draft is not None:
        found.append(ours(specjax.quantise(draft), None, "plain", name="draft int8 alone"))
    for gamma in lookaheads:
        if draft is not None:
            found.append(
                ours(target, specjax.quantise(draft), "draft", gamma, script, name="draft int8")
            )
        # How often it is right is the question, so that is never imposed.
        found.append(ours(target, small, "draft", gamma, name="self-int8"))
    return found


@functools.lru_cache(1)
def _pair(
    size: str, vocab_size: int, dtype: str, weights: str, target: str | None, draft: str | None
) -> Pair:
    if size and weights == "device":
        return random_on_device(size, vocab_size, dtype)
    if size:
        return from_folders(*random_folders(size, vocab_size, pathlib.Path(weights), dtype), dtype)
    if target:
        return from_folders(pathlib.Path(target), pathlib.Path(draft) if draft else None, dtype)
    shipped = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode"
    return from_folders(shipped / "target", shipped / "draft", dtype)


def _rows(
    timed: list[Timed], target: Any, arguments: argparse.Namespace, top: dict[str, float]
) -> list[dict]:
    """A row a contestant: speed, and how it compares."""
    batches = len(timed[0].tokens)
    count = batches * arguments.batch * arguments.new_tokens
    seconds = {
        (t.contestant.library, t.contestant.name, t.contestant.num_drafts): t.median for t in timed
    }
    steps = {
        (t.contestant.name, t.contestant.num_drafts): t.step
        for t in timed
        if t.contestant.library == "specjax"
    }
    plain = seconds["specjax", "plain", 0]
    floor = _floor(target, arguments.dtype, top)
    reference = np.concatenate(timed[0].tokens)
    rows = []
    for t in timed:
        name, gamma, ours_too = (
            t.contestant.name,
            t.contestant.num_drafts,
            t.contestant.library == "specjax",
        )
        peer, loop = (
            seconds.get((library, name, gamma)) for library in ("transformers", "torch loop")
        )
        median, row = (
            t.median,
            {"library": t.contestant.library, "proposer": name, "num_drafts": gamma},
        )
        row |= {
            "first_call_seconds": t.first,
            "samples": sum(map(len, t.seconds)),
            "dropped": t.dropped,
            "spread": t.spread,
        }
        row |= {"acceptance_rate": t.alpha, "mean_accepted_length": t.tau}
        row["tokens_per_second"] = count / median if median else None
        row["speedup"] = plain / median if median and plain else None
        row["over_peer"] = peer / median if median and peer and ours_too else None
        row["over_loop"] = loop / median if median and loop and ours_too else None
        if ours_too and median and t.decoding and t.step:
            row["prefill_seconds"] = (median - t.decoding) / batches
            row["step_seconds"] = t.step
            row["share_of_bandwidth"] = floor / t.step if name == "plain" else None
        if ours_too and gamma:
            row["parts_over_step"] = parts_over_step(steps, name, gamma)
        if not ours_too or name not in _GUESSERS.values():  # those write texts of their own
            row["same_tokens"] = int((np.concatenate(t.tokens) == reference).all(1).sum())
        rows.append(row)
    return rows


def _floor(target: Any, dtype: str, top: dict[str, float]) -> float:
    """Seconds to read every weight once."""
    return target.num_params * jax.numpy.dtype(dtype).itemsize / (top["bandwidth"] * 1e9)


def parts_over_step(
    steps: dict[tuple[str, int], float | None], name: str, gamma: int
) -> float | None:
    """Seconds of a step's parts, each measured alone, over the seconds of the step.

    The parts are a step of plain decoding at gamma + 1 rows, and gamma steps of the draft's plain
    decoding.  Below 1 a step takes longer than its parts.  1 is no bound: every part alone pays for
    a loop and a draw of its own, which a step pays for once, and the figures are medians of
    different samples.

    Args:
      steps: (proposer, num_drafts) -> seconds of a step; None where no sample was clean.
      name: of the proposer.
      gamma: guesses a step.

    Returns:
      The ratio, or None where a part has not been measured.
    """
    step, wide = steps.get((name, gamma)), steps.get((f"plain at {gamma + 1} rows", 0))
    alone = steps.get((_GUESSERS[name], 0)) if name in _GUESSERS else 0.0
    return None if step is None or wide is None or alone is None else (wide + gamma * alone) / step


_COLUMNS = {
    "library": ("library", ""),
    "proposer": ("proposer", ""),
    "drafts": ("num_drafts", ""),
    "alpha": ("acceptance_rate", ".2f"),
    "tau": ("mean_accepted_length", ".2f"),
    "tokens/s": ("tokens_per_second", ".1f"),
    "spread": ("spread", ".2f"),
    "x plain": ("speedup", ".2f"),
    "x peer": ("over_peer", ".2f"),
    "x loop": ("over_loop", ".2f"),
    "prefill, s": ("prefill_seconds", ".4f"),
    "s a step": ("step_seconds", ".5f"),
    "of bandwidth": ("share_of_bandwidth", ".2f"),
    "parts / step": ("parts_over_step", ".2f"),
    "same tokens": ("same_tokens", "d"),
    "first call, s": ("first_call_seconds", ".1f"),
}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    asked, found, given = report["arguments"], report["machine"], report["prompts"]
    what = asked["size"] or asked["target"] or "the shipped pair"
    lines = [
        f"{what}, {report['parameters']['target'] / 1e6:.0f} M parameters, {asked['dtype']}, batch {asked['batch']}, "
        f"{given['number']} {'real' if given['real'] else 'random'} prompts of "
        f"{given['length']} tokens, {asked['new_tokens']} new tokens, "
        + (
            f"imposed acceptance {asked['synthetic_acceptance']}"
            if asked["synthetic_acceptance"]
            else "real acceptance"
        ),
        f"{found['processor']}, {found['cores']} cores, {found['device']}, jax {found['jax']}, "
        f"torch {found.get('torch')}, transformers {found.get('transformers')}, {found['date']}; "
        + ", ".join(f"{k} {v:.0f}" for k, v in report["ceilings"].items())
        + f"; every weight is read in {report['floor_seconds'] * 1e3:.3f} ms; {report['dropped']} samples dropped",
        *(f"left out: {left}" for left in report["left_out"]),
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for row in report["rows"]:
        found = ((row.get(name), form) for name, form in _COLUMNS.values())
        lines.append(
            "| "
            + " | ".join("" if value is None else format(value, form) for value, form in found)
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
