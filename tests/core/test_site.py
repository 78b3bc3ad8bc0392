"""What docs/hooks.py adds to the site: drawings that show something, and a complete reference."""

import importlib
import pathlib
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import specjax

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def load(name, monkeypatch):
    """A module of docs/, which is no package."""
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["loop", "tree", "mask", "cache", "match", "rejection"])
def test_a_drawing_is_not_blank(name, monkeypatch):
    """Ink of several colours covers a part of it, and no text reaches beyond its border."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawings = load("drawings", monkeypatch)
    figure = drawings.DRAWINGS[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    ink = (pixels != 255).any(-1)
    assert 0.005 < ink.mean() < 0.8
    assert len(np.unique(pixels[ink], axis=0)) > 10
    border = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
    assert not border.any()


def test_pages_show_every_drawing(monkeypatch):
    drawings = load("drawings", monkeypatch)
    pages = "".join(page.read_text() for page in (DOCS / "concepts").glob("*.md"))
    assert all(f"(../drawings/{name}.svg)" in pages for name in drawings.DRAWINGS)


def test_the_drawn_step_is_one(monkeypatch):
    """The accepted path of the drawings is a path of their tree, from its root."""
    drawings = load("drawings", monkeypatch)
    parents = [drawings.PARENT[node] for node in drawings.ACCEPTED]
    assert parents == [-1, *drawings.ACCEPTED[:-1]]
    assert len(drawings.WORDS) == len(drawings.PARENT)


def test_a_picture_shows_what_was_printed(monkeypatch):
    """All characters, in the colours of their escapes, and nothing that a browser would execute."""
    made = load("picture", monkeypatch).picture(
        "demo", "a \033[32m<b>\033[0m\033[36mc\033[0m\n\n  d\n"
    )
    svg = ElementTree.fromstring(made)
    lines = [line for line in svg if line.tag.endswith("text")]
    assert ["".join(line.itertext()) for line in lines] == ["$ demo", "a <b>c", "  d"]
    assert [(span.text, span.get("fill")) for span in lines[1]] == [
        ("<b>", "#2da44e"),
        ("c", "#0f9aa8"),
    ]
    assert [line.get("y") for line in lines] == ["28.75", "62.75", "96.75"]


def test_the_picture_of_the_readme_is_of_a_demo_that_kept_the_tokens():
    svg = ElementTree.parse(DOCS / "plots" / "demo.svg").getroot()
    lines = ["".join(line.itertext()) for line in svg if line.tag.endswith("text")]
    assert "The same tokens in every row of a table: yes" in lines
    drafted = [span for span in svg.iter() if span.get("fill") == "#2da44e"]
    assert len(drafted) > 10, "a demo with hardly a draft: make the picture on a quiet machine"


def test_the_reference_has_every_public_name_once(monkeypatch):
    """By what it is and not by its name, since rooms pass names on."""
    reference = load("reference", monkeypatch)
    assert set(reference.public("specjax")) == set(specjax.__all__)
    shown = {}
    for page, module in reference.PAGES.items():
        markdown = reference.markdown_of(module)
        for name in reference.public(module):
            full = reference.settled(f"{module}.{name}")
            listed = re.search(rf"^Constants: .*`{name}`", markdown, re.MULTILINE)
            if listed or re.search(rf"^::: {re.escape(full)}$", markdown, re.MULTILINE):
                assert full not in shown, (page, name)
                shown[full] = page
    for module in reference.PAGES.values():
        for name in reference.public(module):
            assert reference.settled(f"{module}.{name}") in shown, (module, name)
    assert shown["specjax.generation.run.generate"] == "index"
    (overlapped,) = (page for name, page in shown.items() if name.endswith(".Overlapped"))
    assert overlapped == "overlap"


def test_what_the_front_exports_is_documented():
    """Classes and functions of `specjax` have docstrings of their own, which the site prints."""
    for name in specjax.__all__:
        thing = getattr(specjax, name)
        if callable(thing) and getattr(thing, "__module__", "").startswith("specjax"):
            assert (thing.__doc__ or "").strip(), name
            assert not thing.__doc__.startswith(f"{name}("), f"{name} has a generated docstring"
