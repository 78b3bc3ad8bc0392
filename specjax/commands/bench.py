"""`specjax bench`: proposers, lookaheads and rules against plain decoding, side by side in one process.

Every round runs every setting on every prompt in turn, so that a drift of the machine's speed meets all alike.  A
sample is dropped when other processes used the cores meanwhile; of the rest the median counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

import specjax
from specjax import plot
from specjax.call import check_length, encode
from specjax.flags import (
    DRAFTED,
    KINDS,
    add_model_arguments,
    add_numbers_of_proposers,
    add_numbers_of_rules,
    add_processor_arguments,
    add_sampling_arguments,
    load_models,
    make_drafter,
    make_rule,
    number_of,
    processing,
    read_prompts,
    reads,
    sampling,
)
from specjax.parallel import add_process_arguments, leader

HELP = "acceptance and speed of proposers, numbers of drafts and rules, against plain decoding"

_BUSY = 0.1
_LOOKAHEADS = (1, 2, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """One row of the report: what is handed to `generate`, and the words and numbers that name it."""

    options: dict[str, Any]
    facts: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--proposers", "--proposer", nargs="+", choices=KINDS, default=["draft", "ngram"],
        help="which to compare; none, which is plain decoding, is always there",
    )  # fmt: skip
    add_numbers_of_proposers(parser, _LOOKAHEADS)
    rules = sorted(specjax.RULES)
    parser.add_argument(
        "--rules", "--rule", nargs="+", choices=rules, default=["match"], help="under which"
    )
    add_numbers_of_rules(parser)
    add_sampling_arguments(parser, several=True)
    add_processor_arguments(parser)
    add_process_arguments(parser)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="measured rounds, after one that compiles; 0: no timing",
    )
    parser.add_argument(
        "--limit-prompts", type=int, default=0, help="use the first so many prompts only; 0: all"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument("--save", metavar="FILE", help="write the same JSON to this file")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw acceptance, length and speed-up to this file"
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.rounds < 0 or arguments.limit_prompts < 0:
        raise ValueError(
            f"--rounds {arguments.rounds} and --limit-prompts {arguments.limit_prompts}: both must be 0 or more"
        )
    if arguments.plot:
        plot.new_figure()  # without matplotlib, say so now rather than after the measurement
    prompts = read_prompts(arguments)
    prompts = prompts[: arguments.limit_prompts or len(prompts)]
    target, draft = load_models(arguments, arguments.proposers, arguments.rules)
    settings, impossible = _settings(arguments, target, draft, prompts)
    report = {
        "device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "jax": jax.__version__,
        "dtype": target.model.dtype.name, "prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens,
        "impossible": impossible, **_measure(target, prompts, settings, arguments.rounds),
    }  # fmt: skip
    if arguments.save and leader():
        pathlib.Path(arguments.save).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot and leader():
        plot.bench(report).savefig(arguments.plot)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)


def _settings(
    arguments: argparse.Namespace, target: specjax.LanguageModel, draft: Any, prompts: list[str]
) -> tuple[list[_Setting], list[list[str]]]:
    """The rows in order, plain decoding first at each temperature, and (proposer, rule) of what cannot be paired.

    Raises:
      ValueError: parts that do not fit, and the cure; before anything is compiled.
    """
    guessing, ids = [], encode(target, prompts)
    check_length("target", target, ids, arguments.max_new_tokens)
    for kind in dict.fromkeys(arguments.proposers):
        for numbers in _variants(arguments, kind):
            asked = argparse.Namespace(**{**vars(arguments), **numbers})
            gamma, asks = number_of(asked, "num_drafts"), draft if kind in DRAFTED else None
            if gamma < 1:
                raise ValueError(
                    f"num_drafts={gamma}; it must be at least 1: plain decoding is measured anyway"
                )
            drafter = make_drafter(asked, kind, target, asks)
            if drafter.reader is not None:
                check_length("draft", drafter.reader, ids, arguments.max_new_tokens)
            proposer = drafter.proposer
            facts = {
                "proposer": kind,
                "num_drafts": proposer.max_depth,
                "guesses": proposer.num_nodes - 1,
            }
            facts |= {"branching": numbers["branching"]} if "branching" in numbers else {}
            guessing.append((proposer.is_chain, facts, {"drafter": drafter}))

    found, impossible = [], []
    rules = {name: make_rule(arguments, name) for name in dict.fromkeys(arguments.rules)}
    for temperature in arguments.temperature:
        asked = argparse.Namespace(**{**vars(arguments), "temperature": temperature})
        options = {**sampling(asked, target), **processing(asked, target)}
        common = {"temperature": options["temperature"]}
        plain = {"proposer": "none", "num_drafts": 0, "guesses": 0, "rule": "match", "exact": True}
        found.append(_Setting(options, {**plain, **common}))
        for (name, rule), (is_chain, facts, given) in itertools.product(rules.items(), guessing):
            facts = {**facts, "rule": name, "exact": rule.exact, **common}
            if rule.chain_only and not is_chain:
                impossible.append([_label(facts), name])
            elif (facts["proposer"], name) != ("none", "match"):
                found.append(_Setting({**options, **given, "rule": rule}, facts))
    if len(found) == len(arguments.temperature) and impossible:
        raise ValueError(
            f"--rules {' '.join(rules)} judges chains only, and --proposers {' '.join(arguments.proposers)} proposes "
            "trees: use another rule, such as match, or a proposer of chains, such as draft"
        )
    return found, [list(pair_) for pair_ in dict.fromkeys(map(tuple, impossible))]


def _variants(arguments: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Of a proposer: each number of drafts, or each tree, that was asked for."""
    if reads(kind, "num_drafts"):
        return [{"num_drafts": n} for n in getattr(arguments, "num_drafts", _LOOKAHEADS)]
    number = {"num_drafts": number_of(argparse.Namespace(), "num_drafts")}
    if reads(kind, "branching"):
        default = [number_of(argparse.Namespace(), "branching")]
        return [
            {**number, "branching": list(tree)} for tree in getattr(arguments, "branching", default)
        ]
    return [number]


