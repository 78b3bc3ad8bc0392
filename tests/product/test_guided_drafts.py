"""The laws of decoding under matchers on the host, over a transformer."""

from typing import ClassVar

from distributions import Distributions
from guided_laws import GuidedLaws
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from toys import TRANSFORMERS as toys


class TestGuidedDrafts(GuidedLaws):
    toys = toys
    CHAIN = "draft 3"
    PAIRS: ClassVar = [
        ("none", "match"), ("draft 3", "match"), ("tree", "rejection"), ("draft 3", "block"),
    ]  # fmt: skip

    def test_samples_follow_the_constrained_target(self):
        own = Distributions(toys)
        self.check_samples(own.CASES["draft"][0], own.drafting, "block")
