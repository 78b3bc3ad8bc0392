"""What chooses among proposals keeps the exact joint distribution of a table model; and the check
sees typical mistakes."""

import jax.numpy as jnp
import pytest
from distributions import IMPLAUSIBLE, VOCAB, WRONG, Distributions
from table_sources import TableBlockSource, TableSource
from toys import TABLES

from specjax import FirstOf, NGram, Rejection
from specjax.proposers import (
    Adaptive,
    BestFirst,
    Calibrated,
    Chain,
    CostAware,
    CostAwareParams,
    DynamicTree,
)

TOYS = Distributions(TABLES)
LOOKUP, CHAIN = NGram(2, min_ngram=1), Chain(TableSource(VOCAB), 2)
CASES = {
    "first of": (FirstOf(NGram(2, min_ngram=2), CHAIN), lambda: (None, TOYS.rows)),
    "adaptive": (
        Adaptive(LOOKUP, CHAIN, (1, 2, 3)),
        lambda: TABLES.adaptive((1.0, 1.05, 1.1, 1.3, 1.4), TOYS.rows),
    ),
    "best first, cost-aware": (
        CostAware(BestFirst(TableBlockSource(VOCAB, 2), 5, 2), (1, 3, 5)),
        lambda: CostAwareParams(TOYS.ahead, jnp.array([1.0, 1.3, 1.6])),
    ),
    "dynamic tree, calibrated": (
        Calibrated(CostAware(DynamicTree(TableSource(VOCAB), 2, 2, 5), (1, 3, 5))),
        lambda: CostAwareParams(TOYS.rows, jnp.array([1.0, 1.3, 1.6])),
    ),
}
SETTINGS = ("plain", "all filters", "greedy")


@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_target(case):
    """A choice that depended on what was drawn would bias the text."""
    proposer, params = CASES[case]
    sample, stats = TOYS.texts(proposer, params(), Rejection(), names=SETTINGS)
    for setting, tokens in sample.items():
        assert TOYS.p_value(tokens, setting) > IMPLAUSIBLE
    assert 0.1 < stats.accepted.sum() / stats.tested.sum() < 0.95


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_caught(mistake):
    """None of the mistakes would be noticed by greedy decoding."""
    TOYS.check_a_mistake(mistake, TableSource(VOCAB), TOYS.rows)
