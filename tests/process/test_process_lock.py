"""Two processes that begin one run at once: one of them runs, the other one is refused."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

from specjax.training.checkpoints import saved_steps

ROOT = pathlib.Path(__file__).parents[2]


def test_two_processes_race_for_a_folder(tmp_path):
    """The error names the process that has the folder, which goes on until SIGTERM."""
    command = [sys.executable, "-m", "tests.quadratic_job", "--out", str(tmp_path)]
    more = ["--steps", "100000000", "--save-every", "100000000"]
    processes = [
        subprocess.Popen(
            command + more, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.05)
        refused, running = sorted(processes, key=lambda process: process.poll() is None)
        assert refused.stdout is not None and running.stdout is not None
        said = refused.stdout.read()
        assert refused.returncode not in (0, -signal.SIGTERM), said
        assert f"another run is writing to --out {tmp_path} (process {running.pid} on " in said
        for line in running.stdout:
            if "loss" in line:  # it handles signals from its first step on
                running.send_signal(signal.SIGTERM)
                break
        rest = running.stdout.read()
        assert running.wait() == 0 and "the same command resumes" in rest, rest
        assert len(saved_steps(tmp_path)) == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()
