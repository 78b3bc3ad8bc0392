"""Train on a mesh of two CPU devices, and print the results:

python tests/train_on_meshes.py OUT TEXT TARGET LORA STATES

It repeats what `tests/process/test_train_meshes.py` did on one device.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax

from specjax.training.jobs import distill, drafter

SIZES = ("--hidden-size", "16", "--mlp-size", "32", "--num-layers", "1", "--num-heads", "2",
         "--num-kv-heads", "1")  # fmt: skip
COMMON = ("--sequence-length", "32", "--eval-batches", "1", "--eval-every", "3", "--log-every", "1",
          "--batch-size", "4", "--warmup-steps", "1", "--steps", "3", "--sampled-fraction", "0",
          "--sampled-prompt", "4", "--learning-rate", "0.01")  # fmt: skip
BESIDE = ("--target", "TARGET", "--data", "TEXT", *COMMON)
RECORDED = ("--teacher", "STATES", "--num-layers", "1", "--mlp-size", "32", "--sequence-length",
            "32", "--batch-size", "4", "--eval-batches", "1", "--log-every", "1", "--steps", "3",
            "--warmup-steps", "1", "--learning-rate", "0.01")  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "lora and muon": (*BESIDE, *SIZES, "--lora", "LORA", "--optimizer", "muon"),
    "int8": (*BESIDE, *SIZES, "--dtype", "int8"),
    "layers of the target": (*BESIDE, "--from-layers", "0"),
    "early exit": (*BESIDE, "--early-exit", "1", "--dtype", "bfloat16"),
    "recorded eagle3": ("--kind", "eagle3", *RECORDED),
    "recorded dspark": ("--kind", "dspark", "--num-drafts", "3", "--markov-rank", "8", *RECORDED),
}
MESHES = {
    "lora and muon": ("fsdp=2", "model=2"),
    "int8": ("model=2",),
    "layers of the target": ("fsdp=2",),
    "early exit": ("model=2",),
    "recorded eagle3": ("fsdp=2", "model=2"),
    "recorded dspark": ("data=2", "model=2"),
}
NAMES = ("TEXT", "TARGET", "LORA", "STATES")
"""Stand for paths, in the order of the arguments."""


def train(case: str, out: str, paths: list[str], *more: str) -> list[dict]:
    """The metrics of a run without its times."""
    options = [dict(zip(NAMES, paths, strict=True)).get(value, value) for value in CASES[case]]
    job = drafter if "--kind" in options else distill
    job.main([*options, "--out", out, *more])
    lines = (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name != "tokens_per_second"}
        for line in lines
    ]


def main() -> None:
    out, *paths = sys.argv[1:]
    assert jax.device_count() == 2
    for case, meshes in MESHES.items():
        for mesh in meshes:
            lines = train(case, f"{out}/{case} {mesh}", paths, "--mesh", mesh)
            print("RESULT", json.dumps([case, mesh, lines]))


if __name__ == "__main__":
    main()
