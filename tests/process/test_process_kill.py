"""SIGKILL ends a process that trains while it writes a checkpoint, and the run goes on."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

from kills import same
from quadratic_job import train

from specjax.training.checkpoints import saved_steps

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = {"steps": 400, "eval_every": 100, "log_every": 50}


def test_killed_and_resumed_is_uninterrupted(tmp_path):
    """The bytes are those of an undisturbed run.  `test_resume.py` has the other moments, and
    `python -m tests.kills` has every job at random moments."""
    out, log = tmp_path / "run", tmp_path / "log"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.quadratic_job", "--out", str(out), *options,
             "--save-every", "1", "--warmup-steps", "2"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def writing():
        """Are there whole checkpoints, and one that is being written?"""
        names = os.listdir(out / "state") if (out / "state").exists() else []
        return len(saved_steps(out)) > 1 and any(not name.isdigit() for name in names)

    while process.poll() is None:
        if writing():
            process.send_signal(signal.SIGSTOP)
            if writing():
                break
            process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL, log.read_text()
    assert writing()
    train(out, save_every=400, **OPTIONS)
    train(tmp_path / "whole", save_every=400, **OPTIONS)
    assert same(out, tmp_path / "whole")
