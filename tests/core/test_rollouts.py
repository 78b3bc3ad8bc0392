"""Samples under weights that change: the text of plain decoding, whatever is expected of it."""

from __future__ import annotations

import functools

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.rollouts import Memory, Rollouts, Sampler, rollout_keys
from specjax.rollouts.depths import Depths

PROMPTS = [[5, 9, 7], [11, 3, 8, 2, 40, 17], [30], [5, 9, 7], [4, 4]]
NEW, SAMPLES = 18, 2
COUNT = len(PROMPTS) * SAMPLES


@functools.cache
def target() -> specjax.LanguageModel:
    return specjax.load(specjax.shipped("tiny/target"))


@functools.cache
def keys() -> jax.Array:
    return rollout_keys(0, PROMPTS, SAMPLES)


@functools.cache
def sampler(depth: int = 8) -> Sampler:
    return Sampler(target(), slots=4, max_new_tokens=NEW, num_drafts=depth)


def sample(depth: int = 8, **options) -> Rollouts:
    return sampler(depth).sample(PROMPTS, keys(), samples=SAMPLES, **options)


@functools.cache
def moved() -> dict:
    """Other weights, near enough for most tokens to stay."""
    leaves, tree = jax.tree.flatten(target().params)
    draws = np.random.default_rng(0)
    news = [x + 0.02 * x.std() * draws.standard_normal(x.shape, np.float32) for x in leaves]
    return jax.tree.unflatten(tree, news)


@functools.cache
def fresh(which: str) -> Rollouts:
    """Plain decoding of all samples with the first or the second weights."""
    return sample(0, params=moved() if which == "moved" else None)


def test_a_sample_is_that_of_generate():
    """A row that ends makes room for the next one, and no text depends on it."""
    seeds = list(range(3, 3 + len(PROMPTS)))
    numbers = np.array(seeds, np.uint32)
    own = jax.vmap(lambda seed: jax.random.fold_in(specjax.make_key(seed), 0))(numbers)
    made = sampler().sample(PROMPTS, own)
    settings = {"temperature": 1.0, "max_new_tokens": NEW, "num_drafts": 0, "logprobs": 0}
    wanted = specjax.generate(target(), PROMPTS, seed=seeds, **settings)
    assert made.texts == wanted.tokens
    assert wanted.logprobs is not None
    for row, theirs in enumerate(wanted.logprobs):
        found = np.asarray(made.raw_logprobs[row])[: len(theirs.raw)]
        np.testing.assert_allclose(found, theirs.raw, rtol=0, atol=1e-5)


def test_new_weights_with_old_texts_as_drafts():
    """The result is plain decoding of the new weights, in fewer passes."""
    old, wanted = fresh("own"), fresh("moved")
    texts = [a == b for a, b in zip(old.texts, wanted.texts, strict=True)]
    assert 0 < sum(texts) < COUNT
    made = sample(params=moved(), expected=old.texts)
    assert made.texts == wanted.texts
    assert made.passes < 0.8 * wanted.passes
    for name in ("logprobs", "raw_logprobs"):
        found, exact = np.asarray(getattr(made, name)), np.asarray(getattr(wanted, name))
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(made.ended), np.asarray(wanted.ended))


def test_weights_are_data():
    """Other weights compile nothing, with expected texts and without.  (Fewer rows do, once.)"""
    one, few = Sampler(target(), slots=1, max_new_tokens=NEW, num_drafts=8), PROMPTS[:2]
    old = one.sample(few, keys()[:2]).texts
    one.sample(few, keys()[:2], expected=old)
    others = moved()
    before = counted.compilations()
    new = one.sample(few, keys()[:2], params=others)
    drafted = one.sample(few, keys()[:2], params=others, expected=old)
    assert drafted.texts == new.texts
    assert counted.compilations() == before