def _measure(
    target: specjax.LanguageModel, prompts: list[str], settings: list[_Setting], rounds: int
) -> dict[str, Any]:
    samples: dict[tuple[int, int], list[float]] = {}
    outputs: dict[tuple[int, int], specjax.Output] = {}
    compiled, dropped = [0.0] * len(settings), 0
    turns = [
        (n, p, s)
        for n in range(rounds + 1)
        for p in range(len(prompts))
        for s in range(len(settings))
    ]
    quiet = None if leader() else True
    for number, prompt, which in tqdm(
        turns, desc="bench", unit="run", disable=quiet, file=sys.stderr
    ):
        meter = Meter()
        output = specjax.generate(target, prompts[prompt], **settings[which].options)
        outputs[which, prompt] = output
        if number == 0:
            first = output.stats.compile_seconds + output.stats.seconds
            compiled[which] = max(compiled[which], first)
        elif meter.busy() > _BUSY:
            dropped += 1
        else:
            samples.setdefault((which, prompt), []).append(output.stats.seconds)

    rows, plain = [], 0
    for which, setting in enumerate(settings):
        plain = (
            which if not setting.facts["guesses"] and setting.facts["rule"] == "match" else plain
        )
        # A prompt counts where both sides have a clean sample.
        kept = [p for p in range(len(prompts)) if (which, p) in samples and (plain, p) in samples]
        seconds, before = (
            sum(statistics.median(samples[w, p]) for p in kept) for w in (which, plain)
        )
        found, reference = ([outputs[w, p] for p in range(len(prompts))] for w in (which, plain))
        row = {**setting.facts, **_acceptance(found)}
        row["tokens_per_second"] = (
            sum(found[p].stats.tokens for p in kept) / seconds if seconds else None
        )
        row["speedup"] = before / seconds if seconds else None
        row["first_call_seconds"] = compiled[which]
        # Elsewhere other tokens are no fault: rejection keeps the distribution, and an inexact rule not even that.
        comparable = row["rule"] == "match" or row["temperature"] == 0
        same = sum(a.tokens == b.tokens for a, b in zip(found, reference, strict=True))
        rows.append({**row, "same_tokens": same if comparable else None})
    return {"samples": len(turns) - dropped, "dropped": dropped, "rows": rows}


def _acceptance(outputs: Sequence[specjax.Output]) -> dict[str, Any]:
    """alpha with its standard error, prompts being drawn and not tokens, which depend on each other; and tau."""
    stats = [output.stats for output in outputs]
    tested, passes, count = (
        sum(s.tested for s in stats),
        sum(s.target_passes for s in stats),
        len(stats),
    )
    alpha = sum(s.accepted for s in stats) / tested if tested else None
    error = None
    if alpha is not None and count > 1:  # of a ratio of two sums (Cochran 1977, chapter 6)
        squares = sum((s.accepted - alpha * s.tested) ** 2 for s in stats)
        error = math.sqrt(squares * count / (count - 1)) / tested
    return {
        "acceptance_rate": alpha, "acceptance_error": error,
        "mean_accepted_length": sum(s.tokens for s in stats) / passes,
    }  # fmt: skip


def _label(row: dict[str, Any]) -> str:
    """The proposer, with its tree where it has one of a given form."""
    return " ".join(
        [row["proposer"], *filter(None, [",".join(map(str, row.get("branching", ())))])]
    )


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens each, batch 1, {report['dtype']}; "
        f"{report['device']}, {report['cores']} cores, jax {report['jax']}; {report['dropped']} samples dropped"
    )
    for proposer, rule in report["impossible"]:
        print(f"not possible: {proposer} with {rule}, which judges chains only")
    columns = "proposer | depth | guesses | rule | alpha | tau | tokens/s | speed-up | same tokens | first call, s"
    for temperature, rows in itertools.groupby(report["rows"], key=lambda row: row["temperature"]):
        print(f"\ntemperature {temperature:g}\n\n| {columns} |\n|" + "---|" * 10)
        for row in rows:
            alpha, error = (
                _cell(row["acceptance_rate"], ".3f"),
                _cell(row["acceptance_error"], ".3f"),
            )
            same = "" if row["same_tokens"] is None else f"{row['same_tokens']}/{report['prompts']}"
            cells = [
                _label(row), row["num_drafts"], row["guesses"],
                row["rule"] + ("" if row["exact"] else " (exact=False)"),
                f"{alpha} ± {error}" if error else alpha, _cell(row["mean_accepted_length"], ".2f"),
                _cell(row["tokens_per_second"], ".0f"), _cell(row["speedup"], ".2f"), same,
                _cell(row["first_call_seconds"], ".1f"),
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


class Meter:
    """How busy other processes kept the cores since the meter was made."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy(self) -> float:
        """Their share of all cores; 0 where the system does not say."""
        wall, own, everyone = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, everyone - own) / (wall * (os.cpu_count() or 1)) if wall > 0.02 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        everyone = 0.0
        stat = pathlib.Path("/proc/stat")
        if stat.exists():
            ticks = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:]]
            everyone = (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time(), everyone
