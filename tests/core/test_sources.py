"""Each source of drafts, without a decoder: draft models, stored texts, heads of one pass.

`source_cases.py` says how they are driven; `test_sources_of_features.py` has the others.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from source_cases import (
    CASES,
    DEPTH,
    FULL,
    LENGTHS,
    OF_FEATURES,
    ROWS,
    TEXTS,
    block_of,
    check_along_a_text,
    check_in_parts,
    lookaheads,
    made,
    programs,
)
from table_model import TableModel
from toy_models import VOCAB
from toys import shipped

from specjax import LanguageModel
from specjax.contract import BlockSource, Source
from specjax.contract.proposer import before
from specjax.methods import BlockDraftSource, EarlyExitSource

NAMES = [name for name in CASES if name not in OF_FEATURES]


def test_every_source_has_a_case():
    """Each of those that specjax ships."""
    sources = {type(made(name).source) for name in CASES}
    assert sources == {*shipped(Source), *shipped(BlockSource)}
    assert {BlockDraftSource, EarlyExitSource} <= sources


@pytest.mark.parametrize("name", NAMES)
def test_logits_along_a_text_are_those_of_a_naive_pass(name):
    check_along_a_text(name)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not n.startswith(("early exit", "near self"))]
)
def test_a_prompt_that_is_read_in_parts_is_read(name):
    check_in_parts(name)


def test_what_is_unread_has_room_for_a_step():
    """A step commits the drafts of a path and one token more, and nothing wider is read for it."""
    sizes, zero = {}, np.zeros(ROWS, int)
    for name in CASES:
        case = made(name)
        empty = before(block_of(case, TEXTS[:, :2], zero, zero))
        state = jax.eval_shape(
            lambda params, block, case=case: case.source.init(
                params, block, case.capacity, *lookaheads(case)
            ),
            case.params, empty,
        )  # fmt: skip
        if hasattr(state, "fresh"):
            sizes[name] = state.fresh.shape[:2]
    assert set(sizes.values()) == {(ROWS, DEPTH + 1)} and len(sizes) > 9


def test_what_was_missed_is_read_to_the_end_of_the_room():
    """A draft model that was left out reads all of texts that fill the array they stand in."""
    case, at = made("draft, chain"), LENGTHS - 1
    begin, step, leave_out = programs(case)
    state = begin(case.params, block_of(case, TEXTS[:, : LENGTHS.max()], at, at * 0))
    places = np.tile(np.arange(DEPTH + 1), (ROWS, 1)).astype(np.int32)
    while (at < FULL - 1).any():
        count = np.minimum(FULL - 1 - at, DEPTH + 1)
        tokens = np.take_along_axis(TEXTS, at[:, None] + places, axis=1)
        state = leave_out(case.params, state, block_of(case, tokens, count, at))
        at = at + count
    tokens = TEXTS[:, FULL - 1 : FULL + DEPTH]
    block = block_of(case, tokens, at * 0, at)
    made_here = step(case.params, state, tokens, places - 1, np.int64(DEPTH), block, places, at)
    for row in range(ROWS - 1):  # the last one is not wanted
        wanted = case.logits(TEXTS[row, :FULL].tolist(), ())
        np.testing.assert_array_equal(made_here[1][row, 0], wanted)


@pytest.mark.parametrize("other", ["target", "draft"])
def test_a_draft_is_bound_to_the_models_that_it_was_made_for(other):
    """Also if only one of them is another, with the names of both."""
    source, params = made("draft, chain").source, made("draft, chain").params
    models = {"target": TableModel(VOCAB), "draft": source.model}

    def bound():
        target, draft = (LanguageModel(model, params, name=name) for name, model in models.items())
        return source.bind(target, draft)

    assert bound() is params
    models[other] = TableModel(VOCAB + 9)
    with pytest.raises(ValueError, match="made for other models than draft and target"):
        bound()


REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a tap too few": ("eagle3, chain", {"taps": (2,)}, ["taps=(2,)", "2 layers: name as many"]),
    "a tap too many": ("peagle", {"taps": (0, 1, 2)}, ["taps=(0, 1, 2)", "2 layers"]),
    "no correction": (
        "block draft, rnn", {"correction": None}, ["confidence_threshold=0.5", "leave it at 0"],
    ),
    "a correction without estimates": (
        "block draft, gru", {"confidence_threshold": 0.25}, ["confidence_threshold=0.25 needs"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    """The error names the value and the cure."""
    name, changes, words = REFUSED[what]
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(made(name).source, **changes)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
