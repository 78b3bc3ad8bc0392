"""python -m bench.pages: the requests that fit the memory of a few slots, with and without pages.

Lengths are log-normal with the means of ShareGPT's conversations in vLLM's paper (arXiv 2309.06180,
figure 11): prompts of 161 tokens, texts of 338.  The target is small and random, since only lengths
matter.  All requests come at once.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np

from bench.command import Report, run
from specjax import LinenModel, Request, Transformer, TransformerConfig
from specjax.models import LanguageModel, cpu_attend
from specjax.options import fields
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.serve import Engine

MEANS, SPREAD = (161.0, 338.0), 1.0
"""The mean lengths of prompts and texts, and the deviation of their logarithms."""


@dataclasses.dataclass(frozen=True)
class PageOptions(fields.Options):
    """The options of `python -m bench.pages`."""

    requests: int = fields.option(160, "number of requests")
    slots: int = fields.option(8, "slots of the engine without pages, whose memory both have")
    rows: int = fields.option(64, "slots of the engine with pages")
    capacity: int = fields.option(4096, "the most tokens of a prompt with its output")
    json: str | None = fields.option(None, "write the report to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(PageOptions, argv, (__doc__ or "").split("\n")[0], "python -m bench.pages")
    for name in ("requests", "slots", "rows"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    report = measure(arguments)
    print("| | at once, most | mean | set back | tokens/s |\n|---|---|---|---|---|")
    for row in report["rows"]:
        print(f"| {' | '.join(str(cell) for cell in row.values())} |")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1))


def measure(arguments: PageOptions) -> Report:
    """The report of both engines."""
    config = TransformerConfig(
        vocab_size=64, hidden_size=32, mlp_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=16, max_positions=arguments.capacity,
    )  # fmt: skip
    model = LinenModel(Transformer(config, attend=cpu_attend))
    target = LanguageModel(model, model.init(jax.random.key(0)), None, (), "random")
    tokens = arguments.slots * arguments.capacity
    engines = {
        f"{arguments.slots} slots of {arguments.capacity} tokens": {"slots": arguments.slots},
        f"pages for {tokens} tokens": {"slots": arguments.rows, "cache_tokens": tokens},
    }
    rows = []
    for name, room in engines.items():
        say(name)
        more: dict[str, Any] = {
            "capacity": arguments.capacity,
            "waiting": arguments.requests,
            **room,
        }
        with Engine(target, **more) as engine:
            rows.append({"engine": name, **served(engine, lengths(arguments))})
    return {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "rows": rows}


def lengths(arguments: PageOptions) -> list[tuple[int, int]]:
    """Returns the tokens of each prompt and text."""
    drawn = np.random.default_rng(0)

    def of(mean: float) -> np.ndarray:
        made = drawn.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, arguments.requests)
        return np.clip(made.astype(int), 2, arguments.capacity // 2 - 1)

    return list(zip(of(MEANS[0]).tolist(), of(MEANS[1]).tolist(), strict=True))


def served(engine: Engine, sizes: list[tuple[int, int]]) -> Report:
    """Returns how many requests run at once until the last one has begun."""
    drawn, began = np.random.default_rng(1), time.perf_counter()
    handles = [
        engine.submit(Request(prompts=[drawn.integers(64, size=prompt).tolist()], eos=[],
                              max_new_tokens=new))
        for prompt, new in sizes
    ]  # fmt: skip
    running = []
    while engine.load().waiting:
        running.append(engine.load().running)
        time.sleep(0.01)
    count = sum(len(handle.result().tokens) for handle in handles)
    return {
        "most": max(running, default=len(sizes)),
        "mean": round(float(np.mean(running or [len(sizes)])), 1),
        "set_back": engine.load().set_back,
        "tokens_per_second": round(count / (time.perf_counter() - began)),
    }


if __name__ == "__main__":
    run(main)
