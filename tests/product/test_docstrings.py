"""The functions that a user calls have an example in their docstring, and it runs."""

import doctest
import inspect

import pytest

import specjax

FUNCTIONS = [name for name in specjax.__all__ if inspect.isfunction(getattr(specjax, name))]


def test_there_are_functions():
    assert {"generate", "load", "tune", "audit"} <= {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs(name, monkeypatch, tmp_path):
    """It needs `import specjax` and nothing else, and prints what it says."""
    monkeypatch.chdir(tmp_path)
    doc = inspect.getdoc(getattr(specjax, name)) or ""
    assert ">>> " in doc and f"specjax.{name}(" in doc.partition("Example:")[2]
    example = doctest.DocTestParser().get_doctest(doc, {"specjax": specjax}, name, None, None)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(example, out=said.append)
    assert tried and not failed, "".join(said)
