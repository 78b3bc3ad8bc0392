"""The examples as scripts on the shipped checkpoint; `tests/core/test_examples.py` has more."""

import runpy

import pytest
from command_line import ROOT


@pytest.mark.parametrize(
    ("name", "words"),
    [("own_proposer", "lossless"), ("own_rule", "changes the distribution")],
)
def test_an_example(monkeypatch, capsys, name, words):
    monkeypatch.chdir(ROOT)
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    assert words in capsys.readouterr().out
