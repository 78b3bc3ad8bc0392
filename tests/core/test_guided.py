"""The laws of decoding under matchers on the host, over a table model."""

from typing import ClassVar

import jax
import numpy as np
import pytest
from distributions import VOCAB, Distributions
from guided_laws import CLOSE, GuidedLaws, guided, processors
from nested import Nested
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_sources import TableSource
from toys import TABLES as toys

from specjax._internal.bit_masks import FREE
from specjax.constraints import Matchers
from specjax.proposers import StaticTree


class TestGuided(GuidedLaws):
    toys = toys
    CHAIN = "table chain"
    PAIRS: ClassVar = [("none", "match"), (CHAIN, "match"), ("table static tree", "rejection")]

    def test_samples_follow_the_constrained_target(self):
        tree = StaticTree(TableSource(VOCAB), (2, 1))
        self.check_samples(tree, Distributions(toys).rows, "rejection")

    def test_masks_are_not_part_of_the_state_between_steps(self):
        """With other settings or without: it has the parts and shapes that it had before."""
        runner, arrays = guided(toys, self.CHAIN, "match"), toys.params(self.CHAIN)
        for settings in (processors(), None):
            state = toys.prefill(runner, arrays, processors=settings)
            before = jax.eval_shape(lambda x: x, state)
            assert jax.eval_shape(lambda x: x, runner.run(arrays, state, 2)) == before


def test_a_matcher_without_a_way_on_is_named():
    """Such as one whose vocabulary cannot write what it needs."""

    class Stuck(Nested):
        called = "a text that gets stuck"

        def allowed(self, words):
            words[:] = 0

    stuck = Stuck(toys.VOCAB, CLOSE, toys.EOS)
    made = Matchers([None, stuck], np.full((2, 4), toys.EOS), 1)
    with pytest.raises(ValueError, match="prompt 1 under a text that gets stuck: no token"):
        made.roots(3, np.zeros(2, bool))
    assert (made.roots(3, np.array([False, True])) == FREE).all()


def test_a_token_that_may_not_follow_is_named():
    """Only the tokens that a row emitted count, and nothing follows the end of its text."""
    opening = next(iter(CLOSE))
    emitted = np.array([[opening, CLOSE[opening]], [opening, toys.EOS], [opening, opening]])
    rows = [Nested(toys.VOCAB, CLOSE, toys.EOS) for _ in emitted]
    made = Matchers(rows, np.full((3, 4), toys.EOS), 1)
    made.observe(emitted, np.array([1, 2, 2]))
    assert [one.output for one in rows] == [[opening], [opening], [opening, opening]]
    with pytest.raises(ValueError, match=r"token 2 may not .* prompt 0 under nested brackets"):
        made.observe(emitted[:, 1:], np.array([1, 1, 1]))
