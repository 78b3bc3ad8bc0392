"""Training on eight devices, which take a process: the losses of one device, and errors before anything is compiled."""

import os
import pathlib
import subprocess
import sys

import pytest

from train.mesh import mesh_of_run
from train.pretrain import PretrainOptions

ROOT = pathlib.Path(__file__).parent.parent


def test_every_job_on_eight_devices(tmp_path):
    """`pretrain`, `distill` and `medusa`, data-parallel, FSDP and tensor-parallel at once."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "tests/train_on_meshes.py", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_batch_that_does_not_divide(monkeypatch):
    """The error says what would."""
    monkeypatch.setattr("train.mesh.row_parts", lambda mesh: 4)
    with pytest.raises(ValueError, match=r"3 sequences at a time, which 4 devices .* take a batch of 8, or"):
        mesh_of_run(PretrainOptions(data=(), batch_size=6, accumulate=2))
