"""Train on a mesh of two CPU devices, and print the results:

python tests/train_on_meshes.py OUT TEXT TARGET LORA

It repeats what `tests/test_train_meshes.py` did on one device.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax

from specjax.training.jobs import distill

SIZES = ("--hidden-size", "16", "--mlp-size", "32", "--num-layers", "1", "--num-heads", "2",
         "--num-kv-heads", "1")  # fmt: skip
COMMON = ("--sequence-length", "32", "--eval-batches", "1", "--eval-every", "3", "--log-every", "1",
          "--batch-size", "4", "--warmup-steps", "1", "--steps", "3", "--sampled-fraction", "0",
          "--sampled-prompt", "4", "--learning-rate", "0.01")  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "lora and muon": (*SIZES, "--lora", "LORA", "--optimizer", "muon"),
    "int8": (*SIZES, "--dtype", "int8"),
    "layers of the target": ("--from-layers", "0",),
    "early exit": ("--early-exit", "1", "--dtype", "bfloat16"),
}  # fmt: skip
MESHES = {
    "lora and muon": ("fsdp=2", "model=2"),
    "int8": ("model=2",),
    "layers of the target": ("fsdp=2",),
    "early exit": ("model=2",),
}


def train(case: str, out: str, text: str, target: str, lora: str, *more: str) -> list[dict]:
    """The metrics of a run without its times."""
    options = [lora if value == "LORA" else value for value in CASES[case]]
    distill.main(
        ["--target", target, "--data", text, "--out", out, *COMMON, *options, *more]
    )  # fmt: skip
    lines = (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name != "tokens_per_second"}
        for line in lines
    ]


def main() -> None:
    out, text, target, lora = sys.argv[1:]
    assert jax.device_count() == 2
    for case, meshes in MESHES.items():
        for mesh in meshes:
            lines = train(case, f"{out}/{case} {mesh}", text, target, lora, "--mesh", mesh)
            print("RESULT", json.dumps([case, mesh, lines]))


if __name__ == "__main__":
    main()
