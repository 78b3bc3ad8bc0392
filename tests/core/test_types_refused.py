"""Arguments of another type are refused by name, where Python would raise its own errors."""

import pathlib

import numpy as np
import pytest
from preparing import prepared

import specjax
from tests.fuzz import bases

TARGET = bases.model("llama", num_layers=2)
SOURCE = specjax.DraftSource(TARGET.model, bases.VOCAB)
HEADS = specjax.MedusaAdapter.create(TARGET, 2).heads

CALLS = {
    "num_drafts of a chain": lambda v: specjax.Chain(SOURCE, num_drafts=v),
    "num_drafts of ngram": lambda v: specjax.NGram(num_drafts=v),
    "max_ngram": lambda v: specjax.NGram(max_ngram=v),
    "min_ngram": lambda v: specjax.NGram(min_ngram=v),
    "branching": lambda v: specjax.StaticTree(SOURCE, branching=v),
    "branching of a draft": lambda v: specjax.DraftTree(TARGET.model, bases.VOCAB, (v,)),
    "depth": lambda v: specjax.DynamicTree(SOURCE, depth=v),
    "width": lambda v: specjax.DynamicTree(SOURCE, width=v),
    "num_nodes": lambda v: specjax.DynamicTree(SOURCE, num_nodes=v),
    "exit_layer": lambda v: specjax.EarlyExit(TARGET.model, v),
    "choices": lambda v: specjax.Medusa(HEADS, [[v]]),
    "heads": lambda v: specjax.Medusa(v),
    "draft": lambda v: specjax.make_drafter(TARGET, v),
    "target": lambda v: specjax.make_drafter(v, TARGET),
    "target of heads": lambda v: specjax.load_medusa("x", v),
    "dtype": lambda v: specjax.make_drafter(TARGET, TARGET, dtype=v),
    "dtype of a model": lambda v: specjax.load(pathlib.Path(__file__).parent, v),
    "draft_dtype": lambda v: prepared(TARGET, [[1]], draft=TARGET, draft_dtype=v),
    "precision": lambda v: specjax.load(pathlib.Path(__file__).parent, precision=v),
}


@pytest.mark.parametrize("value", ["x", [1.5], 2.5, np.zeros(2)], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_another_type(name, value):
    """The error names the argument."""
    with pytest.raises(ValueError, match=name.split()[0]):
        CALLS[name](value)


@pytest.mark.parametrize("value", [5, None, "a\0b", b"x"], ids=repr)
def test_a_path_of_another_type(value):
    """Neither a TypeError nor an error about null bytes."""
    with pytest.raises(ValueError, match="path="):
        specjax.load(value)
    with pytest.raises(ValueError, match="path="):
        specjax.load_medusa(value, TARGET)


@pytest.mark.parametrize("value", [np.array(["x"], object), np.array([None])])
def test_a_fraction_of_another_type(value):
    with pytest.raises(ValueError, match="posterior_alpha"):
        specjax.Typical(posterior_alpha=value)


def test_a_threshold_of_another_type():
    """A text is no probability."""
    with pytest.raises(ValueError, match="confidence_threshold='x'"):
        specjax.Chain(SOURCE, confidence_threshold="x")
