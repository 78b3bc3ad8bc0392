"""A run that was stopped, killed or signalled at any moment goes on to the bytes of one that was
not, over a job of ten numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import signal
import sys

import pytest
from kills import same
from quadratic_job import Quadratic, second, settings, train

from specjax.training import checkpoints
from specjax.training.checkpoints import saved_steps
from specjax.training.loop import fit


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run without any disturbance, whose optimizer `fit` makes."""
    out = tmp_path_factory.mktemp("quadratic") / "run"
    fit(Quadratic(), settings(out))
    return out


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 2}], ids=str)
def test_a_run_that_stops_after_every_step(tmp_path, changes, capsys):
    """It resumes eleven times, each time where it stopped."""
    train(tmp_path / "whole", **changes)
    for step in range(1, 13):
        assert not (tmp_path / "run" / "model").exists()
        train(tmp_path / "run", stop_at=step, **changes)
        said = capsys.readouterr().out
        assert (f"resumed {tmp_path / 'run'} at step {step - 1} of 12" in said) == (step > 1)
        assert (f"stopped and saved at step {step} of 12; the same command" in said) == (step < 12)
    assert same(tmp_path / "run", tmp_path / "whole")


def test_patience_is_counted_across_stops(tmp_path):
    """The best goal and the evaluations since then are part of the state."""
    for out, stops in (("whole", [0]), ("cut", [3, 7, 9, 0])):
        for stop in stops:
            more = {"patience": 2, "steps": 30, "decay_fraction": 0.0, "stop_at": stop}
            train(tmp_path / out, Quadratic(aim=second()), **more)
    assert same(tmp_path / "cut", tmp_path / "whole") and saved_steps(tmp_path / "cut")[-1] == 12


def snapshot(folder: pathlib.Path, copy: pathlib.Path) -> None:
    """A copy of a folder in which a thread writes: what SIGKILL would leave of it."""
    for name, folders, files in os.walk(folder):  # passes over a folder that is renamed meanwhile
        other = copy / pathlib.Path(name).relative_to(folder)
        for inner in (".", *folders):
            (other / inner).mkdir(parents=True, exist_ok=True)
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # removed or renamed meanwhile
                shutil.copyfile(pathlib.Path(name) / file, other / file)


def test_a_run_that_is_killed_at_any_moment(tmp_path, monkeypatch):
    """Before and after evaluations, between the parts of a save, and while a model is replaced.
    `test_process_kill.py` kills a process."""
    out, copies, hashed = tmp_path / "run", [], checkpoints._facts

    def watch(place):
        copies.append(tmp_path / f"{len(copies)} {place}")
        snapshot(out, copies[-1])

    def facts(folder):
        if folder.name in ("5", "12"):
            watch("hash")
        return hashed(folder)

    monkeypatch.setattr(checkpoints, "_facts", facts)
    train(out, Quadratic(watch=watch, aim=second()), save_every=1)
    monkeypatch.setattr(checkpoints, "_facts", hashed)
    places = [copy.name.split()[1] for copy in copies]
    assert [places.count(place) for place in ("evaluate", "export", "hash")] == [4, 3, 2]
    assert any((copy / "model.partial").exists() for copy in copies)
    replaced = tmp_path / f"{len(copies)} between two renames"
    other = next(x for x in copies if (x / "best").exists() and (x / "best.partial").exists())
    shutil.copytree(other, replaced)
    (replaced / "best").rename(replaced / "best.old")
    train(tmp_path / "whole", Quadratic(aim=second()))
    for copy in [*copies, replaced]:
        train(copy, Quadratic(aim=second()))
        assert same(copy, tmp_path / "whole"), copy.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves(tmp_path, finished, number, capsys):
    """The step is finished and saved, the handlers are those from before, and a second signal
    changes nothing."""
    ours = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, ours)  # whoever runs the tests may ignore SIGHUP
    places = []

    def watch(place):
        places.append(place)
        if places.count("evaluate") == 2 and place == "evaluate":
            for _ in range(2):
                os.kill(os.getpid(), number)

    try:
        train(tmp_path, Quadratic(watch=watch), save_every=100)
        assert signal.getsignal(number) == ours
    finally:
        signal.signal(number, before)
    assert "stopped and saved at step 6 of 12; the same command resumes" in capsys.readouterr().out
    assert saved_steps(tmp_path) == [6] and not (tmp_path / "model").exists()
    train(tmp_path)
    assert same(tmp_path, finished)


def test_nohup_stays(tmp_path, finished):
    """A run that was begun with SIGHUP ignored does not end at one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(tmp_path, Quadratic(watch=lambda place: os.kill(os.getpid(), signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert same(tmp_path, finished)


class Gone:
    """A stdout whose reader goes after the first evaluation."""

    def __init__(self):
        self.lines = 0

    def write(self, text):
        self.lines += "distance" in text
        if self.lines > 1:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return len(text)

    def flush(self):
        pass


def test_a_stdout_that_closes_saves_first(tmp_path, finished, monkeypatch):
    """The step is saved, the error says so, and the run resumes to the same bytes."""
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", Gone())
        message = r"the output has closed \(.*Broken pipe\); saved at step 6 of 12"
        with pytest.raises(OSError, match=message):
            train(tmp_path, save_every=100)
    assert saved_steps(tmp_path) == [6]
    train(tmp_path)
    assert same(tmp_path, finished)


def test_what_a_job_watches_changes_no_program():
    """Jobs of these tests share one program, or each of their runs would compile its own."""
    first, other = Quadratic(), Quadratic(aim=1.0, broken=3, watch=print, inputs={})
    assert first == other and hash(first) == hash(other)
    assert dataclasses.replace(first, size=3) != first
