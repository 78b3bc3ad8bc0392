"""Speculation keeps the bits of plain decoding in programs that XLA optimises as it does by
default."""

import os
import pathlib
import subprocess
import sys

import bits_by_default
import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("case", bits_by_default.CASES)
def test_optimised_programs_keep_the_bits(case):
    """Neither reading the prompt's hidden states nor penalising tokens on a path may change a
    bit."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS.parent), environment.get("PYTHONPATH")])
    )
    command = [sys.executable, str(TESTS / "bits_by_default.py"), case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compared, wrong = map(int, done.stdout.split())
    assert compared >= 64
    assert wrong == 0
