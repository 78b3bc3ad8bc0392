"""What proposers draft over a transformer, against drafting without caches, masks and batches."""

from typing import ClassVar

from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from proposal_laws import ProposalLaws
from toys import NOISE_KINDS, TRANSFORMERS


class TestTransformers(ProposalLaws):
    toys = TRANSFORMERS
    CONTRACTS: ClassVar = [
        ("draft 6", "match"), ("draft tree", "match"), ("draft tree", "rejection"),
        ("dynamic tree", "match"), ("dynamic tree", "rejection"), ("early exit", "match"),
        ("early exit tree", "rejection"), ("early exit dynamic tree", "match"),
        ("translated tree", "match"), ("translated dynamic tree", "rejection"),
    ]  # fmt: skip
    STATIC: ClassVar = [
        (case, rule) for case in ("draft tree", "early exit tree") for rule in NOISE_KINDS
    ]
    DYNAMIC: ClassVar = [
        (case, rule) for case in ("dynamic tree", "early exit dynamic tree") for rule in NOISE_KINDS
    ]
    CHAINS: ClassVar = [("draft 6", "match"), ("early exit", "match")]
    BOUNDED: ClassVar = [
        (case, "match")
        for case in (
            "draft 3", "draft tree", "dynamic tree", "early exit", "early exit tree", "first of",
            "ngram",
        )
    ]  # fmt: skip
