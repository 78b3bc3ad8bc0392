"""A target that drafts with its own first layer: it drafts what a model of that layer drafts.

Only a transformer has layers, so these few laws of decoding are held over one.
"""

from typing import ClassVar

import numpy as np
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from proposal_laws import ProposalLaws
from toys import TRANSFORMERS as toys

CHAIN, TREE = ("early exit", "match"), ("early exit tree", "rejection")


class TestEarlyExit(ProposalLaws):
    toys = toys
    CONTRACTS: ClassVar = [CHAIN, TREE]
    STATIC: ClassVar = [TREE]
    DYNAMIC: ClassVar = []
    CHAINS: ClassVar = [CHAIN]
    BOUNDED: ClassVar = [CHAIN]


def test_greedy_texts_are_those_of_plain_decoding():
    """The layers that drafts have run are not run again for their verification.
    `tests/product/test_transformer_laws.py` decodes with trees."""
    texts, state = toys.decoded(*CHAIN)
    assert texts == toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)
    assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
