"""Each source of drafts that reads features of the target, or its keys and values, without a
decoder.

`source_cases.py` says how they are driven.
"""

import dataclasses

import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh
from source_cases import OF_FEATURES, check_along_a_text, check_in_parts, made

from specjax.drafters import own_shardings


@pytest.mark.parametrize("name", OF_FEATURES)
def test_logits_along_a_text_are_those_of_a_naive_pass(name):
    check_along_a_text(name)


@pytest.mark.parametrize("name", OF_FEATURES)
def test_a_prompt_that_is_read_in_parts_is_read(name):
    check_in_parts(name)


@pytest.mark.parametrize(("name", "split"), [("rnn", "after"), ("gru", "output")])
def test_the_logits_of_a_correction_are_split_over_a_mesh(name, split):
    """The matrix that makes them is split by the vocabulary, and no other one; a draft without a
    correction is placed too."""
    case = made(f"block draft, {name}")
    own, size = dict(case.params.own), case.source.correction.draft_vocab_size
    mesh = AbstractMesh((size,), ("model",))

    def placed(source):
        return own_shardings(source, own, mesh, {"vocab": "model"})

    places = flatten_dict(placed(case.source)["correction"])
    assert places.keys() == flatten_dict(own.pop("correction")).keys()
    assert [path for path, place in places.items() if any(place.spec)] == [(split,)]
    plain = dataclasses.replace(case.source, correction=None, confidence_threshold=0.0)
    assert placed(plain).keys() == own.keys()
