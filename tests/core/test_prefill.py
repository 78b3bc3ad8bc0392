"""Reading a prompt in chunks equals reading it at once, in memory that does not grow with its
length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import own_models
import pytest
from toy_models import transformer
from toys import TABLES as toys
from toys import TRANSFORMERS

from specjax import LinenModel, Transformer
from specjax.caches import prefill

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, toys.VOCAB, (4, 14), np.int32))
COUNT = jnp.array([14, 0, 5, 9], jnp.int32)


def windowed():
    config = dataclasses.replace(transformer().module.config, windows=(None, 4))
    return LinenModel(Transformer(config)), TRANSFORMERS.weights()


CASES = {
    "tables": lambda: (toys.model(), toys.weights()),
    "sliding window": windowed,
    **{
        name: lambda name=name: own_models.own(name)
        for name in ("recurrent linen", "cached function")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_are_one_pass(case, monkeypatch):
    """Hidden states and next logits agree for rows that end in any chunk or in none."""
    model, params = CASES[case]()

    def read():
        cache = model.init_cache(len(TOKENS), toys.CAPACITY)
        hidden, _, cache = prefill.read_prompt(model, params, TOKENS, COUNT, cache)
        pending = jnp.full((len(TOKENS), 1), 3, jnp.int32)
        return (
            hidden,
            model.apply(params, pending, cache.length[:, None], cache).logits,
            cache.length,
        )

    whole = jax.jit(read)()
    monkeypatch.setattr(prefill, "CHUNK", 4)
    parts = jax.jit(lambda: read())()
    np.testing.assert_array_equal(parts[2], COUNT)
    np.testing.assert_allclose(parts[1], whole[1], rtol=0, atol=1e-5 * np.abs(whole[1]).max())
    for row, count in enumerate(COUNT):
        np.testing.assert_allclose(parts[0][row, :count], whole[0][row, :count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["draft 3", "medusa tree", "universal"])
def test_decoding_from_chunks(case, monkeypatch):
    """The text is the same, also if a proposer reads the prompt itself or its hidden states."""
    monkeypatch.setattr(prefill, "CHUNK", 3)
    dec = toys.decoder(
        case, "match", capacity=toys.CAPACITY + 1
    )  # a capacity for which no other chunk was compiled
    arrays = toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    assert toys.texts(state) == toys.decoded(case, "match", 1.0)[0]
    np.testing.assert_array_equal(
        state.stats.accepted, toys.decoded(case, "match", 1.0)[1].stats.accepted
    )


def test_memory_does_not_grow_with_the_prompt():
    """Except for the cache and the hidden states, which are outputs: four times the prompt needs
    no more scratch."""
    capacity = 16_384
    small = transformer(num_layers=1)
    config = dataclasses.replace(small.module.config, max_positions=capacity)
    model = LinenModel(Transformer(config))
    cache = jax.eval_shape(lambda: model.init_cache(1, capacity))

    def scratch(width):
        tokens, count = (
            jax.ShapeDtypeStruct((1, width), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        )
        read = jax.jit(lambda *given: prefill.read_prompt(model, *given), donate_argnums=3)
        params = jax.eval_shape(lambda: small.init(jax.random.key(0)))
        compiled = read.lower(params, tokens, count, cache).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = config.num_heads * prefill.CHUNK * 4  # bytes per slot
    # The scratch holds a block of scores, not those of the whole cache, and it is not empty.
    assert scores * 512 < scratch(4_096) < scores * capacity / 4
    assert scratch(capacity) < 1.1 * scratch(4_096)
