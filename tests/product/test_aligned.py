"""Drafts from an expected text: how many tokens a pass gets, and that the text does not change."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Aligned, NGram
from specjax.proposers import FirstOf
from specjax.types import ABSENT, Block

pytestmark = pytest.mark.xdist_group("aligned")  # a share takes all of them, or none

PROMPTS = [[5, 9, 7], [11, 3, 8, 2, 40, 17], [30]]
NEW, DEPTH = 28, 6
SETTINGS = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3, "eos": []}


@functools.cache
def target() -> specjax.LanguageModel:
    return specjax.load(specjax.shipped("tiny/target"))


def texts(**options) -> specjax.Output:
    return specjax.generate(target(), PROMPTS, **SETTINGS, **options)


@functools.cache
def plain() -> list[list[int]]:
    return texts(num_drafts=0).tokens


@pytest.mark.parametrize("agreed", [False, True])
def test_the_right_text_is_accepted_whole(agreed):
    """Each pass gets the drafts and one more token."""
    made = texts(proposer=Aligned(DEPTH, agreed=agreed), expected=plain())
    assert made.tokens == plain()
    assert made.stats.target_passes == len(PROMPTS) * -(-NEW // (DEPTH + 1))


@pytest.mark.parametrize(
    "drafting",
    [
        {"proposer": Aligned(DEPTH)},
        {"proposer": Aligned(DEPTH, agreed=True)},
        {"proposer": FirstOf(Aligned(DEPTH, agreed=True), NGram(DEPTH))},
        {"num_drafts": DEPTH},
        {"proposer": "ngram"},
        {"proposer": Aligned(DEPTH), "rule": "rejection", "temperature": 0.0},
    ],
)
def test_a_wrong_text_changes_nothing(drafting):
    """Those of other rows, a changed token, a text that is too short, and none."""
    wrong = [plain()[1], [*plain()[1][:9], 1, *plain()[1][10:20]], None]
    settings = {**SETTINGS, **drafting}
    wanted = specjax.generate(target(), PROMPTS, **{**settings, "proposer": "none"})
    made = specjax.generate(target(), PROMPTS, expected=wrong, **settings)
    assert made.tokens == wanted.tokens
    streamed = specjax.generate(target(), PROMPTS, expected=wrong, stream=True, **settings)
    assert len(list(streamed)) > 0
    assert streamed.output is not None and streamed.output.tokens == wanted.tokens


def test_a_row_catches_up_after_a_changed_token():
    """It goes on with the next token, and with `agreed` once the last token is right."""
    changed = [[*row[:9], (row[9] + 1) % 50, *row[10:]] for row in plain()]
    passes = {
        agreed: texts(proposer=Aligned(DEPTH, agreed=agreed), expected=changed).stats.target_passes
        for agreed in (False, True)
    }
    least = len(PROMPTS) * -(-NEW // (DEPTH + 1))
    assert least < passes[False] <= passes[True] <= least + 2 * len(PROMPTS)


def test_a_draft_model_follows_where_nothing_is_expected():
    draft = specjax.load(specjax.shipped("tiny/draft"))
    expected = [plain()[0], None, None]
    for drafting in ({"draft": draft}, {"draft": draft, "num_drafts": 4}):
        made = texts(expected=expected, **drafting)
        assert made.tokens == plain()
    assert made.stats.accepted > NEW - -(-NEW // 5)  # more than those of the first row


def state_of(documents: list[list[int]]) -> object:
    rows = jnp.array(documents, jnp.int32)
    block = Block(jnp.zeros((len(rows), 1), jnp.int32), jnp.zeros((len(rows), 1, 1)),
                  jnp.zeros(len(rows), jnp.int32), None, rows)  # fmt: skip
    return Aligned(2).init(None, block, 16)


def test_the_last_document_is_expected():
    """Even if it is empty, or there is none."""
    state = state_of([[ABSENT, 4, 5, ABSENT, 6, 7, ABSENT], [ABSENT, 4, 5, 6, 7, ABSENT, ABSENT],
                      [ABSENT] * 7])  # fmt: skip
    kept = [
        [int(t) for t in row[start:] if t != ABSENT]
        for row, start in zip(np.asarray(state.tokens), np.asarray(state.start), strict=True)
    ]
    assert kept == [[6, 7], [], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expected": [[1]]}, "expected has 1 entries for 3 prompts"),
        ({"expected": ["text", None, None]}, "expected holds the text 'text'"),
        ({"expected": [[1, 10**6], None, None]}, "expected: text 0 holds token ids from 1"),
        ({"expected": 7}, "expected=7"),
        ({"expected": plain, "proposer": "none"}, "expected= is not used by a NoProposer"),
    ],
)
def test_bad_expectations_are_refused(options, message):
    given = {**options, "expected": options["expected"]}
    if callable(given["expected"]):
        given["expected"] = plain()
    with pytest.raises(ValueError, match=message):
        texts(**given)
