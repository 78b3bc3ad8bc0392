"""What is public is listed, described, and where its users look for it."""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

import specjax
from specjax._internal import paths as folders

ROOT = pathlib.Path(__file__).parents[2]
POLICY = (ROOT / "CHANGELOG.md").read_text()
ROOMS = re.findall(r"`(specjax(?:\.\w+)*)\.__all__`", POLICY)


def described(thing):
    """Has a class, a function or a property a docstring that somebody wrote?"""
    text = thing.__dict__.get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    # A dataclass without a docstring gets its signature as one.
    generated = inspect.isclass(thing) and (text or "").startswith(f"{thing.__name__}(")
    return bool(text) and not generated


def members(kind):
    """The public methods and properties that a class of this library defines itself."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
        ):
            # Through the class, so that a method inherits the docstring of what it implements.
            yield name, value if isinstance(value, property) else getattr(kind, name)


def undescribed(room):
    module = importlib.import_module(room)
    for name in module.__all__:
        thing = inspect.unwrap(getattr(module, name))
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            # The docstring of a constant stands below it, in the module that assigns it.
            source = "".join(path.read_text() for path in (ROOT / "specjax").rglob("*.py"))
            if not re.search(rf'^{name}\b.*?\n(?:[ )}}\]].*\n)*"""', source, re.MULTILINE):
                yield f"{room}.{name}"
            continue
        if not described(thing):
            yield f"{room}.{name}"
        if inspect.isclass(thing) and thing.__module__.startswith("specjax"):
            for member, value in members(thing):
                if not described(value):
                    yield f"{room}.{name}.{member}"


def test_the_policy_names_public_rooms():
    assert {"specjax", "specjax.contract", "specjax.models"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring(room):
    """Classes with their methods and properties, functions, and constants."""
    assert not list(undescribed(room))


@pytest.mark.parametrize("room", ROOMS)
def test_the_list_is_complete(room):
    """What a door imports from its room is in `__all__`, so nothing is public by accident."""
    module = importlib.import_module(room)
    assert len(set(module.__all__)) == len(module.__all__)
    home = re.compile(rf"{re.escape(room)}\.(?!_internal)|specjax\.methods$")
    names = {
        alias.name
        for part in ast.walk(ast.parse(pathlib.Path(inspect.getfile(module)).read_text()))
        if isinstance(part, ast.ImportFrom) and home.match(part.module or "")
        for alias in part.names
    }
    assert names and names <= set(module.__all__), sorted(names - set(module.__all__))


PASSED_ON = {
    "specjax.proposers": """
        DEPTH PROPOSERS BlockDraftSource DatastoreLookup DatastoreParams DatastoreSource DraftModel
        DraftSource DraftTree Eagle3Source EarlyExit EarlyExitSource Medusa MedusaParams
        MedusaSource PEagleSource TranslatedParams TranslatedSource Universal UniversalParams
        look_up measure_ranks""",
    "specjax.models": """
        BlockDraft BlockDraftConfig CandidateSelector Correction Eagle3 Eagle3Config MarkovHead
        MedusaHeads PrefixGRU SharedParams Slot block_axes by_row draft_logits eagle3_axes
        eagle3_shapes embedding_of head_of initial_block initial_medusa medusa_hidden medusa_logits
        read_block stage_context""",
}
"""Names that were in these rooms before they moved to `specjax.methods`."""


@pytest.mark.parametrize("room", PASSED_ON)
def test_names_that_moved_are_passed_on(room):
    module, methods = importlib.import_module(room), importlib.import_module("specjax.methods")
    for name in PASSED_ON[room].split():
        assert getattr(module, name) is getattr(methods, name)
        assert inspect.getdoc(getattr(module, name))
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'Eagle4'"):
        _ = module.Eagle4


def test_a_missing_docstring_is_found(monkeypatch):
    """A function, a class and a method without one; a dataclass's own signature does not count."""

    class Bare:
        """Described."""

        def method(self): ...

    Bare.__module__ = "specjax.bare"
    monkeypatch.setattr(specjax, "Bare", Bare, raising=False)
    monkeypatch.setattr(specjax, "bare", lambda: None, raising=False)
    monkeypatch.setattr(specjax, "__all__", ["Bare", "bare", "Block", "RULES"])
    assert list(undescribed("specjax")) == ["specjax.Bare.method", "specjax.bare"]


def test_one_version():
    """The package, the list of changes and the citation name the same version."""
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == specjax.__version__
    assert re.search(r"^## (\S+)", POLICY, re.MULTILINE)[1] == specjax.__version__


def test_shipped():
    """A path below the checkpoints, or an error that names those that there are."""
    assert (specjax.shipped("pycode/target") / "config.json").is_file()
    assert specjax.shipped("pycode/prompt.txt").is_file()
    for name in ("pycode/tarjet", ""):
        with pytest.raises(FileNotFoundError, match=r"pycode/draft, .*pycode/target"):
            specjax.shipped(name)


def test_an_installed_package_has_its_own_checkpoints(monkeypatch, tmp_path):
    """And takes none of a folder beside it, which belongs to another package."""
    home = tmp_path / "specjax"
    for place in (home, tmp_path):
        (place / "checkpoints" / "pycode" / "target").mkdir(parents=True)
    monkeypatch.setattr(folders, "_HOME", home)
    assert specjax.shipped("pycode/target") == home / "checkpoints" / "pycode" / "target"
    (home / "checkpoints" / "pycode" / "target").rmdir()
    with pytest.raises(FileNotFoundError, match="a wheel or a checkout"):
        specjax.shipped("pycode/target")


LAZY = sorted(
    path for path in (ROOT / "specjax").rglob("__init__.py") if "= lazily(" in path.read_text()
)


@pytest.mark.parametrize("path", LAZY, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_lazy_package_has_all_its_names(path):
    """Also those that it imports under another name, such as `specjax.training.distillation`."""
    if path.parent == ROOT / "specjax" / "serve" / "fleet":
        pytest.importorskip("ray")  # CI has a turn with it
    package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    for name in package.__all__:
        assert getattr(package, name) is not None
