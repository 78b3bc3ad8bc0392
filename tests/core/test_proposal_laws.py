"""What proposers draft over a table model, against drafting without caches, masks and batches.

A shape meets one kind of noise here, and both in `tests/product`.
"""

from typing import ClassVar

from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from proposal_laws import ProposalLaws
from toys import TABLES as toys


class TestProposals(ProposalLaws):
    toys = toys
    CONTRACTS: ClassVar = [
        ("draft 6", "match"), ("draft tree", "rejection"), ("dynamic tree", "match"),
    ]  # fmt: skip
    STATIC: ClassVar = [("draft tree", "rejection")]
    DYNAMIC: ClassVar = [("dynamic tree", "match")]
    CHAINS: ClassVar = [("draft 6", "match")]
    BOUNDED: ClassVar = [("draft 3", "match"), ("draft tree", "match")]
