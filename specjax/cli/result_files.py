"""Writes results of `specjax bench --dataset` as vLLM and aiperf write theirs.

`write_vllm` writes a line for each drafter, as `vllm bench serve --save-result --append-result`:
the rate of acceptance is a percentage of all proposed drafts, and entry i of the rates by position
is the share of drafting passes that accepted the draft at position i, counted in one more decoding
of the prompts.  Latencies of first tokens are left out: they were not measured.  Times are those of
the questions with an undisturbed sample.

`write_aiperf` writes a folder for each drafter with `profile_export_aiperf.json`, and with a record
for each question in `profile_export.jsonl`, from which `aiperf speed-bench-report` makes its table.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from specjax.cli.asking import Asking
from specjax.cli.entries import Entry
from specjax.cli.report import label
from specjax.decoding import Decoder, Summary
from specjax.generation import capacity_for, padded_length
from specjax.measure import measure, medians
from specjax.types import Json, Params

_PERCENTILES = (50, 90, 95, 99)


def write_vllm(
    path: pathlib.Path, asking: Asking, entries: Sequence[Entry], report: Mapping[str, object]
) -> None:
    """Writes a line of JSON for each entry."""
    lines = [json.dumps(_result(asking, entry, report)) for entry in entries]
    path.write_text("\n".join(lines) + "\n")


def name_of(asking: Asking, entry: Entry) -> str:
    """Returns the target with the drafter and its settings, by which rows are told apart."""
    facts = entry.facts
    thinking = f", thinking {facts['thinking']}" if "thinking" in facts else ""
    return (
        f"{asking.target.name}, {label(facts)} {facts['num_drafts']}, {facts['rule']}, "
        f"T={facts['temperature']:g}{thinking}"
    )


def _result(asking: Asking, entry: Entry, report: Mapping[str, object]) -> dict[str, object]:
    stats = _stats(entry)
    seconds = _seconds(entry)
    each = np.array(list(seconds.values()))
    total = _sums([s for some in stats.values() for s in some])
    prompts = [
        ids
        for item in stats
        for ids in asking.prompts(item, entry.outputs[item], entry.facts.get("thinking"))
    ]
    made, read = total["tokens"], sum(map(len, prompts))
    duration = float(each.sum())
    timed = sum(s.tokens for item in seconds for s in stats[item])
    result: dict[str, object] = {
        "date": report.get("date"),
        "backend": "specjax",
        "label": name_of(asking, entry),
        "model_id": asking.target.name,
        "tokenizer_id": asking.target.name,
        "num_prompts": len(stats),
        "request_rate": "inf",
        "max_concurrency": 1,
        "temperature": entry.facts["temperature"],
        "exact": entry.facts["exact"],
        "duration": duration,
        "completed": len(stats),
        "failed": 0,
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(seconds) / duration if duration else None,
        "output_throughput": timed / duration if duration else None,
    }
    if len(each):
        milliseconds = 1e3 * each
        result |= {
            "mean_e2el_ms": float(milliseconds.mean()),
            "median_e2el_ms": float(np.median(milliseconds)),
            "std_e2el_ms": float(milliseconds.std()),
            **{f"p{p}_e2el_ms": float(np.percentile(milliseconds, p)) for p in _PERCENTILES},
        }
    if drafting := total["drafting"]:
        result |= {
            "spec_decode_acceptance_rate": 100 * total["accepted"] / total["proposed"],
            "spec_decode_acceptance_length": 1 + total["accepted"] / drafting,
            "spec_decode_num_drafts": drafting,
            "spec_decode_draft_tokens": total["proposed"],
            "spec_decode_accepted_tokens": total["accepted"],
            "spec_decode_per_position_acceptance_rates": _by_position(asking, entry, prompts),
        }
    return result


def _by_position(asking: Asking, entry: Entry, prompts: list[list[int]]) -> list[float]:
    """Decodes the prompts once more, and counts accepted drafts of each position."""
    options, new = entry.options, asking.max_new_tokens
    drafter, rule = options.get("drafter"), options.get("rule")
    assert drafter is not None and rule is not None and not isinstance(rule, str)
    target, proposer = asking.target, drafter.proposer
    longest = max(map(len, prompts))
    capacity = capacity_for(proposer, padded_length(longest), longest + new)
    eos = () if options.get("eos") == [] else target.eos
    decoder = Decoder(target.model, proposer, rule, eos, capacity)
    params = Params(target.params, drafter.arrays(target, 1))
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = {name: cast(float, options.get(name)) for name in names}
    found = measure(decoder, params, prompts, new, batch=1, settings=settings, seed=0).counts
    # Passes whose first draft was judged are those that had drafts.
    drafting = int(np.asarray(found.tested)[:, 0].sum())
    return [int(n) / max(drafting, 1) for n in np.asarray(found.accepted).sum(0)]


def write_aiperf(
    folder: pathlib.Path, dataset: str, asking: Asking, entries: Sequence[Entry]
) -> None:
    """Writes a folder for each entry into `folder`."""
    for number, entry in enumerate(entries):
        name = name_of(asking, entry)
        own = folder / f"{number:02}-{re.sub(r'[^A-Za-z0-9.=-]+', '-', name)}"
        own.mkdir(parents=True, exist_ok=True)
        stats, seconds = _stats(entry), _seconds(entry)
        total = _sums([s for some in stats.values() for s in some])
        duration = sum(seconds.values())
        profile: dict[str, object] = {
            "input_config": {
                "models": {"items": [{"name": name}]},
                "datasets": [{"format": dataset}],
            },
        }
        if duration:
            timed = sum(s.tokens for item in seconds for s in stats[item])
            profile["output_token_throughput"] = {
                "unit": "tokens/sec", "avg": timed / duration,
            }  # fmt: skip
        if total["drafting"]:
            length = 1 + total["accepted"] / total["drafting"]
            rate = 100 * total["accepted"] / total["proposed"]
            profile["spec_decode_token_weighted_acceptance_length"] = {
                "unit": "ratio", "avg": length,
            }  # fmt: skip
            profile["spec_decode_overall_draft_acceptance_rate"] = {"unit": "%", "avg": rate}
        (own / "profile_export_aiperf.json").write_text(json.dumps(profile, indent=1) + "\n")
        with open(own / "profile_export.jsonl", "w") as file:
            for item, some in stats.items():
                sums = _sums(some)
                record: dict[str, Json] = {
                    "metadata": {
                        "source_kind": asking.questions[item].category,
                        "x_request_id": asking.questions[item].name,
                        "benchmark_phase": "profiling",
                    },
                    "metrics": {},
                    "spec_decode_acceptance": {
                        "num_accepted_draft_tokens": sums["accepted"],
                        "num_draft_tokens": sums["proposed"],
                        "num_spec_steps": sums["drafting"],
                    },
                    "error": None,
                }
                if item in seconds:
                    record["metrics"] = {
                        "request_latency": {"value": 1e3 * seconds[item], "unit": "ms"},
                        "output_token_count": {"value": sums["tokens"], "unit": "tokens"},
                    }
                file.write(json.dumps(record) + "\n")


def _stats(entry: Entry) -> dict[int, list[Summary]]:
    """Returns the figures of each turn of each question."""
    return {
        item: [output.stats for output in entry.outputs[item]] for item in sorted(entry.outputs)
    }


def _seconds(entry: Entry) -> dict[int, float]:
    """Returns the median seconds of each question that has an undisturbed sample."""
    known = [item for item, samples in enumerate(entry.seconds) if samples]
    values = medians([entry.seconds[item] for item in known])
    return dict(zip(known, values.tolist(), strict=True))


def _sums(stats: Sequence[Summary]) -> dict[str, int]:
    names = ("tokens", "accepted", "proposed", "drafting")
    return {name: sum(getattr(s, name) for s in stats) for name in names}
