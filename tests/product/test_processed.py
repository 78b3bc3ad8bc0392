"""The laws of decoding with every processor on, over a transformer."""

from typing import ClassVar

import pytest
from distributions import VOCAB, Distributions
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from processor_laws import ProcessorFaults, ProcessorLaws
from toys import TRANSFORMERS as toys

from specjax import DraftTree


class TestProcessed(ProcessorLaws):
    toys = toys
    PAIRS: ClassVar = [
        ("none", "match"), ("none padded", "match"), ("draft 3", "match"), ("draft 3", "rejection"),
        ("draft 3", "block"), ("draft tree", "rejection"), ("dynamic tree", "match"),
        ("early exit", "match"), ("ngram", "rejection"), ("medusa tree", "match"),
        ("universal", "rejection"), ("tree", "rejection"), ("eagle3", "match"),
        ("adaptive", "match"),
    ]  # fmt: skip
    SAME_KEY: ClassVar = [pair for pair in PAIRS if pair[1] == "match"]
    INSERTED: ClassVar = [("draft 3", "match"), ("tree", "rejection")]
    PERFECT: ClassVar = [("draft 3", "match"), ("draft 3", "rejection")]
    BITS: ClassVar = [("draft 3", "match")]

    @pytest.mark.parametrize("case", ["draft", "tree"])
    def test_samples_follow_the_target(self, case):
        own = Distributions(toys)
        proposer = {
            "draft": own.CASES["draft"][0],
            "tree": DraftTree(own.small.model, VOCAB, (2, 2)),
        }[case]
        self.check_samples(proposer, own.drafting)


class TestFaults(ProcessorFaults):
    toys = toys
    FAULTY = "draft 3"
