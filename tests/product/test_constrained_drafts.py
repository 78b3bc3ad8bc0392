"""The laws of decoding under constraints, over a transformer."""

from typing import ClassVar

import pytest
from constraint_laws import ConstraintLaws
from distributions import Distributions
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from toys import TRANSFORMERS as toys

from specjax import DraftTree
from specjax.proposers import Chain


class TestConstrainedDrafts(ConstraintLaws):
    toys = toys
    PAIRS: ClassVar = [
        ("none", "match"), ("forced", "match"), ("forced", "rejection"), ("draft 3", "match"),
        ("draft 3", "block"), ("forced, then draft 3", "rejection"), ("draft tree", "rejection"),
        ("dynamic tree", "match"), ("early exit", "match"), ("ngram", "match"),
        ("medusa tree", "match"), ("universal", "rejection"), ("eagle3 tree", "match"),
        ("tree", "rejection"),
    ]  # fmt: skip
    SAME_KEY: ClassVar = [pair for pair in PAIRS if pair[1] == "match"]
    LOGPROBS: ClassVar = [("draft 3", "match"), ("tree", "rejection")]
    INSERTED: ClassVar = [("draft 3", "match"), ("tree", "rejection")]
    PERFECT: ClassVar = [("draft 3", "match"), ("draft 3", "block")]

    @pytest.mark.parametrize(
        ("case", "rule"),
        [
            ("draft", "rejection"), ("draft", "block"), ("draft", "match"),
            ("draft tree", "rejection"), ("universal", "rejection"), ("forced", "rejection"),
        ],
    )  # fmt: skip
    def test_samples_follow_the_constrained_target(self, case, rule):
        own = Distributions(toys)
        if case == "draft tree":
            proposer, params = DraftTree(own.small.model, own.small.vocab_size, (2, 2)), None
            params = own.drafting
        else:
            proposer, make = own.CASES[case]
            params = make()
        assert case != "draft" or isinstance(proposer, Chain)
        self.check_samples(proposer, params, rule)
