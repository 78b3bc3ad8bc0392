"""A command whose streams close, whose reader goes, or that is interrupted, ends in a line."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

import pytest
import trained

from specjax.options.command import run
from specjax.options.exits import ending, open_streams
from specjax.training.jobs import pretrain


def test_the_reader_has_gone(monkeypatch, capfd):
    """The command ends silently with status 141, and what is left in the buffer goes nowhere."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream, monkeypatch.context() as context:
        context.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as caught, ending("specjax generate"):
            print("a text")
        stream.flush()
    assert caught.value.code == 141
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_elsewhere_is_an_error(capsys):
    """Such as that of a download, while stdout is whole."""
    with pytest.raises(SystemExit) as caught, ending("specjax generate"):
        raise BrokenPipeError(32, "Broken pipe")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "specjax generate: [Errno 32] Broken pipe\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_behind_stdout(monkeypatch, capsys):
    """The last lines are written before the status is decided."""
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as caught, ending("specjax bench"):
            print("a report")
        assert caught.value.code == 2
    assert "specjax bench: [Errno 28] No space left" in capsys.readouterr().err


def test_nobody_reads_the_error(monkeypatch):
    """The status stays that of the error if stderr is closed."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit) as caught, ending("specjax"):
        raise ValueError("wrong")
    assert caught.value.code == 2


def test_streams_that_are_none(monkeypatch):
    """Python sets a stream that was closed at the start to None."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_streams()
    print("nowhere")
    print("nowhere", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_an_interrupt_before_the_loop(tmp_path, monkeypatch, capsys):
    """Ctrl-C while a job reads its text is a line on stderr and status 130, and the same command
    then runs."""

    def interrupted(documents, **_):
        os.kill(os.getpid(), signal.SIGINT)
        return documents

    # A shell that runs the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as context, contextlib.ExitStack() as after:
        after.callback(signal.signal, signal.SIGINT, before)
        context.setattr("specjax.training.tokenising.tqdm", interrupted)
        context.setattr(sys, "argv", ["train.pretrain"])
        with pytest.raises(SystemExit) as caught:
            run(lambda: pretrain.main(trained.command(tmp_path)))
    assert caught.value.code == 130
    assert capsys.readouterr().err == "train: interrupted\n"
    pretrain.main(trained.command(tmp_path, "--stop-at", "1"))


def test_a_character_that_stdout_cannot_encode(monkeypatch):
    """It is escaped, as on stderr."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    open_streams()
    print("naïve 🙂", flush=True)
    assert raw.getvalue() == b"na\\xefve \\U0001f642\n"
