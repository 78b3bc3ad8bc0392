"""Settings of `generate` that may differ per row."""

import os
import shutil

import folders
import language_models
import numpy as np
import pytest
from preparing import prepared

import specjax
from specjax.generation import request as requests

NEW = 40
PROMPTS = ["the cat", "on", "a hat, a dog and a rat of"]


def generate(target, prompts, **options):
    """`specjax.generate` without the measurements of the default, which `test_adaptive.py` has."""
    options.setdefault("proposer", "draft" if "draft" in options else "none")
    return specjax.generate(target, prompts, **options)


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"temperature": [0.0, 1.0, 3.0]}, [{"temperature": t} for t in (0.0, 1.0, 3.0)]),
        (
            {"temperature": 3.0, "top_k": [1, 3, 0]},
            [{"temperature": 3.0, "top_k": k} for k in (1, 3, 0)],
        ),
        (
            {"temperature": 3.0, "top_p": [1e-6, 0.5, 1.0]},
            [{"temperature": 3.0, "top_p": p} for p in (1e-6, 0.5, 1.0)],
        ),
        (
            {"temperature": 3.0, "min_p": [1.0, 0.2, 0.0]},
            [{"temperature": 3.0, "min_p": p} for p in (1.0, 0.2, 0.0)],
        ),
    ],
    ids=["temperature", "top_k", "top_p", "min_p"],
)
def test_settings_a_row(target, options, settings):
    """With a list, each row gets its own setting and the text of that prompt alone; the first
    row is greedy."""
    out = generate(target, PROMPTS[:1] * 3, seed=[7, 7, 7], max_new_tokens=NEW, **options)
    alone = [
        generate(target, PROMPTS[0], seed=[7], max_new_tokens=NEW, **setting).tokens[0]
        for setting in settings
    ]
    assert out.tokens == alone
    assert out.tokens[0] == generate(target, PROMPTS[0], max_new_tokens=NEW).tokens[0]
    assert len({tuple(row) for row in out.tokens}) == 3


def test_seeds_a_row(target):
    """Equal seeds give equal texts, other seeds other texts."""
    a, b, c = generate(
        target, PROMPTS[:1] * 3, seed=[5, 5, 6], max_new_tokens=NEW, temperature=1.0
    ).tokens
    assert a == b != c


def test_one_seed_for_all_rows(target):
    """With one seed the rows of the same prompt differ, and the next call repeats them."""
    options = {"seed": 5, "max_new_tokens": NEW, "temperature": 1.0}
    rows = generate(target, PROMPTS[:1] * 3, **options).tokens
    assert len({tuple(row) for row in rows}) == 3
    assert generate(target, PROMPTS[:1] * 3, **options).tokens == rows


@pytest.mark.parametrize("kind", [np.int64, np.uint32, int])
def test_seed_of_any_integer_type(target, kind):
    """A NumPy integer is a seed as an int is."""
    options = {"max_new_tokens": NEW, "temperature": 1.0}
    out = generate(target, PROMPTS, seed=kind(5), **options)
    assert out.tokens == generate(target, PROMPTS, seed=5, **options).tokens


def test_another_seed_is_another_text(target):
    """The seed matters."""
    one, two = (
        generate(target, PROMPTS, seed=s, max_new_tokens=NEW, temperature=1.0).tokens
        for s in (5, 6)
    )
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_a_draft_that_is_named_is_read_once(target, tmp_path, monkeypatch):
    """Until its files change, or another one is named."""
    read = []

    def load(path, **options):
        read.append(path)
        return specjax.load(path, **options)

    monkeypatch.setattr(requests, "load", load)
    for name in ("one", "two"):
        shutil.copytree(folders.draft(), tmp_path / name)
    one, two = (str(tmp_path / name) for name in ("one", "two"))

    def drafter(name):
        return prepared(target, [[5]], draft=name).decoder.proposer

    assert drafter(one) == drafter(one) and read == [one]
    drafter(two)
    os.utime(tmp_path / "two" / "config.json", ns=(1, 1))
    drafter(two)
    assert read == [one, two, two]
    monkeypatch.chdir(tmp_path / "one")
    drafter(".")
    monkeypatch.chdir(tmp_path / "two")
    drafter(".")
    assert read[3:] == [".", "."]
    requests._loaded.cache_clear()


@pytest.mark.parametrize(("depth", "nodes"), [(1, 5), (2, 16)])
def test_a_flat_dynamic_tree_has_the_nodes_that_fit(target, depth, nodes):
    """One level of four children is a tree of five nodes, though a dynamic tree has sixteen."""
    options = {"draft": target, "proposer": "dynamic-tree", "num_drafts": [1, depth]}
    proposer = prepared(target, PROMPTS[:2], **options).decoder.proposer
    assert (proposer.depth, proposer.num_nodes) == (depth, nodes)
