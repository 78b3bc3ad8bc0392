"""The pairs of a case and a rule whose laws core holds over a table model.

A shape sees a source through the contract alone, so every shape meets both kinds of noise over a
source that costs next to nothing, every source meets a shape under one kind of noise, and so does
every proposer that is neither, and every wrapper.  Steps of a single row are compiled for few of
them.  `tests/product` holds the whole product over a transformer.
"""

from __future__ import annotations

from laws import SHARED, Laws
from toys import NOISE_KINDS, TABLES

CHAINS = [
    *((case, rule) for case in ("table chain", "table static tree") for rule in NOISE_KINDS),
    ("table chain", "block"), ("table static tree", "typical"), ("table static tree", "threshold"),
]  # fmt: skip
TREES = [
    (case, rule)
    for case in ("table dynamic tree", "table choices", "table best first", "tree")
    for rule in NOISE_KINDS
]
DRAFTS = [
    ("draft 3", "match"), ("draft tree", "rejection"), ("universal", "match"),
    ("translated tree", "rejection"), ("datastore", "match"), ("datastore tree", "rejection"),
]  # fmt: skip
HEADS = [
    ("eagle3", "match"), ("eagle3 tree", "rejection"), ("medusa tree", "match"),
    ("peagle tree", "rejection"), ("block draft tree", "rejection"),
]  # fmt: skip
MTP = [("mtp tree", "rejection"), ("mtp layers", "match")]
OTHERS = [
    ("none", "match"), ("none padded", "rejection"), ("ngram", "match"), ("forced", "match"),
    ("first of", "rejection"), ("adaptive", "match"), ("adaptive over eagle3", "rejection"),
    ("table best first, cost-aware", "match"),
    ("table tree, adaptive", "match"), ("table tree, adaptive", "rejection"),
    ("table dynamic tree, calibrated", "rejection"), ("table best first, calibrated", "match"),
]  # fmt: skip
PAIRS = [*CHAINS, *TREES, *DRAFTS, *HEADS, *MTP, *OTHERS]
ALONE = {
    ("none", "match"), ("table chain", "match"), ("table static tree", "rejection"),
    ("table choices", "rejection"), ("draft 3", "match"), ("medusa tree", "match"),
    ("ngram", "match"),
}  # fmt: skip
"""The pairs whose steps are compiled for a single row too."""


class TableLaws(Laws):
    """The laws over tables; a subclass names its pairs."""

    toys = TABLES

    def __init_subclass__(cls) -> None:
        cls.INSERTED = cls.PAIRS
        cls.ALONE = [pair for pair in cls.PAIRS if pair in ALONE]
        cls.SAME_KEY = [pair for pair in cls.PAIRS if pair[1] in SHARED]
