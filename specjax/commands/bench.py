"""`specjax bench`: several lookaheads against plain decoding, side by side in one process.

Every round runs every setting on every prompt in turn, so that a drift of the machine's speed meets all alike.  A
sample is dropped when other processes used the cores meanwhile; of the rest the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
from tqdm import tqdm

import specjax
from specjax.commands.inputs import (
    add_model_arguments,
    add_processor_arguments,
    add_sampling_arguments,
    load_models,
    read_prompts,
    sampling,
)

HELP = "acceptance and speed for several numbers of drafts, against plain decoding"

_BUSY = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_processor_arguments(parser)
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="lookaheads to compare")
    parser.add_argument("--proposers", nargs="+", choices=["draft", "ngram"], default=["draft", "ngram"], help="which")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that compiles")
    parser.add_argument("--limit-prompts", type=int, default=0, help="use the first so many prompts only; 0: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments)
    prompts = prompts[: arguments.limit_prompts or len(prompts)]
    arguments.proposer = "draft" if "draft" in arguments.proposers else "ngram"
    target, draft, _ = load_models(arguments)
    settings: dict[tuple[str, int], dict[str, Any]] = {("plain", 0): {}}
    for gamma in arguments.num_drafts:
        if "draft" in arguments.proposers:
            settings["draft", gamma] = {"draft": draft, "num_drafts": gamma}
        if "ngram" in arguments.proposers:
            settings["ngram", gamma] = {"proposer": specjax.NGram(gamma)}

    options = sampling(arguments, target)
    samples: dict[tuple, list[float]] = {}
    outputs: dict[tuple, specjax.Output] = {}
    dropped = 0
    turns = [(n, p, s) for n in range(arguments.rounds + 1) for p in range(len(prompts)) for s in settings]
    compiled: dict[tuple, float] = {}
    for number, prompt, name in tqdm(turns, desc="bench", unit="run", disable=None, file=sys.stderr):
        meter = Meter()
        output = specjax.generate(target, prompts[prompt], **options, **settings[name])
        outputs[name, prompt] = output
        if number == 0:
            compiled[name] = max(compiled.get(name, 0.0), output.stats.seconds)
        elif meter.busy() > _BUSY:
            dropped += 1
        else:
            samples.setdefault((name, prompt), []).append(output.stats.seconds)

    rows = []
    for name in settings:
        # A prompt counts where both sides have a clean sample.
        kept = [p for p in range(len(prompts)) if (name, p) in samples and (("plain", 0), p) in samples]
        seconds = sum(statistics.median(samples[name, p]) for p in kept)
        plain = sum(statistics.median(samples[("plain", 0), p]) for p in kept)
        rows.append(_row(name, [outputs[name, p] for p in range(len(prompts))], kept, seconds, plain))
        rows[-1]["first_call_seconds"] = compiled[name]
        rows[-1]["same_tokens"] = sum(
            outputs[name, p].tokens == outputs[("plain", 0), p].tokens for p in range(len(prompts))
        )
    report = {
        "device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "jax": jax.__version__,
        "dtype": arguments.dtype, "temperature": options["temperature"], "rule": arguments.rule,
        "exact": specjax.RULES[arguments.rule].exact,
        "prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens, "samples": len(turns) - dropped,
        "dropped": dropped, "rows": rows,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)


def _row(
    name: tuple[str, int], outputs: list[specjax.Output], kept: list[int], seconds: float, plain: float
) -> dict[str, Any]:
    stats = [output.stats for output in outputs]
    tested, passes = sum(s.tested for s in stats), sum(s.target_passes for s in stats)
    return {
        "proposer": name[0],
        "num_drafts": name[1],
        "acceptance_rate": sum(s.accepted for s in stats) / tested if tested else None,
        "mean_accepted_length": sum(s.tokens for s in stats) / passes,
        "tokens_per_second": sum(outputs[p].stats.tokens for p in kept) / seconds if seconds else None,
        "speedup": plain / seconds if seconds else None,
    }


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens each, batch 1, {report['dtype']}, "
        f"temperature {report['temperature']:g}, rule {report['rule']}, lossless rule: "
        f"{'yes' if report['exact'] else 'no'}; {report['device']}, {report['cores']} cores, jax {report['jax']}; "
        f"{report['dropped']} samples dropped"
    )
    print("\n| proposer | drafts | alpha | tau | tokens/s | speed-up | same tokens | first call, s |\n|" + "---|" * 8)
    for row in report["rows"]:
        alpha = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}"
        rate = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f} | {row['speedup']:.2f}"
        print(
            f"| {row['proposer']} | {row['num_drafts']} | {alpha} | {row['mean_accepted_length']:.2f} | {rate} | "
            f"{row['same_tokens']}/{report['prompts']} | {row['first_call_seconds']:.1f} |"
        )


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
