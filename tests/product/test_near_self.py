"""`NearSelfSource`: the target drafts with few slots of its own cache, without another text."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax import RULES, Decoder, DynamicTree, KVCache, NearSelfSource, Params, StaticTree
from specjax.methods import near_self
from specjax.models import Latent, LinenModel, Transformer
from specjax.proposers import Chain

pytestmark = pytest.mark.xdist_group("near self")  # a share takes all of them, or none

MODEL = toys.model()
SHAPES = {
    "chain": lambda source: Chain(source, 3),
    "static tree": lambda source: StaticTree(source, (2, 1)),
    "dynamic tree": lambda source: DynamicTree(source, 2, 2, 5),
}


@functools.cache
def decoder(shape, window, rule="match", selected=0, chunk=2):
    source = NearSelfSource(MODEL, window, sinks=1, selected=selected, chunk=chunk)
    proposer = SHAPES[shape](source)
    return Decoder(MODEL, proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)


PARAMS = Params(toys.weights(), toys.weights())


@pytest.mark.parametrize("selected", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_plain_decoding(shape, selected):
    """Few tokens are seen, so some drafts are wrong, in rows of different lengths."""
    dec = decoder(shape, 3, selected=selected)
    state = dec.run(PARAMS, toys.prefill(dec, PARAMS))
    assert toys.texts(state) == toys.decoded("none", "match")[0]
    accepted, tested = (np.asarray(x).sum() for x in (state.stats.accepted, state.stats.tested))
    assert 0 < accepted < tested


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
@pytest.mark.parametrize(("window", "selected"), [(toys.CAPACITY, 0), (1, toys.CAPACITY // 3)])
def test_with_all_tokens_every_draft_is_right(window, selected, rule):
    """Then it is the target itself, at its own positions; drafts and the text share no noise under
    `rejection`, and both distributions are the same."""
    dec = decoder("chain", window, rule, selected, chunk=3)
    state = dec.run(PARAMS, toys.prefill(dec, PARAMS, temperature=0.8))
    if rule == "match":
        assert toys.texts(state) == toys.decoded("none", "match", 0.8)[0]
    assert int(state.stats.accepted.sum()) == int(state.stats.tested.sum()) > 0


def test_positions_of_the_copy_would_be_wrong(monkeypatch):
    """A draft at the number of its slot, and not of its token, is turned by another angle."""
    right = _logits()

    def begin(self, params, state, context):
        near = state.near(self.sinks, self.window, self.room)
        reading = near_self.NearReading(near, jnp.zeros_like(near.length))
        return state, *self.extend(params, reading, context.pending)

    monkeypatch.setattr(NearSelfSource, "begin", begin)
    assert np.abs(_logits() - right).max() > 1e-3


def _logits():
    """The logits after the pending token of a text that is longer than the window."""
    source, rng = NearSelfSource(MODEL, 4, sinks=2), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, toys.VOCAB, (2, 12)), jnp.int32)
    cache = MODEL.init_cache(2, 40)
    out = MODEL.apply(toys.weights(), tokens, cache.next_positions(12), cache)
    cache = out.staged.commit(jnp.array([12, 9]))
    context = specjax.contract.Context(jnp.array([3, 5]), None, None, True, False, cache)
    return np.asarray(source.begin(toys.weights(), cache, context)[2])


def test_the_copy_has_the_first_and_the_last_slots():
    keys = jnp.arange(2 * 20, dtype=jnp.float32).reshape(2, 1, 20, 1)
    cache = KVCache((keys,), (-keys,), jnp.array([13, 4]))
    near = cache.near(2, 4, 3)
    assert near.length.tolist() == [6, 4]
    assert near.keys[0][0, 0, :6, 0].tolist() == [0, 1, 9, 10, 11, 12]
    assert near.values[0][1, 0, :4, 0].tolist() == [-20, -21, -22, -23]
    assert near.capacity >= 6 + 3
    untouched = cache.near(0, 30, 2)
    np.testing.assert_array_equal(untouched.keys[0][:, :, :20], keys)


class Plain(nn.Module):
    """A module that is no Transformer."""

    vocab_size, max_positions, num_taps = 5, 9, 0


def test_what_cannot_be_is_refused():
    for numbers, words in (
        ({"window": 0}, "window=0"),
        ({"window": 4, "sinks": -1}, "sinks=-1"),
        ({"window": 4, "room": 1}, "room=1"),
        ({"window": 4, "selected": -1}, "selected=-1"),
        ({"window": 4, "selected": 2, "chunk": 0}, "chunk=0"),
    ):
        with pytest.raises(ValueError, match=words):
            NearSelfSource(MODEL, **numbers)
    loaded = specjax.LanguageModel(MODEL, {})
    for target, name in ((loaded, "LanguageModel"), (LinenModel(Plain()), "Plain")):
        with pytest.raises(ValueError, match=f"this one is a {name}: pass target.model of what"):
            NearSelfSource(target, 4)
    config = dataclasses.replace(MODEL.module.config, num_layers=1, mixers=(Latent(8, 8, 8, 8),))
    latent = LinenModel(Transformer(config))
    assert NearSelfSource(latent, 4).shares_cache
    with pytest.raises(ValueError, match="selected=2, and the target has latent attention"):
        NearSelfSource(latent, 4, selected=2)
    dec = decoder("chain", 4)
    small = Chain(NearSelfSource(MODEL, 4, room=2), 4)
    small = dataclasses.replace(dec, proposer=small)
    with pytest.raises(ValueError, match="a step drafts 5 nodes, and room=2: pass room=5"):
        jax.eval_shape(functools.partial(toys.prefill, small, PARAMS))
    other = specjax.LanguageModel(toys.model(num_layers=1), {}, name="other")
    with pytest.raises(ValueError, match="made for another target than other"):
        NearSelfSource(MODEL, 4).bind(other, None)
