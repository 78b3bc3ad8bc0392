"""A user's own model, in any library, works as target and as draft and keeps the laws of
decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import own_models
import pytest
from own_decoders import CACHED, places, proposers

import specjax
from specjax import KVCache, RecurrentCache
from specjax.models import check_model, from_function, from_linen


@pytest.mark.parametrize("name", [name for name in own_models.NAMES if name != CACHED])
def test_a_model_of_chains_refuses_trees(name):
    """The decoder refuses a proposer of trees by type, when it is built."""
    model, _ = own_models.own(name)
    assert not model.reads_trees
    with pytest.raises(
        ValueError, match="SampledTree proposes trees, but the target reads chains only"
    ):
        specjax.Decoder(model, proposers(name)["tree"], specjax.Match())


def test_who_ignores_the_mask_reads_no_trees():
    """A cache that can commit paths is not enough if the model ignores the mask."""
    assert own_models.own(CACHED)[0].reads_trees
    model = from_function(
        own_models.cached, **own_models.SIZES, init_cache=own_models.empty_kv, reads_trees=False
    )
    assert not model.reads_trees


@pytest.mark.parametrize(
    ("name", "width"),
    [("nnx", own_models.WIDTH), ("recurrent function", own_models.WIDTH), ("linen", 0)],
)
def test_hidden_states_are_passed_on(name, width):
    """Hidden states are passed on if the model returns them; otherwise there are none."""
    model, params = own_models.own(name)
    cache = model.init_cache(2, 9)
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    apply = jax.jit(model.apply)
    out = apply(params, tokens, places(tokens), cache)
    assert out.hidden.shape == (2, 3, width)
    whole = apply(params, tokens, places(tokens))
    np.testing.assert_allclose(out.hidden, whole.hidden, atol=1e-5)
    np.testing.assert_allclose(out.logits, whole.logits, atol=1e-5)
    assert whole.cache is None


def test_a_recurrent_cache_keeps_the_state_after_the_last_committed_token():
    """Each row commits its own count, also 0, and the state has several leaves."""
    rng = np.random.default_rng(0)
    before = (rng.normal(size=(4, 3)), rng.normal(size=(4, 2, 2)))
    after = (rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2, 2)))
    count = np.array([0, 1, 3, 5])
    cache = RecurrentCache.create(jax.tree.map(jnp.asarray, before))
    staged = cache.stage(jax.tree.map(jnp.asarray, after))
    kept = staged.commit(jnp.asarray(count))
    np.testing.assert_array_equal(staged.length, 0)
    np.testing.assert_array_equal(kept.length, count)
    assert kept.staged is None
    for row, n in enumerate(count):
        for leaf, old, new in zip(kept.state, before, after, strict=True):
            np.testing.assert_array_equal(leaf[row], np.float32(new[row, n - 1] if n else old[row]))
    assert kept.rewind(staged) is staged
    with pytest.raises(ValueError, match="nothing is staged"):
        kept.commit(jnp.asarray(count))


def test_a_recurrent_cache_scans():
    """A scan of running sums gives the outputs and the staged states."""
    inputs = jnp.arange(24.0).reshape(2, 4, 3)
    outputs, cache = RecurrentCache.create(jnp.ones((2, 3))).scan(
        lambda s, x: (s + x, -(s + x)), inputs
    )
    wanted = 1 + np.cumsum(inputs, axis=1)
    np.testing.assert_array_equal(outputs, -wanted)
    np.testing.assert_array_equal(cache.staged, wanted)


def test_rewinding_a_kv_cache_moves_the_length_alone():
    """Rewinding keeps the newer buffers."""
    old = KVCache.zeros(1, 2, 1, 4, 3, jnp.float32)
    new = KVCache((old.keys[0] + 1,), (old.values[0] + 1,), old.length + 3)
    back = new.rewind(old)
    assert back.keys is new.keys
    assert back.values is new.values
    assert back.length is old.length


def test_equal_modules_make_equal_models():
    """Programs are therefore found again in the cache of jit."""
    assert from_linen(own_models.Linen(), **own_models.SIZES) == own_models.own("linen")[0]
    again = own_models._MAKERS["nnx"]()[0]
    assert again == own_models.own("nnx")[0]
    assert hash(again) == hash(own_models.own("nnx")[0])


class Unhashable:
    __hash__ = None  # type: ignore


TOKENS = np.zeros((2, 4), np.int32)
SIZES = own_models.SIZES


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: from_function(own_models.plain, vocab_size=0, max_positions=9),
            "vocab_size=0; it must be",
        ),
        (
            lambda: from_function(own_models.plain, vocab_size=9, max_positions=None),
            "max_positions=None; it must be",
        ),
        (lambda: from_linen(Unhashable(), **SIZES), "arrays belong in the params"),
        (
            lambda: from_function(
                own_models.cached, **SIZES, init_cache=lambda b, s: jnp.zeros((b, s))
            ),
            r"init_cache returns a \w+; return a specjax.KVCache, .* "
            r"inherits from specjax.contract.Cache",
        ),
        (
            lambda: from_function(
                own_models.cached,
                **SIZES,
                init_cache=lambda b, s: RecurrentCache(jnp.zeros((1, b)), jnp.zeros(b)),
            ),
            r"init_cache\(3, 2\) holds an array \[1, 3\]; axis 0",
        ),
        (
            lambda: from_function(lambda p, t: jnp.zeros((2, 29)), **SIZES).apply(
                {}, TOKENS, TOKENS
            ),
            r"returned \(an array \[2, 29\]\); the first must be logits \[2, 4, 29\]",
        ),
        (
            lambda: from_function(own_models.plain, **SIZES).apply(
                {}, TOKENS, TOKENS, None, np.ones((1, 4, 4), bool)
            ),
            "reads chains only",
        ),
        (
            lambda: from_function(
                lambda p, t, *_: jnp.zeros((*t.shape, 29)), **SIZES, init_cache=own_models.empty_kv
            ).apply({}, TOKENS, TOKENS),
            r"returned an array \[2, 4, 29\]; with a cache it must return \(logits, cache\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    """The error gives the value and the cure before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", own_models.NAMES)
def test_the_check_passes_what_is_right(name):
    """Every model of this file passes."""
    check_model(*own_models.own(name))


def broken(**changes):
    """The cached function with one mistake."""

    def apply(params, tokens, positions, cache, mask):
        if "mask" in changes:
            mask = None
        if "positions" in changes:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if "tokens" in changes:
            tokens = jnp.roll(tokens, -1, axis=1)
        logits, after = own_models.cached(params, tokens, positions, cache, mask)
        if "length" in changes:
            after = after.replace(length=after.length + 1)
        if "nothing staged" in changes:
            after = cache
        return logits, after

    return from_function(apply, **SIZES, init_cache=own_models.empty_kv)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("mask", "a branch of a tree"),
        ("positions", "logits after a commit differ"),
        ("tokens", "not causal"),
        ("length", "commit moves it"),
        ("nothing staged", "logits after a commit differ"),
    ],
)
def test_the_check_finds_what_is_wrong(mistake, message):
    """Each common mistake is found by the law that it breaks."""
    with pytest.raises(ValueError, match=message):
        check_model(broken(**{mistake: True}), own_models.own(CACHED)[1])


def test_the_check_needs_room():
    """A model that is too small to be checked is not called correct."""
    with pytest.raises(ValueError, match="8 different tokens"):
        check_model(from_function(own_models.plain, vocab_size=7, max_positions=48), {})
