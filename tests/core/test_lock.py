"""One run at a time in a folder: a second one is refused by name, and the lock ends with the run.
`test_process_lock.py` has two processes."""

from __future__ import annotations

import os
import threading

import pytest
from quadratic_job import Quadratic, train

from specjax.training.jobs import distill, medusa, pretrain
from specjax.training.lock import alone


def in_a_thread(call, *arguments):
    """What a call in another thread raises; None: nothing."""
    raised = []

    def run():
        try:
            call(*arguments)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def hold(folder, writes=True):
    with alone(folder, writes):
        pass


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    """The first one goes on; the lock went with it, and a file that is left is no lock."""
    seen = []

    def watch(place):
        if place == "evaluate":
            seen.append(in_a_thread(train, tmp_path))

    train(tmp_path, Quadratic(watch=watch), steps=3)
    (error,) = seen
    assert isinstance(error, ValueError)
    assert f"--out {tmp_path} (process {os.getpid()} on " in str(error)
    assert "choose another --out" in str(error)
    assert in_a_thread(hold, tmp_path) is None
    (tmp_path / "run.lock").write_text("process 1 on elsewhere")
    train(tmp_path, steps=15)


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    with pytest.raises(FloatingPointError):
        train(tmp_path, Quadratic(broken=1))
    assert in_a_thread(hold, tmp_path) is None


def test_a_folder_is_held_once(tmp_path):
    """By one thread as often as it asks, under any name; what writes nothing does not ask."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with alone(tmp_path / "run"), alone(tmp_path / "link"):
        for name in ("run", "link"):
            assert "another run is writing to" in str(in_a_thread(hold, tmp_path / name))
        assert in_a_thread(hold, tmp_path / "run", False) is None
        assert in_a_thread(hold, tmp_path / "other") is None
    assert in_a_thread(hold, tmp_path / "run") is None
    with alone(tmp_path / "run"):  # a thread that held it before locks it again
        assert "another run is writing to" in str(in_a_thread(hold, tmp_path / "run"))


@pytest.mark.parametrize("job", [pretrain, distill, medusa], ids=lambda job: job.__name__)
def test_jobs_hold_their_folder(tmp_path, job):
    """They are refused before they read a model or a text."""
    given = ["--data", "nowhere", "--out", str(tmp_path)]
    with alone(tmp_path):
        error = in_a_thread(job.main, given + ["--target", "nowhere"] * (job is not pretrain))
    assert isinstance(error, ValueError) and "another run is writing to" in str(error)
