"""Speculation keeps the bits of plain decoding in programs that XLA optimises as it does by
default."""

import os
import pathlib
import subprocess
import sys

import bits_by_default
import pytest

TESTS = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def outcome():
    """{case: (rows compared, rows that differ)}, of one process for all cases."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS.parent), environment.get("PYTHONPATH")])
    )
    command = [sys.executable, str(TESTS / "bits_by_default.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {name: (int(compared), int(wrong)) for name, compared, wrong in lines}
    return found, done.stderr


@pytest.mark.parametrize("case", bits_by_default.CASES)
def test_optimised_programs_keep_the_bits(case, outcome):
    """Neither reading the prompt's hidden states nor penalising tokens on a path may change a
    bit."""
    found, errors = outcome
    assert case in found, errors
    compared, wrong = found[case]
    assert compared >= 64
    assert wrong == 0
