"""The functions that a user calls have an example in their docstring, and it runs; so do those of
the classes that have one."""

import doctest
import inspect
import pathlib

import pytest

import specjax

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "checkpoints"
CLASSES = [
    name
    for name in specjax.__all__
    if inspect.isclass(getattr(specjax, name)) and ">>> " in (getattr(specjax, name).__doc__ or "")
]
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


class Runs(doctest.OutputChecker):
    """Accepts any output of an example that does not say what it prints."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def test_there_are_classes():
    assert {"Chain", "NGram", "Match", "Rejection", "Regex", "BestFirst"} <= {*CLASSES}


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_a_class_runs(name, monkeypatch):
    """It takes a target, a draft, a prompt and a constraint as given, and names the class."""
    pair = CHECKPOINTS / ("pycode" if name == "BestFirst" else "tiny")
    load = specjax.load_drafter
    monkeypatch.setattr(
        specjax, "load_drafter", lambda _, *rest, **more: load(pair / "medusa", *rest, **more)
    )
    given = {
        "specjax": specjax,
        name: getattr(specjax, name),
        "target": specjax.load(pair / "target"),
        "draft": specjax.load(pair / "draft"),
        "prompt": "import os\n",
        "constraint": specjax.Regex("[a-z]{4}"),
    }
    doc = inspect.getdoc(getattr(specjax, name)) or ""
    example = doctest.DocTestParser().get_doctest(doc, given, name, None, None)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(Runs()).run(example, out=said.append)
    assert tried and not failed, "".join(said)
