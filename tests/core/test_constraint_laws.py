"""The laws of decoding under constraints, over a table model."""

from typing import ClassVar

import constrained_toys as constrained
import counted
from constraint_laws import ConstraintLaws, decoder, outputs, params_of, processors, run
from distributions import VOCAB, Distributions
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_sources import TableSource
from toys import TABLES as toys

from specjax import Processors
from specjax.proposers import StaticTree


class TestConstraints(ConstraintLaws):
    """A source sees the masks through `context.warp`: chains and trees have a pair, and so has what
    drafts forced tokens.  `test_processor_laws.py` has the other shapes, and `tests/product` forced
    tokens before a chain."""

    toys = toys
    PAIRS: ClassVar = [
        ("none", "match"), ("forced", "match"), ("draft 3", "rejection"),
        ("table static tree", "rejection"),
    ]  # fmt: skip
    SAME_KEY: ClassVar = [pair for pair in PAIRS if pair[1] == "match"]
    LOGPROBS: ClassVar = [("table static tree", "rejection")]
    INSERTED: ClassVar = [("table static tree", "rejection")]
    PERFECT: ClassVar = [("draft 3", "rejection")]
    FAULTY = "table chain"

    def test_samples_follow_the_constrained_target(self):
        tree = StaticTree(TableSource(VOCAB), (2, 1))
        self.check_samples(tree, Distributions(toys).rows, "rejection", rows=2000)


def test_other_constraints_are_no_other_program():
    """Their tables are padded to the same size."""
    dec, arrays = decoder(toys, "draft 3", "rejection"), params_of(toys, "draft 3")
    run(toys, dec, arrays)
    others = [constrained.spec_of(n, 3 + 9 * n, 0.2) for n in range(4)]
    toys.prefill(dec, arrays, processors=processors(others))
    before = len(counted.traces())
    others = [None, *(constrained.spec_of(n, 5 + 40 * n, 0.5) for n in range(3))]
    state = dec.run(arrays, toys.prefill(dec, arrays, processors=processors(others)))
    assert counted.traces(before) == []
    assert all(map(constrained.valid, others, outputs(toys.texts(state))))


def test_without_a_constraint_nothing_is_carried():
    assert Processors.create(2, toys.VOCAB, constraint=None) is None
    assert Processors.create(2, toys.VOCAB, constraint=[None, None]) is None
    kept = Processors.create(2, toys.VOCAB, constraint=None, constraint_size=(256, 128))
    assert kept.automata.next.shape == (2, 256, 128)
