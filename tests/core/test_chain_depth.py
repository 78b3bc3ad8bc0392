"""A chain that draws up to a depth, which `Adaptive` chooses."""

import jax
import numpy as np
import pytest
from toys import TABLES as toys

from specjax.contract import Context
from specjax.types import ABSENT


@pytest.mark.parametrize("case", ["draft 6", "universal"])
def test_a_chain_up_to_a_depth_is_the_beginning_of_the_whole_one(case):
    """The loop draws the same tokens from the same logits as the chain without a limit."""
    rule = "rejection"
    dec, params = toys.decoder(case, rule), toys.params(case)
    state = toys.prefill(dec, params, temperature=0.9)

    @jax.jit
    def propose(state, depth):
        context = Context(
            pending=jax.vmap(lambda row, n: row[n - 1])(state.tokens, state.length),
            draw=dec._draw(state),
            warp=lambda logits, path=None: dec._warp(state, logits, path),
            shared_noise=False, wants_logits=True, cache=state.cache, depth=depth,
        )  # fmt: skip
        own = state.cache if dec.proposer.shares_cache else state.proposer
        return dec.proposer.propose(params.proposer, own, context)[0]

    whole = jax.device_get(propose(state, None))
    for depth in range(4):
        part = jax.device_get(propose(state, np.int32(depth)))
        present = np.asarray(part.parent != ABSENT)
        wanted = np.array(whole.parent != ABSENT)
        wanted[:, depth + 1 :] = False
        np.testing.assert_array_equal(present, wanted)
        np.testing.assert_array_equal(part.tokens[present], whole.tokens[present])
        parents = np.roll(present, -1, axis=1)
        np.testing.assert_allclose(
            part.logits[parents], whole.logits[parents], rtol=2e-5, atol=2e-5
        )
