"""The decoder's functions, one at a time: a step vmaps, and what does not fit is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys


def test_stream_refuses_an_empty_chunk():
    """It would never end."""
    dec = toys.decoder("none", "match")
    with pytest.raises(ValueError, match="steps_per_chunk=0"):
        next(dec.stream(toys.params("none"), toys.prefill(dec, toys.params("none")), 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": np.zeros((4, toys.CAPACITY + 1), np.int32)}, "padded to 49 tokens do not fit a capacity of 48"),
        ({"prompt_length": np.array([5, 3, 0, 1])}, "prompt 2 is empty"),
        ({"prompt_length": np.array([5, 9, 6, 1])}, "prompt_length 9 is longer than the 8"),
        ({"limit": np.array([9, 9, 49, 9])}, "limit=49 is beyond the capacity of 48"),
    ],
)
def test_prefill_refuses_what_does_not_fit(change, message):
    """A slice update beyond the buffers would silently move, so that the host checks first."""
    with pytest.raises(ValueError, match=message):
        toys.prefill(toys.decoder("none", "match"), toys.params("none"), **change)


def test_a_decoder_needs_room_for_a_token():
    """Too small a capacity is refused by name."""
    with pytest.raises(ValueError, match="capacity=1"):
        toys.decoder("none", "match", capacity=1)


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_step_vmaps(rule):
    """`step` is a pure function: vmapped over two stacked states it does to each what it does to it alone."""
    dec, arrays = toys.decoder("draft 3", rule), toys.params("draft 3")
    states = [toys.prefill(dec, arrays, temperature=1.0, key=toys.keys(seed=seed)) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    both, _ = jax.jit(jax.vmap(dec.step, (None, 0)))(arrays, stacked)
    for number, state in enumerate(states):
        alone, _ = jax.jit(dec.step)(arrays, state)
        np.testing.assert_array_equal(both.tokens[number], alone.tokens)
        np.testing.assert_array_equal(both.length[number], alone.length)
