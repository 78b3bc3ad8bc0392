"""Ctrl-C at a command that trains: it saves, says how to resume, and ends without an error."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

from specjax.training.checkpoints import saved_steps

ROOT = pathlib.Path(__file__).parents[2]


def test_an_interrupt_saves(tmp_path):
    """`test_resume.py` has every signal and the bytes of the run that goes on."""
    command = [sys.executable, "-m", "tests.quadratic_job", "--out", str(tmp_path)]
    more = ["--steps", "100000000", "--save-every", "100000000"]
    with subprocess.Popen(
        command + more, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "loss" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "the same command resumes" in rest and "Traceback" not in rest
    assert len(saved_steps(tmp_path)) == 1
