"""The laws of decoding over a table model.

A shape sees a source through the contract alone, so every shape meets both kinds of noise over a
source that costs next to nothing, every source meets a shape under one kind of noise, and so does
every proposer that is neither, and every wrapper.  Steps of a single row are compiled for few of
them.  `tests/product` holds the whole product over a transformer.
"""

from typing import ClassVar

from laws import SHARED, Laws, pytest_generate_tests  # noqa: F401 - pytest calls it
from toys import KINDS, NOISE_KINDS, TABLES, kind

from specjax import PROPOSERS, RULES
from specjax.methods import AssistantSource, EarlyExitSource
from specjax.proposers import Shape

SHAPES = (
    "table chain",
    "table static tree",
    "table dynamic tree",
    "table choices",
    "table best first",
    "tree",
)
SOURCES = {
    "draft 3": "match", "draft tree": "rejection", "universal": "match", "eagle3": "match",
    "eagle3 tree": "rejection", "datastore": "match", "datastore tree": "rejection",
    "translated tree": "rejection", "medusa tree": "match", "peagle tree": "rejection",
    "block draft tree": "rejection", "mtp tree": "rejection",
}  # fmt: skip
OTHERS = {
    "none": "match", "none padded": "rejection", "ngram": "match", "forced": "match",
    "first of": "rejection", "adaptive": "match", "adaptive over eagle3": "rejection",
    "table best first, cost-aware": "match",
}  # fmt: skip


class TestLaws(Laws):
    toys = TABLES
    PAIRS: ClassVar = [
        *((case, rule) for case in SHAPES for rule in NOISE_KINDS),
        *SOURCES.items(),
        *OTHERS.items(),
        ("table static tree", "typical"), ("table static tree", "threshold"),
        ("table chain", "block"),
    ]  # fmt: skip
    INSERTED = PAIRS
    ALONE: ClassVar = [
        ("none", "match"), ("table chain", "match"), ("table static tree", "rejection"),
        ("table choices", "rejection"), ("draft 3", "match"), ("ngram", "match"),
    ]  # fmt: skip
    SAME_KEY: ClassVar = [pair for pair in PAIRS if pair[1] in SHARED]


def test_the_pairs_cover():
    """Every shape, source, and proposer that is neither has a pair, and every rule; a new one must
    be added.  A source that reads the target's keys and values has its laws over transformers."""
    cases = {case: kind(TABLES.CASES[case][0]) for case, _ in TestLaws.PAIRS}
    met = {part for parts in cases.values() for part in parts}
    assert met >= {part for parts in KINDS for part in parts} - {EarlyExitSource, AssistantSource}
    assert {rule for _, rule in TestLaws.PAIRS} == set(RULES)
    shapes = {kind(TABLES.CASES[case][0])[0] for case in SHAPES}
    assert shapes >= {parts[0] for parts in KINDS if issubclass(parts[0], Shape)}
    # A name without a pair of its own makes a shape over a source that has one.
    named = {
        name: {kind(make()[0]) for make in TABLES.TABLE[name].values()}
        for name in PROPOSERS
        if name != "early-exit"
    }
    assert all({part for parts in kinds for part in parts} <= met for kinds in named.values())
