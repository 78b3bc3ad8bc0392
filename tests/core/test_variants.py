"""The same with and without jit: what XLA simplifies may change no result.

`-0.0 + 0.0` is 0.0 operation by operation, and XLA leaves the addition out of a program.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from naive_walks import WALKS, a_case

from specjax import Proposal, Sampling, sampling
from specjax.tree import Tree

PARENT = np.array([-1, 0, 0, 1, 1, 2, -1, 4, 7], np.int32)
CHAIN = np.array([-1, 0, 1, 2, 3, 4, 5, -1, -1], np.int32)


class WithAndWithoutJit(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters({"top_k": 4}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.9})
    def test_both_zeros_tie(self, **settings):
        """They are one value, so either all of them are kept or none."""
        logits = np.array([[[2.0, -0.0, 0.0, 1.0, -0.0, 0.0, -1.0]]], np.float32)
        warp = self.variant(sampling.warp)
        kept = np.asarray(warp(logits, Sampling.create(1, **settings)))[0, 0] > -np.inf
        assert kept.tolist() == [True, *kept[1:3], True, *kept[1:3], False]
        assert kept[1] == kept[2]
        assert kept[1] or "top_k" not in settings

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*WALKS)
    def test_a_rule_decides_as_a_naive_walk(self, name):
        """In eager calls and in one compiled program."""
        rule, walk = WALKS[name]
        parent, decided = CHAIN if rule.chain_only else PARENT, set()

        def judge(draw, tokens, logits, draft):
            tree = Tree.of(jnp.asarray(parent), len(parent) - 1, rule.chain_only)
            return rule(draw, Proposal(tokens, jnp.asarray(parent), draft), tree, logits)

        judged = self.variant(judge)
        for seed in range(4):
            case = a_case(parent, np.random.default_rng(seed), len(parent) - 1, True)
            given = (case[name] for name in ("draw", "tokens", "target", "draft"))
            verdict = judged(*jax.tree.map(jnp.asarray, tuple(given)))
            decided.add((int(verdict.node), int(verdict.next_token)))
            assert walk(case) == (int(verdict.node), int(verdict.next_token))
        assert len(decided) > 1
