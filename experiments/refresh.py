"""python -m experiments.refresh: what training on the same noise again does to reward and entropy.

`examples/grpo.py` trains with keys that are fresh in every epoch, in every second one, or never.
The reward of the rollouts of the last epoch is what a run would report.  The reward of the final
weights on keys that no run has used is the true one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jax
import numpy as np
from flax import serialization

import specjax
from examples import grpo
from specjax.measure import Interval, mean_interval, show
from specjax.rollouts import Sampler, rollout_keys

REFRESH = ("1", "2", "never")
STEPS = 2
"""Steps of an epoch."""

_FRESH = 2**32
"""The run of the keys that no training uses."""

Rows = dict[str, list[dict[str, Any]]]


def main(arguments: list[str] | None = None) -> Rows:
    """Trains and evaluates every refresh with every seed; runs that are in --out are not repeated.

    Returns:
      The facts of each run, by refresh: rewards and entropies of each step, and the true reward and
      entropy of the final weights.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(specjax.shipped("pycode/target")))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--samples", type=int, default=16, help="of a prompt, for the true reward")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/refresh"))
    options = parser.parse_args(arguments)
    rows: Rows = {}
    for name in REFRESH:
        rows[name] = [_run(options, name, seed) for seed in range(options.seeds)]
    print("| refresh | last epoch | true reward | last over true | entropy, first | true, last |")
    print("|---|---|---|---|---|---|")
    for name, runs in rows.items():
        last = np.array([np.mean(run["rewards"][-STEPS:]) for run in runs])
        true = np.array([run["true_reward"] for run in runs])
        first = np.array([np.mean(run["entropies"][:STEPS]) for run in runs])
        entropy = np.array([run["true_entropy"] for run in runs])
        cells = [_cell(each) for each in (last, true, last - true, first, entropy)]
        print(f"| {name} | {' | '.join(cells)} |")
    return rows


def _cell(values: np.ndarray) -> str:
    """Returns the mean over seeds with its 95 % interval."""
    found: Interval | None = mean_interval(values)
    return show((float(values.mean()),) if found is None else found, ".3f")


def _run(options: argparse.Namespace, refresh: str, seed: int) -> dict[str, Any]:
    folder: pathlib.Path = options.out / f"{refresh}-{seed}"
    if (folder / "facts.json").exists():
        return json.loads((folder / "facts.json").read_text())
    sizes = {
        "target": options.target, "prompts": options.prompts, "new-tokens": options.new_tokens,
        "learning-rate": options.learning_rate, "steps": options.epochs * STEPS,
        "steps-per-epoch": STEPS, "seed": seed, "refresh": refresh, "out": folder,
    }  # fmt: skip
    made = grpo.main([word for name, size in sizes.items() for word in (f"--{name}", str(size))])
    reward, entropy = _true(options, folder, seed)
    facts = {
        "rewards": made["rewards"], "entropies": made["entropies"],
        "true_reward": reward, "true_entropy": entropy,
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def _true(options: argparse.Namespace, folder: pathlib.Path, seed: int) -> tuple[float, float]:
    """Returns reward and entropy of the final weights on the prompts, with keys of their own."""
    target = specjax.load(options.target)
    assert target.tokenizer is not None
    stored = serialization.msgpack_restore((folder / "state.msgpack").read_bytes())
    params = jax.tree.map(jax.numpy.asarray, stored["state"]["params"])
    prompts = grpo.prompts_of(target, STEPS * options.prompts)
    keys = rollout_keys(_FRESH + seed, prompts, options.samples)
    sampler = Sampler(target, slots=8, max_new_tokens=options.new_tokens, num_drafts=0)
    made = sampler.sample(prompts, keys, samples=options.samples, params=params)
    rewards = [grpo.reward("", target.tokenizer.decode(text)) for text in made.texts]
    entropy = -float(made.raw_logprobs.sum() / made.mask.sum())
    return float(np.mean(rewards)), entropy


if __name__ == "__main__":
    main()
