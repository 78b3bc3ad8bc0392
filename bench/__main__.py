"""python -m bench: specjax beside transformers, on the same weights, prompts and precision, in one process."""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

import specjax
from bench import machine, prompts
from bench.contestants import Contestant, ours, theirs
from bench.imposed import coins
from bench.timing import Timed, alternate
from bench.weights import SIZES, random_pair

_INT8_TARGET = "int8 target"
_GUESSERS = {"draft": "draft alone", "draft int8": "draft int8 alone", "self-int8": _INT8_TARGET}
"""Whose plain decoding tells what a guess costs; one of n-grams costs nothing to speak of."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), help="random weights of this many parameters")
    parser.add_argument("--target", help="a folder instead; without either, the shipped pair")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--vocab-size", type=int, default=32000, help="of random weights")
    parser.add_argument("--dtype", default="float32", help="of weights and cache: float32 or bfloat16")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="lookaheads")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--prompt-file",
        help="real prompts, as of specjax bench; without it, those of the shipped pair, else random ones",
    )
    parser.add_argument("--limit-prompts", type=int, default=0, help="use the first so many real ones only; 0: all")
    parser.add_argument("--prompt-length", type=int, help="tokens; of real prompts the last; else 32 random, 96 real")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--synthetic-acceptance", type=float, help="impose this chance that a guess is right")
    parser.add_argument("--int8", action="store_true", help="target, draft and the target's own draft in int8, too")
    parser.add_argument("--peers", nargs="*", default=["plain", "draft", "ngram"], help="transformers: which, if any")
    parser.add_argument("--compiled", action="store_true", help="transformers plain under torch.compile, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default=str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"))
    parser.add_argument("--json", help="write the report to this file")
    arguments = parser.parse_args(argv)
    report = measure(arguments)
    print(table(report))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the arguments ask for, as plain data."""
    top = machine.ceilings()
    folders = _folders(arguments)
    target = specjax.load(folders[0], arguments.dtype)
    draft = specjax.load(folders[1], arguments.dtype) if folders[1] else None
    path = arguments.prompt_file or (None if arguments.size or arguments.target else prompts.SHIPPED)
    length, limit = arguments.prompt_length, arguments.limit_prompts
    asked = prompts.batches(target, path and pathlib.Path(path), arguments.batch, length, limit)

    new, width = arguments.new_tokens, max(arguments.num_drafts) + 1
    script = None
    if arguments.synthetic_acceptance is not None:
        del asked[1:]  # a script is of one batch
        # The text of a wide pass: at one row other sums round differently, and a tie may fall the other way.
        text = ours(target, None, "plain", width=width).run(asked[0], new)
        right = coins(asked[0].shape[1] + new + width, arguments.synthetic_acceptance)
        text = np.pad(np.concatenate([asked[0], text], axis=1), ((0, 0), (0, width)))
        script = (text, right)

    entries = [ours(target, None, "plain")]
    entries += [ours(target, None, "plain", width=gamma + 1) for gamma in arguments.num_drafts]
    if draft is not None:
        entries.append(ours(draft, None, "plain", name="draft alone"))
    for gamma in arguments.num_drafts:
        if draft is not None:
            entries.append(ours(target, draft, "draft", gamma, script))
        entries.append(ours(target, None, "ngram", gamma, script))
    entries += _in_int8(target, draft, arguments.num_drafts, script) if arguments.int8 else []
    if "plain" in arguments.peers:
        entries.append(theirs(folders[0], None, "plain", arguments.dtype))
        if arguments.compiled:
            entries.append(theirs(folders[0], None, "plain", arguments.dtype, compiled=True))
    if arguments.batch == 1:  # transformers' assisted generation refuses a batch
        for gamma in arguments.num_drafts:
            if draft is not None and "draft" in arguments.peers:
                entries.append(theirs(folders[0], folders[1], "draft", arguments.dtype, gamma, script))
            if "ngram" in arguments.peers:
                entries.append(theirs(folders[0], None, "ngram", arguments.dtype, gamma, script))
    timed = alternate(entries, asked, new, arguments.rounds)
    return {
        "machine": machine.describe(),
        "ceilings": top,
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("json", "weights")},
        "parameters": {"target": target.num_params, "draft": draft.num_params if draft else None},
        "prompts": {"real": path is not None, "number": len(asked) * arguments.batch, "length": asked[0].shape[1]},
        "dropped": sum(t.dropped for t in timed),
        "rows": _rows(timed, target, arguments, top),
    }


