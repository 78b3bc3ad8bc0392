"""Training from a program of one's own: the example of the docs, and `fit`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import trained

import specjax
from specjax import training
from specjax.training.jobs import distill

BLOCK = re.search(
    r"^## A loop of one's own.*?^```python\n(.*?)^```",
    (trained.SOURCE / "docs" / "training.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


def test_the_example_of_the_docs(tmp_path):
    """It has at most 30 lines, its draft improves, and the exported folder loads."""
    assert BLOCK is not None
    code = BLOCK[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    for name in ("checkpoints", "specjax"):
        (tmp_path / name).symlink_to(trained.SOURCE / name)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(trained.SOURCE)},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    reports = [
        ast.literal_eval(line.partition(": ")[2])
        for line in done.stdout.splitlines()
        if line.startswith(("before: ", "after: "))
    ]
    assert reports[0]["held_out_alpha"] + 0.02 < reports[1]["held_out_alpha"]
    assert specjax.load(tmp_path / "runs" / "own" / "model").model.vocab_size == 512


def test_fit_is_the_command(tmp_path):
    """A job that a program makes and runs has the bytes of the command's; its models are named in
    `run.json`."""
    sizes = {"hidden_size": 16, "mlp_size": 16, "num_heads": 2, "num_kv_heads": 1}
    common = {"target": str(trained.target()), "sequence_length": 32, "batch_size": 4, "steps": 2,
              "sampled_fraction": 0.0, "sampled_prompt": 4, "eval_batches": 1, **sizes}  # fmt: skip
    options = training.DistillOptions(
        data=(str(trained.text()),), out=str(tmp_path / "own"), **common
    )
    job = training.distillation(options)
    training.fit(job, job.options)
    line = [f"--{name.replace('_', '-')}={value}" for name, value in common.items()]
    distill.main([*line, "--data", str(trained.text()), "--out", str(tmp_path / "command")])
    own, command = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("own", "command")
    )
    assert own == command
    models = specjax.files.read_json(tmp_path / "own" / "run.json")["models"]
    assert models["target"]["folder"] == str(trained.target())
    assert models["draft"]["folder"] is None and models["draft"]["hidden_size"] == 16
    draft = specjax.load(tmp_path / "own" / "model")
    assert models["draft"]["parameters"] == draft.num_params