def test_log_probabilities_are_those_of_a_pass_over_the_text():
    """The ratio of importance between sampler and trainer is 1 in float32."""
    made = fresh("moved")
    for number, text in enumerate(made.texts):
        whole = jnp.array([[*PROMPTS[number // SAMPLES], *text]])
        positions = jnp.arange(whole.shape[1])[None]
        logits = target().model.apply(moved(), whole, positions).logits[0, -len(text) - 1 : -1]
        wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), whole[0, -len(text) :, None], 1)
        found = np.asarray(made.logprobs[number])[: len(text)]
        np.testing.assert_allclose(found, wanted[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["shuffled", "short", "none"])
def test_wrong_expectations_change_nothing(wrong):
    texts = fresh("own").texts
    given = {
        "shuffled": [*texts[3:], *texts[:3]],
        "short": [text[:4] for text in texts],
        "none": [None] * COUNT,
    }
    assert sample(expected=given[wrong]).texts == texts


def test_keys_say_what_a_sample_is_of():
    """They differ by run, prompt, sample and epoch, for equal prompts too, and stay if asked to."""

    def words(*arguments, **options):
        return np.asarray(jax.random.key_data(rollout_keys(*arguments, **options)))

    first = words(0, PROMPTS, SAMPLES)
    assert len(np.unique(first, axis=0)) == COUNT
    np.testing.assert_array_equal(first, words(0, PROMPTS, SAMPLES))
    np.testing.assert_array_equal(first[:1], words(0, PROMPTS[:1], 1))
    assert not (first == words(1, PROMPTS, SAMPLES)).all(1).any()
    assert not (first == words(0, PROMPTS, SAMPLES, epoch=1)).all(1).any()
    np.testing.assert_array_equal(first, words(0, PROMPTS, SAMPLES, epoch=7, refresh="never"))
    np.testing.assert_array_equal(first, words(0, PROMPTS, SAMPLES, epoch=1, refresh=2))


def test_a_memory_is_bounded_and_saved(tmp_path):
    texts = fresh("own").texts
    memory = Memory(target())
    memory.put(PROMPTS, texts, SAMPLES)
    # Of two equal prompts the last one counts.
    wanted = [*texts[6:8], *texts[2:]]
    assert memory.expected(PROMPTS, SAMPLES) == wanted
    assert memory.expected([[1, 2]], 1) == [None]
    memory.save(tmp_path / "memory.npz")
    again = Memory(target())
    again.load(tmp_path / "memory.npz")
    assert again.expected(PROMPTS, SAMPLES) == wanted and again.tokens == memory.tokens
    small = Memory(target(), most_tokens=2 * NEW)
    small.load(tmp_path / "memory.npz")
    assert small.tokens <= 2 * NEW and small.expected(PROMPTS[4:], SAMPLES) == wanted[8:]


def test_a_memory_of_another_tokenizer_is_refused(tmp_path):
    other = specjax.load(specjax.shipped("pycode/target"))
    memory = Memory(other)
    memory.put([[1]], [[2, 3]])
    memory.save(tmp_path / "other.npz")
    own = Memory(target())
    own.put([[1]], [[4]])
    with pytest.raises(ValueError, match="another tokenizer"):
        own.load(tmp_path / "other.npz")
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is no memory of rollouts"):
        own.load(tmp_path / "broken.npz")
    assert own.expected([[1]]) == [[4]]


def test_bad_calls_are_refused():
    """By name, before anything is compiled."""
    same = jnp.repeat(keys()[:1], 2)
    with pytest.raises(ValueError, match="samples 0 and 1 have one prompt and one key"):
        sampler().sample([[5]], same, samples=2)
    with pytest.raises(ValueError, match="key has the shape"):
        sampler().sample([[5]], keys())
    with pytest.raises(ValueError, match="params are no weights of target"):
        sampler().sample([[5]], keys()[:1], params={"head": np.zeros(3)})
    with pytest.raises(ValueError, match="expected has 1 entries for 2 prompts"):
        sampler().sample([[5], [6]], keys()[:2], expected=[[1]])
    with pytest.raises(ValueError, match="reads at most"):
        sampler().sample([[5] * target().model.max_positions], keys()[:1])
    with pytest.raises(ValueError, match="slots=0"):
        Sampler(target(), slots=0)
    with pytest.raises(ValueError, match="refresh=0"):
        rollout_keys(0, PROMPTS, refresh=0)


def test_the_depth_follows_acceptance_and_times():
    """Each number is tried, the best one is taken, and without drafts a few are tried again."""
    depths = Depths((1, 5, 9), 8)
    times = {0: 1.0, 4: 1.4, 8: 2.0}

    def turns(count: int, alpha: float) -> list[int]:
        chosen = []
        for _ in range(count):
            chosen.append(depths.best(4))
            depth = chosen[-1]
            accepted = sum(alpha**n for n in range(1, depth + 1))
            depths.learn(4, depth, seconds=times[depth], accepted=accepted)
        return chosen

    assert set(turns(4, 0.98)) == {0, 4, 8}
    assert set(turns(10, 0.98)) == {8}
    assert set(turns(20, 0.6)[3:]) == {4}
    last = turns(60, 0.1)
    assert set(last[4:]) == {0, 4} and last.count(0) > 50
    assert depths.best(2) == 8