def _in_int8(target: Any, draft: Any, lookaheads: list[int], script: Any) -> list[Contestant]:
    """The target in int8, which writes another text; the draft; and the target as its own draft."""
    small = specjax.quantise(target)
    found = [ours(small, None, "plain", name=_INT8_TARGET)]
    if draft is not None:
        found.append(ours(specjax.quantise(draft), None, "plain", name="draft int8 alone"))
    for gamma in lookaheads:
        if draft is not None:
            found.append(ours(target, specjax.quantise(draft), "draft", gamma, script, name="draft int8"))
        # How often it is right is the question, so that is never imposed.
        found.append(ours(target, small, "draft", gamma, name="self-int8"))
    return found


def _folders(arguments: argparse.Namespace) -> tuple[pathlib.Path, pathlib.Path | None]:
    if arguments.size:
        return random_pair(arguments.size, arguments.vocab_size, pathlib.Path(arguments.weights), arguments.dtype)
    if arguments.target:
        return pathlib.Path(arguments.target), pathlib.Path(arguments.draft) if arguments.draft else None
    shipped = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode"
    return shipped / "target", shipped / "draft"


def _rows(timed: list[Timed], target: Any, arguments: argparse.Namespace, top: dict[str, float]) -> list[dict]:
    """A row a contestant: speed, and how it compares."""
    batches = len(timed[0].tokens)
    count = batches * arguments.batch * arguments.new_tokens
    seconds = {(t.contestant.library, t.contestant.name, t.contestant.num_drafts): t.median for t in timed}
    plain = seconds["specjax", "plain", 0]
    itemsize = jax.numpy.dtype(arguments.dtype).itemsize
    floor = target.num_params * itemsize / (top["bandwidth"] * 1e9)  # seconds to read every weight once
    reference = np.concatenate(timed[0].tokens)
    rows = []
    for t in timed:
        name, gamma, ours_too = t.contestant.name, t.contestant.num_drafts, t.contestant.library == "specjax"
        peer = seconds.get(("transformers", name, gamma))
        median, row = t.median, {"library": t.contestant.library, "proposer": name, "num_drafts": gamma}
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
        if name == "plain" and median:
            row["share_of_bandwidth"] = floor * batches * arguments.new_tokens / median
        if ours_too and gamma and median and plain and t.tau:
            row["share_of_theory"] = _share(seconds, name, gamma, t.tau, plain / median)
        if not ours_too or name not in _GUESSERS.values():  # those write texts of their own
            row["same_tokens"] = int((np.concatenate(t.tokens) == reference).all(1).sum())
        rows.append(row)
    return rows


def _share(seconds: dict, name: str, gamma: int, tau: float, speedup: float) -> float | None:
    """Of tau / (cost(gamma + 1) + gamma c), with the costs that were measured here: a verifying pass, a draft's."""
    plain, wide = seconds["specjax", "plain", 0], seconds.get(("specjax", f"plain at {gamma + 1} rows", 0))
    alone = seconds.get(("specjax", _GUESSERS[name], 0)) if name in _GUESSERS else 0.0
    if not plain or wide is None or alone is None:
        return None
    return speedup / (tau / (wide / plain + gamma * alone / plain))


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
        + f"; {report['dropped']} samples dropped",
        "",
        "| library | proposer | drafts | alpha | tau | tokens/s | spread | x plain | x peer | of bandwidth | of theory "
        "| same tokens | first call, s |",
        "|" + "---|" * 13,
    ]

    def cell(value: Any, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    for row in report["rows"]:
        cells = [
            row["library"], row["proposer"], str(row["num_drafts"]), cell(row["acceptance_rate"]),
            cell(row["mean_accepted_length"]), cell(row["tokens_per_second"], ".1f"), cell(row["spread"]),
            cell(row["speedup"]), cell(row["over_peer"]), cell(row.get("share_of_bandwidth")),
            cell(row.get("share_of_theory")), cell(row.get("same_tokens"), "d"), cell(row["first_call_seconds"], ".1f"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
