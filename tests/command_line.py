"""Run the command line in this process, on the tiny checkpoint."""

from __future__ import annotations

import pathlib

import pytest

from specjax.cli import main

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny"
PAIR = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
SHORT = ["--max-new-tokens", "24"]


def run(capsys, *arguments):
    main([str(a) for a in arguments])
    return capsys.readouterr()


def failure(capsys, *arguments):
    """What a user reads on stderr when a command fails."""
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err
