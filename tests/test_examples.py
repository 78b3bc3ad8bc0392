"""The examples run as a reader would run them: optimised, in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

from specjax.drafters import own_drafter

ROOT = pathlib.Path(__file__).parent.parent


def run(*command):
    """What it prints.  The tests' flags, which switch optimisation off, are left out."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_example_is_short():
    for path in (ROOT / "examples").glob("own_*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


def test_a_proposer_of_ones_own():
    """With weights, through `generate` and through the command line: the text of plain decoding."""
    assert "lossless" in run("-m", "examples.own_proposer")
    name = "examples.own_proposer:bigrams"
    command = (
        "-m",
        "specjax",
        "generate",
        "import os",
        "--max-new-tokens",
        "16",
        "--proposer",
        name,
    )
    table = run(*command)
    assert "same tokens                    yes" in table
    assert "no drafts" not in table


def test_a_rule_of_ones_own():
    """It says that it is inexact, and another number does not compile."""
    first, second = (line for line in run("-m", "examples.own_rule").splitlines() if "tau" in line)
    assert "changes the distribution" in first and "changes the distribution" in second
    assert "compiled" in first and "compiled" not in second


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:Thing", "cannot be imported"),
        ("specjax:Nothing", "cannot be imported"),
        ("specjax:__version__", "it must be a specjax.contract.Proposer, a specjax.Drafter"),
    ],
)
def test_a_name_that_makes_no_proposer(name, words):
    with pytest.raises(ValueError, match=words):
        own_drafter(name, None, None)
