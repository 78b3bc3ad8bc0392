"""Sampling settings, the warp of logits, and the noise that draws a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import stored
from warps import DEFAULTS, LOGITS, SETTINGS

from specjax import Sampling, sampling

warp = jax.jit(sampling.warp)


def one_hot(logits):
    """0 at the first maximum and -inf elsewhere."""
    return np.where(np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None], 0.0, -np.inf)


@pytest.mark.parametrize("row", range(len(SETTINGS)), ids=map(str, SETTINGS))
def test_warp_equals_transformers(row):
    """One setting for the whole batch keeps the same tokens as transformers, with the same
    logits."""
    warped = np.asarray(warp(LOGITS, Sampling.create(len(LOGITS), **SETTINGS[row])))
    wanted = stored.warped(row)
    np.testing.assert_array_equal(np.isneginf(warped), np.isneginf(wanted))
    np.testing.assert_allclose(warped, wanted, rtol=1e-6)


def test_each_row_has_its_own_settings():
    """In a mixed batch with greedy rows, each row is warped as if it were alone."""
    rows = [DEFAULTS | s for s in SETTINGS]
    rows[2]["temperature"] = rows[14]["temperature"] = 0.0
    settings = {name: [r[name] for r in rows] for name in DEFAULTS}
    warped = np.asarray(warp(LOGITS, Sampling.create(len(rows), **settings)))
    for n, (logits, row, got) in enumerate(zip(LOGITS, rows, warped, strict=True)):
        wanted = stored.warped(n)[n] if row["temperature"] else one_hot(logits)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_settings_that_are_off_change_nothing():
    """Temperature 1 without filters returns the logits themselves."""
    np.testing.assert_array_equal(warp(LOGITS, Sampling.create(len(LOGITS))), LOGITS)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.3}], ids=["plain", "filtered"]
)
def test_temperature_zero_leaves_the_first_maximum(filters):
    """Greedy is a warp that leaves one token, the first of equal ones, so that no noise can move
    it."""
    logits = np.round(LOGITS / 3)  # rounded, so that maxima tie
    assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 1).any()
    warped = warp(logits, Sampling.create(len(logits), 0.0, **filters))
    np.testing.assert_array_equal(warped, one_hot(logits))


@pytest.mark.parametrize("top_p", [1e-38, 1e-45, 1e-60])
def test_the_smallest_top_p_keeps_the_best_token(top_p):
    """A top_p that float32 rounds to a subnormal or to 0 still keeps one token."""
    warped = np.asarray(warp(LOGITS, Sampling.create(len(LOGITS), top_p=top_p)))
    np.testing.assert_array_equal(np.isneginf(warped), np.isneginf(one_hot(LOGITS)))


@pytest.mark.parametrize("temperature", [1e-20, 2e-38, 1e-38, 1e-45, 1e-60])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.3}], ids=["plain", "filtered"]
)
def test_the_smallest_temperatures_are_all_but_greedy(temperature, filters):
    """Logits as large as 3000 neither overflow nor tie, and noise does not move the best token."""
    logits = 1000 * LOGITS
    warped = np.asarray(warp(logits, Sampling.create(len(logits), temperature, **filters)))
    assert not (np.isnan(warped) | np.isposinf(warped)).any()
    chances = np.asarray(jax.nn.softmax(warped))
    np.testing.assert_array_equal(chances, np.exp(one_hot(logits)))
    np.testing.assert_array_equal(
        sampling.argmax(warped + 20 * (-1.0) ** np.arange(61)), logits.argmax(-1)
    )


def test_ties_with_the_last_one_kept_are_kept():
    """As in transformers, top-k may keep more than k tokens."""
    logits = np.array([[[3.0, 1.0, 2.0, 2.0, 0.0]]], np.float32)
    kept = ~np.isneginf(np.asarray(warp(logits, Sampling.create(1, top_k=2))))
    assert kept[0, 0].tolist() == [True, False, True, True, False]


def test_warp_computes_in_float32():
    """bfloat16 logits are sampled from in float32."""
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    settings = Sampling.create(len(LOGITS), 0.7, 9, 0.9, 0.01)
    assert warp(logits, settings).dtype == jnp.float32
    np.testing.assert_array_equal(
        warp(logits, settings), warp(logits.astype(jnp.float32), settings)
    )


@pytest.mark.parametrize("form", [0, 1], ids=["gpu", "others"])
@pytest.mark.parametrize("keep", [1, 2, 17, 63, 64])
def test_bisection_finds_what_sorting_finds(keep, form, monkeypatch):
    """`_threshold` is the k-th largest value, with ties, zeros and infinities."""
    monkeypatch.setattr(sampling, "on_gpu", lambda *given: given[form](*given[2:]))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 64)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, ::2] = -np.inf
    x[3] = 0.0
    x[4] = np.where(rng.random(64) < 0.5, 0.0, -0.0)
    x[5] *= 1e38
    x[6] *= 1e-30
    x[7] = -np.abs(x[7])
    found = sampling._threshold(jnp.asarray(x), lambda kept: kept.astype(int), np.array(keep))
    np.testing.assert_array_equal(found, np.sort(x, axis=-1)[:, -keep][:, None])


@pytest.mark.parametrize("form", [0, 1], ids=["gpu", "others"])
def test_a_set_that_is_never_enough_has_no_threshold(form, monkeypatch):
    monkeypatch.setattr(sampling, "on_gpu", lambda *given: given[form](*given[2:]))
    x = jnp.array([[1.0, -2.0, -jnp.inf]])
    assert sampling._threshold(x, lambda kept: kept.astype(int), np.array(4)) == -jnp.inf


@pytest.mark.parametrize("size", [1, 9, 32, 96, 128, 384, 4096, 5003])
def test_argmax_is_the_first_maximum(size):
    """Of equal maxima the smallest index is taken, also among infinities and in other blocks."""
    x = np.random.default_rng(2).integers(0, 3 + size // 40, (200, size)).astype(np.float32)
    x[0], x[1] = -np.inf, 5.0
    x[2, size // 3 : size // 2] = np.inf
    for index in (sampling.argmax(jnp.asarray(x)), jax.vmap(sampling.argmax)(jnp.asarray(x))):
        assert index.dtype == jnp.int32
        np.testing.assert_array_equal(index, x.argmax(-1))
    x[:, size // 2] = np.nan
    assert (sampling.argmax(jnp.asarray(x)) < size).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", 2),
        ("min_p", -0.25),
    ],
)
def test_values_out_of_range_are_named(name, value):
    """The error has the setting and the value, for one of several rows as for all."""
    with pytest.raises(ValueError, match=f"{name}={value:g} is not allowed; it must be"):
        Sampling.create(2, **{name: value})
    with pytest.raises(ValueError, match=f"{name}={value:g} "):
        Sampling.create(2, **{name: [1, value]})


def test_values_must_fit_the_rows():
    """There is one value, or one per row."""
    with pytest.raises(ValueError, match="temperature has 3 values for 2 rows"):
        Sampling.create(2, temperature=[1, 1, 1])


def test_keys_of_rows_on_the_host_have_the_bits_of_jax():
    seeds = np.random.default_rng(0).integers(0, 2**32, 40, np.uint32)
    seeds[:4] = 0, 1, 2**31, 2**32 - 1
    numbers = np.arange(40, dtype=np.int32)[::-1]

    @jax.vmap
    def of_jax(seed, number):
        return jax.random.key_data(jax.random.fold_in(sampling.make_key(seed), number))

    np.testing.assert_array_equal(
        sampling.folded_keys(seeds, numbers), jax.jit(of_jax)(seeds, numbers)
    )


create_shared = jax.jit(sampling.SharedDraw.create, static_argnums=(2, 3))


def shared(keys, positions, max_depth=3, size=11, sampled=True):
    return np.asarray(
        create_shared(keys, jnp.array(positions), max_depth, size, jnp.array(sampled)).gumbel
    )


def test_shared_noise_is_of_key_and_absolute_position():
    """An absolute position has one noise, for any root, depth, batch and depth of the tree."""
    keys = jax.random.split(jax.random.key(0), 3)
    base = shared(keys, [5, 5, 5])
    np.testing.assert_array_equal(shared(keys, [4, 4, 4])[:, 1:], base[:, :-1])
    np.testing.assert_array_equal(shared(keys, [5, 5, 5], max_depth=0), base[:, :1])
    np.testing.assert_array_equal(shared(keys[1:2], [5])[0], base[1])
    np.testing.assert_array_equal(shared(keys[::-1], [5, 5, 5])[::-1], base)
    np.testing.assert_array_equal(shared(keys, [7, 5, 9])[1], base[1])


def test_shared_noise_differs_between_positions_and_keys():
    """Different positions and different keys have different noise."""
    noise = shared(jax.random.split(jax.random.key(0), 3), [5, 5, 5])
    assert len(np.unique(noise)) == noise.size


def test_shared_noise_is_off_without_a_sampled_row():
    """A greedy batch draws nothing."""
    assert (shared(jax.random.split(jax.random.key(0), 3), [5, 5, 5], sampled=False) == 0).all()


def test_shared_noise_depends_on_the_depth_of_a_node_alone():
    """Siblings and cousins share the noise of their position."""
    draw = sampling.SharedDraw(jnp.arange(12.0).reshape(4, 3))
    assert draw.noise(jnp.array([1, 5, 5]), jnp.array([2, 2, 0])).tolist() == [
        [6, 7, 8],
        [6, 7, 8],
        [0, 1, 2],
    ]


def test_independent_streams_do_not_meet():
    """Nodes, acceptance, residual, positions and rows have separate noise; equal keys and
    positions repeat it."""
    keys = jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def draw_everything(position):
        draw = sampling.IndependentDraw.create(keys, position, 7, 7)

        def one(d):
            noise = d.noise(jnp.arange(3), jnp.zeros(3, jnp.int32))
            return jnp.concatenate([*noise, -jnp.log(-jnp.log(d.acceptance(7))), d.residual()])

        return jax.vmap(one)(draw)

    def everything(position):
        return np.asarray(draw_everything(jnp.array(position)))

    draws = np.stack([everything([4, 4]), everything([5, 5])])
    assert len(np.unique(draws)) == draws.size
    np.testing.assert_array_equal(everything([4, 5])[1], draws[1, 1])


DRAWS = 40_000


@pytest.mark.parametrize("source", ["keys", "positions", "nodes", "residual"])
def test_noise_samples_the_softmax(source):
    """argmax(logits + noise) is a sample of softmax(logits), along every axis of the noise.

    With 40000 draws of 7 tokens and p < 1e-6, a bias of 1.5 % in total variation fails almost
    surely.
    """
    logits = jnp.array([1.0, -0.5, 0.3, 2.0, -2.0, 0.0, 0.7])
    zeros, key = jnp.zeros(DRAWS, jnp.int32), jax.random.key(7)
    keys = jax.random.split(key, DRAWS)
    if source == "keys":
        noise = shared(keys, zeros, 0, 7)[:, 0]
    elif source == "positions":
        noise = shared(key[None], [3], DRAWS - 1, 7)[0]
    elif source == "nodes":
        noise = jax.jit(sampling.IndependentDraw(key, 7, 1).noise)(jnp.arange(DRAWS), zeros)
    else:
        noise = jax.jit(jax.vmap(lambda d: d.residual()))(
            sampling.IndependentDraw.create(keys, zeros, 7, 1)
        )
    counts = np.bincount(sampling.argmax(logits + noise), minlength=7)
    assert (
        scipy.stats.chisquare(counts, DRAWS * np.asarray(jax.nn.softmax(logits), np.float64)).pvalue
        > 1e-6
    )


def test_acceptance_draws_are_uniform():
    """They are in [0, 1), with every tenth equally frequent."""
    keys = jax.random.split(jax.random.key(8), DRAWS // 4)
    draw = sampling.IndependentDraw.create(keys, jnp.zeros(len(keys), jnp.int32), 7, 4)
    uniforms = np.asarray(jax.jit(jax.vmap(lambda d: d.acceptance(4)))(draw))
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert scipy.stats.chisquare(np.histogram(uniforms, 10, (0, 1))[0]).pvalue > 1e-6


def test_what_other_platforms_run_computes_the_same(monkeypatch):
    """The greatest numbers, also none of them, the first of equal ones, and the noise of a node."""
    x = np.random.default_rng(0).integers(0, 9, (7, 40)).astype(np.float32)
    x[0, 3:] = -np.inf
    draw = sampling.SharedDraw(jnp.arange(12.0).reshape(4, 3))
    depth = jnp.array([0, 3, 1, 2])

    def made():
        found = [*sampling.top_k(x, 3), *sampling.top_k(x, 0)]
        return [sampling.argmax(x), *found, draw.noise(depth, depth)]

    here = made()
    np.testing.assert_array_equal(here[0], x.argmax(-1))
    monkeypatch.setattr(sampling, "on_cpu", lambda cpu, other, *given: other(*given))
    monkeypatch.setattr(sampling, "on_tpu", lambda tpu, other, *given: tpu(*given))
    for one, another in zip(here, made(), strict=True):
        np.testing.assert_array_equal(one, another)


def test_the_order_of_siblings():
    """First those that are kept, by what is drawn; then the others by their logits; last those that
    were excluded in spite of a greater logit.  A constraint may keep what a model cannot draft."""
    infinity = np.inf
    logits = jnp.array([2.0, -infinity, 0.5, 0.3, 1.0, -1.0, -2.0])
    warped = jnp.array([2.0, 0.0, 0.5, *[-infinity] * 4])
    noise = jnp.array([-3.0, 0.1, 0.2, 9.0, 9.0, 9.0, 9.0])
    found = sampling.scores(logits, warped, noise)
    assert np.argsort(-found).tolist() == [2, 1, 0, 3, 5, 6, 4] and np.isfinite(found).all()
    np.testing.assert_allclose(found[:3], [-1.0, 0.1, 0.7], rtol=1e-6)
    np.testing.assert_allclose(found[3:4] - found[5:7], [1.3, 2.3], rtol=1e-5)


def test_greedy_siblings_of_equal_logits_are_the_first_ones():
    """At temperature 0 the siblings are the tokens of greatest logits, the first of equal ones."""
    logits = jnp.array([[[1.0, 3.0, 2.0, 3.0, 3.0, 2.0]]])
    warped = sampling.warp(logits, Sampling.create(1, 0.0))
    _, siblings = sampling.top_k(sampling.scores(logits, warped, 0.0), 6)
    assert siblings[0, 0].tolist() == [1, 3, 4, 2, 5, 0]
