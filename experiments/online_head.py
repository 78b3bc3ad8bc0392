"""python -m experiments.online_head: old rollouts or a head trained online as drafts of fresh keys.

The target moves by a step of Adam between epochs, and each epoch draws with fresh keys.  An EAGLE-3
head stays as it is, or learns between the epochs from the rollouts of the epoch before and the
hidden states of the target that wrote them.  Rollouts with either head, and those with the old
rollouts to look up in, take turns with plain decoding.  Training the head is not in their times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import specjax
from bench.rollouts import moved, python_ids
from specjax.drafters import arrange
from specjax.rollouts import Rollouts, Sampler, rollout_keys
from specjax.training.jobs import drafter

_DRAFTS = 4
"""Of a head, a chain: its published tree is made for accelerators."""

_FIRST = 2
"""Turns that compile, and learn what steps take."""


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints and returns a row of each epoch and source of drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(specjax.shipped("pycode/target")))
    parser.add_argument("--head", default=str(specjax.shipped("pycode/eagle3")))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("specjax"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--head-steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/online-head"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    target = specjax.load(options.target, "float32")
    ids = python_ids(target, options.data)
    starts = np.linspace(0, len(ids) - 64, options.prompts, dtype=int)
    prompts = [ids[start : start + 64] for start in starts]

    def sampler(**more: Any) -> Sampler:
        return Sampler(target, slots=options.slots, max_new_tokens=options.new_tokens, **more)

    plain, looking = sampler(num_drafts=0), sampler()
    frozen = sampler(drafter=arrange(specjax.load_drafter(options.head, target), _DRAFTS))
    old = plain.sample(prompts, _keys(0, prompts, options), samples=options.samples)
    print("| epoch | drafts | tokens a pass | over plain |\n|---|---|---|---|")
    params, head, rows = target.params, pathlib.Path(options.head), []
    for epoch in range(1, options.epochs + 1):
        head = _trained(options, dataclasses.replace(target, params=params), old, head, epoch)
        params = moved(target, ids, options.learning_rate, epoch)
        texts = old.texts
        documents = [texts[n : n + options.samples] for n in range(0, len(texts), options.samples)]
        online = sampler(drafter=arrange(specjax.load_drafter(head, target), _DRAFTS))
        ways: dict[str, tuple[Sampler, Mapping[str, Any]]] = {
            "plain": (plain, {}), "old rollouts": (looking, {"documents": documents}),
            "frozen head": (frozen, {}), "head trained online": (online, {}),
        }  # fmt: skip
        keys, times = _keys(epoch, prompts, options), []
        made: dict[str, Rollouts] = {}
        for _ in range(options.turns + _FIRST):
            spent = []
            for name, (way, more) in ways.items():
                began = time.perf_counter()
                made[name] = way.sample(
                    prompts, keys, samples=options.samples, params=params, **more
                )
                jax.block_until_ready(made[name].tokens)
                spent.append(time.perf_counter() - began)
            times.append(spent)
        old = made["plain"]
        ratios = np.array(times)[_FIRST:, :1] / np.array(times)[_FIRST:]
        for name, ratio in zip(ways, ratios.T, strict=True):
            assert made[name].texts == old.texts
            row = {"epoch": epoch, "drafts": name,
                   "tokens_per_pass": int(old.mask.sum()) / made[name].passes,
                   "over_plain": float(np.median(ratio)), "least": float(ratio.min()),
                   "most": float(ratio.max())}  # fmt: skip
            rows.append(row)
            span = f"{row['over_plain']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            print(f"| {epoch} | {name} | {row['tokens_per_pass']:.2f} | {span} |", flush=True)
    (options.out / "rows.json").write_text(json.dumps(rows, indent=1))
    return rows


def _keys(epoch: int, prompts: list[list[int]], options: argparse.Namespace) -> jax.Array:
    return rollout_keys(0, prompts, options.samples, epoch=epoch)


def _trained(
    options: argparse.Namespace, target: specjax.LanguageModel, old: Rollouts,
    head: pathlib.Path, epoch: int,
) -> pathlib.Path:  # fmt: skip
    """Returns the folder of a head that has learned from the rollouts of a target."""
    assert target.tokenizer is not None
    model, data, out = (options.out / f"{name}-{epoch}" for name in ("target", "data", "head"))
    specjax.save(target, model)
    data.mkdir(exist_ok=True)
    texts = [json.dumps({"text": target.tokenizer.decode(text)}) for text in old.texts]
    (data / "rollouts.jsonl").write_text("\n".join(texts) + "\n")
    sizes = {
        "kind": "eagle3", "target": model, "initial": head, "data": data, "out": out,
        "steps": options.head_steps, "sequence-length": options.new_tokens // 2, "batch-size": 8,
        "learning-rate": 1e-4, "num-drafts": _DRAFTS, "sampled-prompt": options.new_tokens // 4,
    }  # fmt: skip
    drafter.main([word for name, size in sizes.items() for word in (f"--{name}", str(size))])
    return out / "model"


if __name__ == "__main__":
    main()
