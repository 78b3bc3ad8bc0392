"""Samples under weights that change: the text of plain decoding, whatever is expected of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import kernels
from specjax.contract import Context
from specjax.rollouts import Memory, Rollouts, Sampler, rollout_keys
from specjax.rollouts.depths import Depths, Row, Turn
from specjax.sampling import PositionDraw
from specjax.types import Block

pytestmark = pytest.mark.xdist_group("rollouts")  # a share takes all of them, or none

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


def test_new_weights_with_old_texts_as_drafts(monkeypatch):
    """The result is plain decoding of the new weights, in fewer passes."""
    monkeypatch.setattr(Depths, "best", deepest)
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


def deepest(depths: Depths, size: int, rows: list, **_) -> Turn:
    """The most drafts in every step, whatever steps take."""
    return Turn(depths.options[-1], 2, range(len(rows)))


def test_weights_are_data(monkeypatch):
    """Other weights compile nothing, with expected texts and without.  (Fewer rows do, once, and so
    does a number of drafts.)"""
    monkeypatch.setattr(Depths, "best", deepest)
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


def test_a_perfect_store_gives_all_drafts_and_a_token():
    """A pass over K drafts gets K + 1 tokens."""
    one = Sampler(target(), slots=1, max_new_tokens=NEW, num_drafts=8, eos=[])
    old = one.sample(PROMPTS[:2], keys()[:2])
    made = one.sample(PROMPTS[:2], keys()[:2], expected=old.texts)
    assert made.texts == old.texts and {len(text) for text in made.texts} == {NEW}
    assert made.passes == 2 * -(-NEW // 9) and old.passes == 2 * NEW


def test_a_sample_has_a_limit_of_its_own():
    """It is the beginning of what it is without, with drafts and without."""
    most = np.arange(COUNT) % NEW + 1
    for depth, expected in ((0, None), (8, fresh("own").texts)):
        made = sample(depth, max_new_tokens=most, expected=expected)
        wanted = [text[:limit] for text, limit in zip(fresh("own").texts, most, strict=True)]
        assert made.texts == wanted
        ended = np.asarray(fresh("own").ended) & (np.asarray(fresh("own").mask).sum(1) <= most)
        np.testing.assert_array_equal(made.ended, ended)
        mask = np.asarray(made.mask)
        np.testing.assert_allclose(
            np.asarray(made.logprobs)[mask], np.asarray(fresh("own").logprobs)[mask], atol=1e-5
        )


@pytest.mark.parametrize("wrong", ["shuffled", "short", "none"])
def test_wrong_expectations_change_nothing(wrong, monkeypatch):
    """Programs with few, many and no drafts take turns with one state."""
    texts = fresh("own").texts
    turns = itertools.cycle([(8, 1), (0, 2), (5, 1)])
    monkeypatch.setattr(
        Depths, "best", lambda depths, size, rows, **_: Turn(*next(turns), range(len(rows)))
    )
    given = {
        "shuffled": [*texts[3:], *texts[:3]],
        "short": [text[:4] for text in texts],
        "none": [None] * COUNT,
    }
    assert sample(expected=given[wrong], documents=[[text] for text in texts[:5]]).texts == texts


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
    whole = (tmp_path / "other.npz").read_bytes()
    flipped = bytes([*whole[:60], whole[60] ^ 255, *whole[61:]])
    for content in (b"no archive", b"", whole[: len(whole) // 2], flipped):
        (tmp_path / "broken.npz").write_bytes(content)
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
    if kernels.widens_columns():
        kept = specjax.load(specjax.shipped("tiny/target"), keep_bfloat16=True)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), kept.params)
        with pytest.raises(ValueError, match=r"float32.*; load .* without keep_bf"):
            Sampler(kept, slots=1, max_new_tokens=4).sample([[3]], keys()[:1], params=wide)
    with pytest.raises(ValueError, match="params are no weights of target"):
        sampler().sample([[5]], keys()[:1], params={"head": np.zeros(3)})
    own = target().params
    for wrong, message in (
        ("folder", "params has no place|is missing"),
        (jax.tree.map(lambda x: x.astype(jnp.bfloat16), own), r"is bfloat16\[.*must be float32\["),
        (jax.tree.map(lambda x: x[:1], own), r"is float32\[1.*must be float32\["),
        (jax.tree.map(lambda _: "x", own), "is no array"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler().sample([[5]], keys()[:1], params=wrong)
    memory = Memory(target())
    memory.put([[5]], [[7]])
    for prompts, texts in (
        ([[5]], ["ab"]), ([[5]], [[1.5]]), (["ab"], [[1]]), ([[5]], [[-1]]),
        ([[5]], [[[1], [2, 3]]]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"pass a list of token ids|vocabulary"):
            memory.put(prompts, texts)
    for prompt in ("ab", [1.5], 5):
        with pytest.raises(ValueError, match="pass a list of token ids"):
            memory.expected([prompt])  # pyright: ignore
    with pytest.raises(ValueError, match="samples=0"):
        memory.expected([[5]], 0)
    assert memory.expected([[5], [6]]) == [[7], None]
    with pytest.raises(ValueError, match="expected has 1 entries for 2 prompts"):
        sampler().sample([[5], [6]], keys()[:2], expected=[[1]])
    with pytest.raises(ValueError, match="documents has 1 entries for 2 prompts"):
        sampler().sample([[5], [6]], keys()[:2], documents=[[[1]]])
    with pytest.raises(ValueError, match="max_new_tokens has 1 entries; pass a list of 2"):
        sampler().sample([[5], [6]], keys()[:2], max_new_tokens=[3])
    with pytest.raises(ValueError, match=rf"max_new_tokens\[1\]={NEW + 1}.*in \[1, {NEW}\]"):
        sampler().sample([[5], [6]], keys()[:2], max_new_tokens=[3, NEW + 1])
    with pytest.raises(ValueError, match="reads at most"):
        sampler().sample([[5] * target().model.max_positions], keys()[:1])
    with pytest.raises(ValueError, match="slots=0"):
        Sampler(target(), slots=0)
    with pytest.raises(ValueError, match="refresh=0"):
        rollout_keys(0, PROMPTS, refresh=0)


def times(size: int, depth: int) -> float:
    return 1.0 + 0.1 * size * depth


def turns(depths: Depths, rows: list[Row], count: int) -> list[int]:
    """The numbers of drafts that are chosen where steps take `times`."""
    chosen = []
    for _ in range(count):
        depth, steps, group = depths.best(len(rows), rows)
        assert steps >= 1 and len(group) > 0
        size = depths.padded(len(group))
        depths.learn(size, depth, times(size, depth))
        chosen.append(depth)
    return chosen


def test_the_depth_follows_acceptance_and_times():
    """Rows that go on as expected have more drafts than rows that do not, and fewer rows more."""
    depths = Depths(16)
    assert depths.options == [0, 5, 11, 15, 16]
    good, fair, bad = (Row(range(1000), alpha) for alpha in (0.99, 0.8, 0.05))
    assert set(turns(depths, [good] * 4, 8)[4:]) == {16}
    assert set(turns(depths, [fair] * 4, 8)[4:]) == {5}
    assert set(turns(depths, [bad] * 4, 20)) == {0}
    assert set(turns(Depths(16), [fair], 8)[4:]) <= {5, 11, 16}
    # The last rows have few numbers of drafts, so that few programs are compiled.
    assert set(turns(depths, [good], 4)) == {16} and set(turns(depths, [bad], 4)) == {0}
    # A number that was never tried is tried after some turns.
    long = Depths(16)
    assert set(turns(long, [good] * 4, 60)) >= {11, 15, 16}
    # One row of four that goes on as expected is no reason to read all rows widely.
    assert set(turns(depths, [Row([], 0.9)] * 4, 8)) == {0}
    assert set(turns(depths, [good] * 3 + [bad], 8)) == {16}


def test_rows_with_much_ahead_take_turns_alone():
    """Where that gives more tokens a second than plain decoding of all rows, until it does not."""
    depths = Depths(16, together=2)
    assert [depths.padded(n) for n in (1, 2, 3, 5)] == [2, 2, 4, 8]
    good, done = Row(range(40), 0.99), Row([5] * 10, 0.99, done=10)
    turns(depths, [good] * 8, 6)
    turn = depths.best(8, [done, good, done, good, done, done])
    assert turn.drafts == 16 and list(turn.rows) == [1, 3] and turn.steps == 2
    good.done = 39
    assert depths.best(8, [done] * 4 + [good, done]).drafts == 0
    assert list(depths.best(8, [done, good], apart=False).rows) == [0, 1]


def test_rows_behind_their_expected_text_decode_plainly():
    """A few drafts are tried again for one step, for at most a two-hundredth of the time."""
    depths = Depths(16)
    ended = Row([5] * 10, 0.99, done=10)
    chosen = turns(depths, [ended] * 4, 6000)
    tries = np.flatnonzero(chosen)
    assert {0, 5} == set(chosen) and len(tries) == 4
    assert (np.diff(tries) * times(4, 0) * 0.005 > times(4, 5) - times(4, 0)).all()
    assert np.all(np.diff(tries, 2) > 0)
    assert turns(depths, [Row([5] * 14, 0.99, done=10)] * 4, 1) == [5]
    assert not any(depths.best(4, [ended] * 4, tries=False).drafts for _ in range(9))


def test_acceptance_is_learned_from_tokens_and_from_drafts():
    """Tokens tell how often rows leave expected texts, and drafts how they go on after that; the
    end of a text, behind which nothing is drafted, is no miss."""
    depths, rate = Depths(8), 0.9
    row = Row([1] * 4000, 0.1)
    draws = np.random.default_rng(0).random((400, 4)) < rate
    means = []
    for tokens in draws.astype(int):
        depths.decoded(row, tokens.tolist())
        row.done += 4
        means.append(row.alpha)
    assert abs(np.mean(means[20:]) - rate) < 0.03
    assert abs(depths.row([1]).alpha - np.mean(means[-50:])) < 0.05
    lost = dataclasses.replace(depths.row([1] * 4000), follows=False)
    for _ in range(12):
        depths.accepted(lost, 8, sum(0.7**n for n in range(1, 9)))
    assert abs(lost.lost - 0.7) < 0.01 and depths.row([1]).lost > 0.6
    ends = depths.row([1] * 5)
    before = ends.alpha
    depths.accepted(ends, 8, 4)
    depths.decoded(ends, [1] * 5)
    assert ends.alpha > before and ends.follows


def test_a_part_that_is_as_long_as_the_batch_is_no_batch(monkeypatch):
    """Three rows that draft apart are filled up to four, and the fourth keeps its text."""
    model, prompts = specjax.load(specjax.shipped("tiny/target")), [[5, 9, 7]]
    sampler, keys = Sampler(model, slots=4, max_new_tokens=12), rollout_keys(0, prompts, 4)
    wanted = sampler.sample(prompts, keys, samples=4).texts

    def best(self, size, rows, **how):
        return Turn(self.options[1], 1, [0, 2, 3] if len(rows) == 4 else range(len(rows)))

    monkeypatch.setattr(Depths, "best", best)
    made = sampler.sample(prompts, keys, samples=4, expected=wanted)
    assert made.texts == wanted


def test_unknown_times_are_estimated():
    """From the others by the number of tokens, and one that was disturbed does not count."""
    depths = Depths(16)
    for _ in range(3):
        for size, depth in ((4, 0), (4, 5), (2, 0)):
            depths.learn(size, depth, times(size, depth))
    depths.learn(4, 0, 50.0)
    assert depths._seconds(4, 0) == times(4, 0)
    assert depths._seconds(4, 5) < depths._seconds(4, 11) < depths._seconds(4, 16)


def test_a_first_time_that_was_disturbed_does_not_count():
    """What others take tells that it was, until it has been measured more often."""
    depths = Depths(16)
    good = [Row(range(1000), 0.99)] * 4
    for depth in (0, 5, 11):
        for _ in range(4):
            depths.learn(4, depth, times(4, depth))
    for _ in range(2):  # the first one compiles
        depths.learn(4, 16, 50.0)
    assert depths.best(4, good).drafts == 16
    for _ in range(2):
        depths.learn(4, 16, 50.0)
    assert depths.best(4, good).drafts == 11


def test_longest_expectations_begin_first(monkeypatch):
    """After the samples of which nothing is expected; results keep their order."""
    texts = fresh("own").texts
    begun = []
    of_row = Depths.row
    monkeypatch.setattr(Depths, "best", deepest)
    monkeypatch.setattr(
        Depths, "row", lambda self, text: begun.append(len(text)) or of_row(self, text)
    )
    lengths = [3, 3, 9, 9, 0, 0, 3, 3, 12, 12]
    given = [text[:n] or None for text, n in zip(texts, lengths, strict=True)]
    assert sample(expected=given).texts == texts
    assert begun == [0, 0, 12, 12, 9, 9, 3, 3, 3, 3]


def test_a_drafter_behind_the_expected_texts(monkeypatch):
    """A draft model and lookup draft where nothing is expected; a wrong depth is refused."""
    monkeypatch.setattr(Depths, "best", deepest)
    draft = specjax.make_drafter(
        target(), specjax.load(specjax.shipped("tiny/draft")), num_drafts=4
    )
    texts, some = fresh("own").texts, [0, 1, 4, 5]
    few = Sampler(target(), slots=2, max_new_tokens=NEW, drafter=draft)
    given = [texts[0], None, None, texts[5]]
    made = few.sample([PROMPTS[0], PROMPTS[2]], keys()[np.array(some)], samples=2, expected=given)
    assert made.texts == [texts[n] for n in some]
    assert made.passes < 0.7 * sum(len(texts[n]) for n in some)
    bare = few.sample([PROMPTS[0], PROMPTS[2]], keys()[np.array(some)], samples=2)
    assert bare.texts == made.texts and made.passes < bare.passes < sum(len(texts[n]) for n in some)
    with pytest.raises(ValueError, match="num_drafts=3 is not allowed; it must be 0 or 4"):
        Sampler(target(), drafter=draft, num_drafts=3)
    with pytest.raises(ValueError, match="drafter=7"):
        Sampler(target(), drafter=7)


FOLLOWS = {5: 6, 6: 3, 9: 1}
"""What follows 7, 8 in the documents, and how often."""


@functools.cache
def agreement(drawn: bool) -> float:
    """How often a draft from FOLLOWS is the token that `match` draws from the same shares."""
    rows, width = 2000, 128
    found = [x for token, count in FOLLOWS.items() for x in [7, 8, token, 2] * count]
    documents = jnp.array([[-1] * (width - len(found) - 1) + found + [-1]] * rows, jnp.int32)
    prompt = jnp.array([[7, 8]] * rows, jnp.int32)
    ones = jnp.ones(rows, jnp.int32)
    block = Block(prompt, jnp.zeros((rows, 2, 1)), ones, None, documents)
    lookup = specjax.NGram(2, drawn=drawn)
    draw = PositionDraw(rollout_keys(0, [[1]], rows), ones, 16)
    context = Context(ones * 8, draw, lambda logits, path: logits, True, False, None)
    proposal, _ = lookup.propose(None, lookup.start(None, block, 8), context)
    counts = jnp.zeros(16).at[jnp.array([*FOLLOWS])].set(jnp.array([*FOLLOWS.values()]))
    first = jnp.zeros(1, jnp.int32)
    wanted = jnp.argmax(jnp.log(counts) + context.noise(first, first)[:, 0], axis=-1)
    assert (np.asarray(proposal.parent)[:, 1:] == [0, 1]).all()
    assert (np.asarray(proposal.tokens)[:, 2] == 2).all()
    return float((np.asarray(proposal.tokens)[:, 1] == np.asarray(wanted)).mean())


def test_drawn_drafts_agree_with_draws():
    """Where the documents' shares are the target's, a drawn draft is always the target's token; the
    most recent match is it as often as its token is drawn."""
    assert agreement(True) == 1.0
    assert abs(agreement(False) - 0.1) < 0.03


def test_documents_of_other_keys_change_nothing(monkeypatch):
    """Drawn lookup gives the text of plain decoding, in fewer passes where it helps."""
    monkeypatch.setattr(Depths, "best", deepest)
    texts = fresh("own").texts
    documents = [texts[n * SAMPLES : (n + 1) * SAMPLES] for n in range(len(PROMPTS))]
    made = sample(documents=documents)
    assert made.texts == texts and made.passes < fresh("own").passes
