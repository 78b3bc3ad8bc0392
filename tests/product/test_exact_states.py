"""With exact states a recurrent layer has the bits of plain reading after any drafts.

`tests/process/test_bits.py` compares them in optimised programs.
"""

import dataclasses

import exact_states
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_families
from exact_states import MIXERS, VOCAB

import specjax
from specjax import Decoder, DraftModel, Match, NoProposer, Params
from specjax.models import with_exact_states


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_states_have_the_bits_of_plain_reading(name, is_tree):
    compared, wrong = exact_states.compare(name, is_tree)
    assert compared > 4
    assert wrong == 0


def test_without_them_bits_differ():
    """So the comparison sees a difference."""
    assert exact_states.compare("gated delta net", True, exact=False)[1] > 4


def test_logits_are_those_of_the_fast_form():
    """Up to rounding, for a text that is longer than what is read by all pairs of tokens."""
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (2, 70)))
    for name, mixer in MIXERS.items():
        (fast, params), (exact, _) = (exact_states.made((mixer,), each) for each in (False, True))
        for width in (9, 70):
            part = tokens[:, :width], jnp.arange(width)[None]
            wanted, found = (jax.jit(one.apply)(params, *part).logits for one in (fast, exact))
            np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=name)


def test_a_chain_has_the_bits_of_plain_decoding():
    """Of the same width, in a model with attention too: its tokens and all of its cache."""
    model, params = exact_states.made((MIXERS["gated delta net"], None, MIXERS["mamba2"]), True)
    draft, own = exact_states.made((None,), False)
    own = {**own, "embedding": params["embedding"]}
    rows, capacity = 4, 50
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (rows, 12)), jnp.int32)
    ended = []
    for proposer, arrays in ((NoProposer(4), ()), (DraftModel(draft, VOCAB, 3), own)):
        decoder, given = Decoder(model, proposer, Match(), (0,), capacity), Params(params, arrays)
        state = decoder.prefill(
            given, prompt, jnp.array([12, 7, 3, 1]), limit=jnp.full(rows, capacity),
            key=jax.random.split(specjax.make_key(3), rows),
            sampling=specjax.Sampling.create(rows, temperature=0.7),
        )  # fmt: skip
        ended.append(jax.device_get(decoder.run(given, state).replace(key=None)))
    plain, drafted = ended
    assert drafted.stats.accepted.sum() > 5
    np.testing.assert_array_equal(drafted.length, plain.length)
    for row in range(rows):
        assert exact_states.bits(drafted.cache, row) == exact_states.bits(plain.cache, row)
        size = int(plain.length[row]) - 1
        assert drafted.tokens[row, : size + 1].tolist() == plain.tokens[row, : size + 1].tolist()
        for one, other in zip(
            drafted.cache.attention.keys, plain.cache.attention.keys, strict=True
        ):
            assert one[row, :, :size].tobytes() == other[row, :, :size].tobytes()


def test_a_loaded_model_gets_them():
    """The same text, and another form of the model; without such layers the model itself."""
    target = specjax.load(small_families.folder("qwen3_5_text, in turn"))
    exact = with_exact_states(target)
    assert exact.model.module.config.exact_states and exact.params is target.params
    assert with_exact_states(exact) is exact
    dense = specjax.load(specjax.shipped("tiny/target"))
    assert with_exact_states(dense) is dense
    settings = {"max_new_tokens": 12, "eos": []}
    texts = [
        [list(row) for row in specjax.generate(each, [[5, 6, 7, 5, 6]], **how, **settings).tokens]
        for each in (target, exact)
        for how in ({"num_drafts": 0}, {"proposer": "ngram"})
    ]
    assert texts[1:] == texts[:1] * 3
    with pytest.raises(ValueError, match="a specjax Transformer"):
        with_exact_states(dataclasses.replace(dense, model=None))
