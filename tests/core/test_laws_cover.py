"""Which proposers and rules the laws over tables meet."""

from table_laws import ALONE, CHAINS, PAIRS, TREES
from toys import KINDS, TABLES, kind

from specjax import PROPOSERS, RULES
from specjax.methods import AssistantSource, EarlyExitSource, NearSelfSource
from specjax.proposers import Aligned, Shape


def test_the_pairs_cover():
    """Every shape, source, and proposer that is neither has a pair, and every rule; a new one must
    be added.  A source that reads the target's keys and values has its laws over transformers; a
    proposer that reads expected texts has them in `test_aligned.py`."""
    cases = {case: kind(TABLES.CASES[case][0]) for case, _ in PAIRS}
    met = {part for parts in cases.values() for part in parts}
    elsewhere = {EarlyExitSource, NearSelfSource, AssistantSource, Aligned}
    assert met >= {part for parts in KINDS for part in parts} - elsewhere
    assert {rule for _, rule in PAIRS} == set(RULES)
    shapes = {cases[case][0] for case, _ in (*CHAINS, *TREES)}
    assert shapes >= {parts[0] for parts in KINDS if issubclass(parts[0], Shape)}
    assert set(PAIRS) >= ALONE and len(set(PAIRS)) == len(PAIRS)
    # A name without a pair of its own makes a shape over a source that has one.
    named = {
        name: {kind(make()[0]) for make in TABLES.TABLE[name].values()}
        for name in PROPOSERS
        if name != "early-exit"
    }
    assert all({part for parts in kinds for part in parts} <= met for kinds in named.values())
