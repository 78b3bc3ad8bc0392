"""One engine over several processes: texts of one process, and faults of messages are found."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import time

import pytest
import together
from several_devices import ROOT, environment


def run(mesh: str, count: int, fault: str = "none") -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each process; none may run on when another has ended."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    made = [
        subprocess.Popen(
            [sys.executable, "tests/together.py", mesh, f"127.0.0.1:{port}", str(count), str(n),
             fault],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(1, count),
        )
        for n in range(count)
    ]  # fmt: skip
    until = time.monotonic() + 400
    told = []
    try:
        for one in made:
            out, complaint = one.communicate(timeout=until - time.monotonic())
            told.append((one.returncode, out, complaint))
    finally:
        for one in made:
            one.kill()
    return told


@functools.cache
def alone() -> list[list[int]]:
    with together.engine(None) as made:
        return together.texts(made)


@pytest.mark.parametrize(
    ("mesh", "count"),
    [("model=2", 2), pytest.param("data=2,model=2", 4, marks=pytest.mark.slow)],
)
def test_texts_are_those_of_one_process(mesh, count):
    """With every drafter, penalties, stops, a constraint, copied beginnings and cancelled rows."""
    told = run(mesh, count)
    assert [status for status, *_ in told] == [0] * count, told
    assert [out for _, out, _ in told[1:]] == [""] * (count - 1)
    assert json.loads(told[0][1]) == alone()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lost", "message 9 of process 0 was lost"),
        pytest.param("moved", "message 9 of process 0 was lost", marks=pytest.mark.slow),
        pytest.param("repeated", "message 9 of process 0 came again", marks=pytest.mark.slow),
        pytest.param("changed", "message 9 of process 0 has changed", marks=pytest.mark.slow),
    ],
)
def test_planted_faults_end_the_group(fault, words):
    """The process that sees one says so, all end with an error, and no text is printed."""
    (first, out, complaint), (second, _, other) = run("model=2", 2, fault)
    assert first and second and out == "", (first, second, out)
    assert words in other, other[-2000:]
    assert "process 1 of 2 is gone" in complaint and words in complaint, complaint[-2000:]
