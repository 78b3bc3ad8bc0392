"""The examples run as scripts, and through the command line, on table models that stand in for the
checkpoint; `tests/product/test_examples_shipped.py` runs them on the checkpoint."""

import pathlib
import runpy
import sys

import pytest
import table_pair

import specjax
from specjax.cli import main
from specjax.drafters import drafter_by_name, own_drafter

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run an example's file as a script, from the root of the checkout; what it prints."""
    monkeypatch.chdir(ROOT)
    table_pair.stand_in(monkeypatch, ROOT / "checkpoints" / "pycode")

    def run(name):
        runpy.run_path(f"examples/{name}.py", run_name="__main__")
        return capsys.readouterr().out

    return run


def test_an_example_is_short():
    for path in (ROOT / "examples").glob("own_*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


def test_a_proposer_of_ones_own(run, capsys):
    """With weights, through `generate` and through the command line: the text of plain decoding."""
    assert "lossless" in run("own_proposer")
    # The prompt and the length of the example, whose programs are compiled.
    main(["generate", "def fibonacci(n):", "--max-new-tokens", "32", "--proposer",
          "examples.own_proposer:bigrams"])  # fmt: skip
    table = capsys.readouterr().out
    assert "same tokens                    yes" in table
    assert "no drafts" not in table


def test_a_rule_of_ones_own(run):
    """It says that it is inexact, and another number does not compile."""
    first, second = (line for line in run("own_rule").splitlines() if "tau" in line)
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


def test_an_own_module_leaves_the_path_as_it_was(tmp_path, monkeypatch):
    """It is found in the working directory, also by the function that it names, and the directory
    is not searched afterwards."""
    (tmp_path / "own_helper.py").write_text("DEPTH = 3\n")
    (tmp_path / "own_module.py").write_text(
        "import specjax\n\n"
        "def make(target, draft):\n"
        "    import own_helper\n"
        "    return specjax.NGram(own_helper.DEPTH)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = list(sys.path)
    assert drafter_by_name("own_module:make", None).proposer == specjax.NGram(3)
    assert sys.path == before
    with pytest.raises(ValueError, match="cannot be imported"):
        own_drafter(":make", None, None)
    assert sys.path == before


@pytest.mark.parametrize(
    "name", ["none", "ngram", "early-exit", "self-int8", "self-int4", "own_module:make"]
)
def test_a_dtype_that_nothing_would_use(name):
    """It is refused, and not ignored."""
    cure = "specjax.quantise" if ":" in name else "leave it out"
    with pytest.raises(ValueError, match=rf"dtype='int8' quantises the draft of .*: .*{cure}"):
        drafter_by_name(name, None, dtype="int8")
