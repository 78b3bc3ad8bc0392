"""The kernel of draws: the tokens of XLA, sums for log-probabilities, and what is not sure."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import kernels, sampling
from specjax.decoding import Decoder
from specjax.kernels import available, drawing
from specjax.proposers import NoProposer
from specjax.rules import Match

pytestmark = pytest.mark.xdist_group("draws")  # a share takes all of them, or none

# Sizes around those of vectors, of two vectors together, and of usual vocabularies.
SIZES = 1, 3, 16, 17, 33, 100, 4096, 50_257
NODES = 3
TEMPERATURES = 0.0, 0.5, 1.0, 1.0, 1.3


@functools.partial(jax.jit, static_argnums=4)
def at_once(logits, settings, key, position, sums):
    none = jnp.full(position.shape, -1, jnp.int32)
    return sampling.draw_at_once(logits, settings, key, position, sums, lambda: none)


@jax.jit
def of_xla(logits, settings, key, position):
    """The tokens, and the log-probabilities [B, N, V] before and after warping."""
    size = logits.shape[-1]

    def noise(key, at):
        return jax.random.gumbel(jax.random.fold_in(key, at), (size,), jnp.float32, mode="low")

    warped = sampling.warp(logits, settings)
    drawn = warped + jax.vmap(jax.vmap(noise, (None, 0)))(key, position)
    return jnp.argmax(drawn, -1), jax.nn.log_softmax(logits), jax.nn.log_softmax(warped)


def inputs(size: int, scale: float, filters: bool):
    rows = len(TEMPERATURES)
    drawn = np.random.default_rng(size)
    logits = drawn.normal(size=(rows, NODES, size)).astype(np.float32) * np.float32(scale)
    given = {"top_k": [0, 1, 5, 0, 0], "top_p": [1, 1, 0.9, 0.6, 1], "min_p": 0.01}
    settings = sampling.Sampling.create(rows, TEMPERATURES, **given if filters else {})
    position = np.arange(rows)[:, None] * 7 + np.arange(NODES)
    return logits, settings, jax.random.split(specjax.make_key(size), rows), position


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 300.0])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_and_log_probabilities_are_those_of_xla(size, scale, filters):
    logits, settings, key, position = inputs(size, scale, filters)
    assert sampling.draws_at_once(key, size)
    made = at_once(logits, settings, key, position, True)
    wanted, raw, warped = of_xla(logits, settings, key, position)
    np.testing.assert_array_equal(made.token, wanted)
    nodes = np.broadcast_to(np.arange(NODES), wanted.shape)
    found = made.log_probabilities(logits, nodes, wanted)
    for ours, theirs in zip(found, (raw, warped), strict=True):
        theirs = np.take_along_axis(np.asarray(theirs), np.asarray(wanted)[..., None], -1)[..., 0]
        # XLA's are differences of logits, which are rounded.
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(scale, 1), rtol=1e-5)


def test_noise_of_xla_is_near_enough_to_what_it_stands_for():
    """`NEAR` covers the rounding of all noise that there is, of exponentials, and of sums."""
    steps = np.arange(2**23, dtype=np.uint32)
    noise = np.asarray(jax.jit(sampling._gumbel_of)(steps << 9), np.float64)
    uniform = np.maximum(steps / 2.0**23, 2.0**-126)
    apart = np.abs(noise + np.log(-np.log(uniform))).max()
    rounding = 2.0**-23 * 141  # of logits of size 0 to 25, and of their sums with noise
    assert 2 * (apart + 1e-6) + rounding < drawing.NEAR


def test_a_token_whose_lead_is_small_is_not_sure():
    """Each row has two tokens that are nearly as good; those whose order rounding may change are
    left to XLA, and others are drawn."""
    size, count = 64, 200
    key = jax.random.split(specjax.make_key(1), count)
    noise = np.asarray(
        jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, 0), (size,), mode="low"))(
            key
        )
    )
    order, rows = np.argsort(noise), np.arange(count)
    best, other = order[:, -1], order[:, -3]
    lead = noise[rows, best] - noise[rows, other]
    draw = jax.jit(functools.partial(kernels.draws, sums=False))

    def drawn(more: float) -> kernels.Draws:
        logits = np.zeros((count, size), np.float32)
        logits[rows, other] = lead + np.float32(more)
        none = np.zeros(count, np.uint32)
        every = np.full(count, -np.inf, np.float32)
        data = jax.random.key_data(key)
        return draw(logits, data, none, np.ones(count, np.float32), every)

    for near in (0.0, 1e-6, -1e-5):
        assert not np.asarray(drawn(near).sure).any()
    for more, winner in ((0.01, other), (-0.01, best)):
        made = drawn(more)
        assert np.asarray(made.sure).all() and (np.asarray(made.token) == winner).all()


def test_a_least_temperature_is_not_sure():
    """There the noise only decides between logits that are equal, which rounding may change."""
    logits, settings, key, position = inputs(100, 1.0, False)
    settings = dataclasses.replace(settings, temperature=settings.temperature.at[2].set(1e-20))
    assert (np.asarray(at_once(logits, settings, key, position, True).token) == -1).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_has_no_greatest_number_is_not_sure(wrong):
    logits, settings, key, position = inputs(100, 1.0, False)
    logits[:, :, 70] = wrong
    assert (np.asarray(at_once(logits, settings, key, position, True).token) == -1).all()


def test_the_bits_of_a_row_do_not_depend_on_others():
    logits, settings, key, position = inputs(4097, 3.0, False)
    made = at_once(logits, settings, key, position, True)
    for n in range(len(TEMPERATURES)):
        part = slice(n, n + 1)
        alone = at_once(
            logits[part], jax.tree.map(lambda x, part=part: x[part], settings), key[part],
            position[part], True,
        )  # fmt: skip
        for one, every in ((alone.most, made.most), (alone.total, made.total)):
            np.testing.assert_array_equal(np.asarray(one)[0], np.asarray(every)[n])


@functools.cache
def target():
    return specjax.load(specjax.shipped("tiny/target"))


def state_and_decoder(at_once: bool, capacity: int = 64):
    model = target().model
    made = Decoder(model, NoProposer(), Match(), (), capacity, None, 0, draws_at_once=at_once)
    params = specjax.Params(target().params, None)
    prompt = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    state = made.prefill(
        params, prompt, np.full(2, 4, np.int32), limit=np.full(2, 40, np.int32),
        sampling=sampling.Sampling.create(2, [1.0, 0.7], top_p=[1.0, 0.8]),
        key=jax.random.split(specjax.make_key(4), 2),
    )  # fmt: skip
    return made, params, state


@pytest.mark.parametrize("reason", ["no kernel", "not asked", "none"])
def test_a_text_does_not_depend_on_the_kernel(reason, monkeypatch):
    capacity = 50 + len(reason)  # a program of its own
    plain, params, state = state_and_decoder(False, capacity)
    wanted = plain.run(params, state)
    if reason == "no kernel":
        monkeypatch.setattr(available, "usable", lambda: False)
        available.made.cache_clear()
    try:
        made, params, state = state_and_decoder(reason != "not asked", capacity)
        calls = made.lower(params, state).as_text().count("@specjax_drawing_float32(")
        assert calls == (reason == "none")
        found = made.run(params, state)
    finally:
        available.made.cache_clear()
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    for name in ("raw", "warped"):
        ours, theirs = (np.asarray(getattr(x.logprobs, name)) for x in (found, wanted))
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_a_pass_that_is_not_sure_draws_as_xla_does(monkeypatch):
    plain, params, state = state_and_decoder(False)
    wanted, ours, calls = plain.run(params, state).tokens, kernels.draws, []

    def never(*given):
        calls.append(given)
        made = ours(*given)
        return made.replace(sure=jnp.zeros_like(made.sure), token=jnp.full_like(made.token, 7))

    monkeypatch.setattr(kernels, "draws", never, raising=False)
    made, params, state = state_and_decoder(True, capacity=63)
    np.testing.assert_array_equal(made.run(params, state).tokens[:, :40], wanted[:, :40])
    assert calls
