"""Samples of three tokens from a table model follow its exact joint distribution.

A shape sees a source through the contract alone, so every shape is sampled over a source of one
lookup; `test_distribution_policies.py` samples what chooses among proposals, and `tests/product`
every shape over every source with a transformer.
"""

import functools

import numpy as np
import pytest
from distributions import (
    DEFAULTS,
    IMPLAUSIBLE,
    NEW,
    SETTINGS,
    TEXTS,
    VOCAB,
    Distributions,
    probabilities,
)
from table_sources import TableBlockSource, TableSource
from toys import KINDS, TABLES, kind

from specjax import RULES, DynamicTree
from specjax.proposers import (
    BestFirst,
    Chain,
    ChoiceTree,
    Shape,
    StaticTree,
)

TOYS = Distributions(TABLES)
TABLE, BLOCK = TableSource(VOCAB), TableBlockSource(VOCAB, 2)
CASES = {
    "none": TOYS.CASES["none"],
    "draft with a confidence stop, 0 to 2 drafts a row": (
        TOYS.CASES["draft with a confidence stop"]
    ),
    "table chain": (Chain(TABLE, 2), lambda: TOYS.rows),
    "table static tree": (StaticTree(TABLE, (2, 2)), lambda: TOYS.rows),
    "table dynamic tree": (DynamicTree(TABLE, 2, 2, 5), lambda: TOYS.rows),
    "table choices": (ChoiceTree(BLOCK, ((0,), (1,), (0, 0))), lambda: TOYS.ahead),
    "table best first": (BestFirst(BLOCK, 5, 2), lambda: TOYS.ahead),
}
PAIRS = [
    *((case, "rejection") for case in CASES if case.startswith("table")),
    # Under `match` every proposer writes the text of plain decoding, token by token.
    ("none", "match"), ("draft with a confidence stop, 0 to 2 drafts a row", "block"),
]  # fmt: skip
ALL, FEW = tuple(SETTINGS), ("plain", "all filters", "greedy")
"""The warp knows nothing of the proposer, so all settings are sampled with a chain and a tree."""


def settings(case):
    return ALL if case in ("none", "table chain", "table static tree") else FEW


@functools.cache
def sampled(case, rule):
    """The texts and figures of a case, compiled and run once for all settings."""
    proposer, params = CASES[case]
    bounded = "a row" in case
    return TOYS.texts(proposer, params(), RULES[rule](), bounded=bounded, names=settings(case))


def test_every_shape_and_every_exact_rule_is_sampled():
    met = {kind(proposer)[0] for proposer, _ in CASES.values()}
    assert met >= {parts[0] for parts in KINDS if issubclass(parts[0], Shape)}
    assert {rule for _, rule in PAIRS} == {name for name, rule in RULES.items() if rule.exact}


def test_the_settings_are_worth_testing():
    TOYS.check_the_settings()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_wanted_distribution_is_that_of_numpy(setting):
    """Temperature and filters are applied again by hand, token by token."""
    own = DEFAULTS | SETTINGS[setting]

    def follow(text, logits):
        if own["temperature"] == 0:
            return np.eye(VOCAB)[logits.argmax()]
        chances = probabilities(logits / own["temperature"])
        kept = np.ones(VOCAB, bool)
        if own["top_k"]:
            kept &= logits >= np.sort(logits)[-own["top_k"]]
        order = np.argsort(-logits)
        left = np.where(kept, chances, 0)[order] / chances[kept].sum()
        kept[order[np.cumsum(left) - left >= own["top_p"]]] = False
        kept &= chances >= own["min_p"] * chances.max()
        return np.where(kept, chances, 0) / chances[kept].sum()

    wanted = TOYS.wanted(setting)
    np.testing.assert_allclose(TOYS.joint(follow, end=VOCAB), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "rule", "setting"),
    [(case, rule, setting) for case, rule in PAIRS for setting in settings(case)],
)
def test_samples_follow_the_target(case, rule, setting):
    """This holds over several steps, in a batch of mixed settings with greedy rows."""
    sample, stats = sampled(case, rule)
    assert sample[setting].shape == (TEXTS[setting], NEW)
    assert TOYS.p_value(sample[setting], setting) > IMPLAUSIBLE
    if case != "none":  # without drafts, or without rejections, the test would prove nothing
        assert 0.1 < stats.accepted.sum() / stats.tested.sum() < 0.95
