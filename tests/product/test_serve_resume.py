"""Texts that go on where a client lost them: nothing twice, nothing else, and no silent fork."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import load
import numpy as np
import pytest
import serving
from test_serve_expected import DEPTH, DRAFTERS, SETTINGS, ask, engine, told
from toys import TABLES
from toys import TRANSFORMERS as toys

import specjax
from specjax import Request
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel
from specjax.serve import Delivered, Disagreement, Engine, Increment, Served
from specjax.serve.identity import model_hash, tokens_hash

pytestmark = pytest.mark.xdist_group("serve resume")  # a share takes all of them, or none


@functools.cache
def texts() -> dict[str, list[Served]]:
    """Two texts of each kind of setting, without drafts."""
    return {
        name: [engine().submit(ask("none", name), index).result(60) for index in range(2)]
        for name in SETTINGS
    }


def read(handle: Any) -> tuple[list[int], str, Served]:
    """What a client gets, and the whole text."""
    made = list(handle)
    return (
        [t for one in made for t in one.tokens],
        "".join(one.text for one in made),
        handle.result(),
    )


def raw(made: Served | Increment) -> np.ndarray:
    assert made.logprobs is not None
    return np.asarray(made.logprobs.raw)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_text_goes_on_after_any_token(setting, fast):
    """With every drafter: what was delivered and what comes are the text and its end."""
    made = engine()
    for index, whole in enumerate(texts()[setting]):
        cuts = sorted({0, 1, len(whole.tokens) // 2, len(whole.tokens) - 1, len(whole.tokens)})
        handles = []
        for number, cut in enumerate(cuts):
            drafter = DRAFTERS[(number + index) % len(DRAFTERS)]
            request = ask(drafter, setting)
            kept = whole.tokens[:cut]
            handles.append((cut, made.submit(request, index, resume=kept, fast=fast)))
        for cut, handle in handles:
            tokens, text, served = read(handle)
            assert told(served) == told(whole)
            assert tokens == whole.tokens[cut:]
            assert whole.text.endswith(text)
            if "stop" not in SETTINGS[setting]:  # the text of a token may wait for the next one
                before = whole.texts.decode(0, whole.tokens[:cut])
                assert before + text == whole.text or "\ufffd" in before


def test_increments_join_to_what_was_missed():
    """Where a stream really was cut, from a thread and from an event loop, with log-probabilities:
    characters, tokens, guesses, starts and offsets are those of the whole text."""
    made, request = engine(), ask("draft", "stops", stop=["zz", "\n\n"], logprobs=1, eos=[])
    first = list(made.submit(request))
    whole = made.submit(request).result(60)
    for cut in range(1, len(first)):
        kept = [token for one in first[:cut] for token in one.tokens]
        had = "".join(one.text for one in first[:cut])
        handle = made.submit(request, resume=kept)

        async def follow(handle=handle) -> list[Increment]:
            await handle.checked()
            return [one async for one in handle]

        later = asyncio.run(follow())
        assert had + "".join(one.text for one in later) == whole.text
        assert (later[0].start, later[0].offset) == (len(kept), len(had))
        assert [t for one in later for t in one.tokens] == whole.tokens[len(kept) :]
        bits = np.concatenate([raw(one) for one in later])
        assert np.array_equal(bits, raw(whole)[len(kept) :])
        assert all(len(one.pieces) == len(one.tokens) == len(one.guesses) for one in later)


def test_fast_knows_no_log_probabilities_of_what_it_trusts():
    made, whole = engine(), texts()["sampled"][0]
    served = made.submit(ask("none", "sampled", logprobs=1), resume=whole.tokens[:9], fast=True)
    made = raw(served.result(60))
    assert np.isnan(made[:9]).all() and np.isfinite(made[9:]).all()
    assert len(made) == len(whole.tokens)


def test_resuming_takes_few_passes():
    """The delivered tokens are drafts, or no pass at all."""
    made, whole = engine(), texts()["sampled"][0]
    request, kept = ask("none", "sampled"), whole.tokens[:21]
    left = len(whole.tokens) - 21
    checked = made.submit(request, resume=kept).result(60).stats.target_passes
    assert checked <= -(-21 // (DEPTH + 1)) + left
    assert made.submit(request, resume=kept, fast=True).result(60).stats.target_passes == left
    plain = made.submit(ask("none", "sampled", num_drafts=0), resume=kept).result(60)
    assert plain.stats.target_passes == len(whole.tokens)


def test_an_engine_without_room_resumes_too():
    """It writes the delivered tokens again without drafts."""
    target = LanguageModel(TABLES.model(), TABLES.weights(), None, (), "toy")
    request = Request(prompts=[[1, 2, 3]], max_new_tokens=20, temperature=1.0, seed=3)
    with Engine(target, slots=1, capacity=48, chunk=16) as made:
        whole = made.submit(request).result(60)
        for fast in (False, True):
            tokens, _, served = read(made.submit(request, resume=whole.tokens[:7], fast=fast))
            assert (tokens, served.tokens) == (whole.tokens[7:], whole.tokens)
            assert served.stats.target_passes == (13 if fast else 20)


@pytest.mark.parametrize("by_hash", [False, True])
def test_planted_differences_are_found(by_hash):
    """A token, the seed, the prompt, a setting, and other weights; the neighbour goes on."""
    made, whole = engine(), texts()["sampled"][0]
    kept = whole.tokens[:15]
    wrong = [*kept[:6], (kept[6] + 1) % 500, *kept[7:]]

    def given(tokens: list[int]) -> Any:
        return Delivered(len(tokens), None, tokens_hash(tokens)) if by_hash else tokens

    faults = [
        (made, ask("draft", "sampled"), wrong),
        (made, ask("draft", "sampled", seed=6), kept),
        (made, ask("draft", "sampled", prompts="def mean("), kept),
        (made, ask("none", "sampled", temperature=0.2), kept),
        (made, ask("none", "sampled", top_k=1), kept),
        (made, ask("none", "sampled", max_new_tokens=20, eos=[kept[3]]), kept),
    ]
    neighbour = made.submit(ask("lookup", "sampled"))
    for where, request, tokens in faults:
        handle = where.submit(request, resume=given(tokens))
        with pytest.raises(
            Disagreement, match=r"the weights, the settings or the machine"
        ) as caught:
            list(handle)
        with pytest.raises(Disagreement):
            handle.result(60)
        if not by_hash and tokens is wrong:
            assert (caught.value.position, caught.value.expected) == (6, wrong[6])
            assert caught.value.got == kept[6]
            assert f"token 6 of the resumed text was {wrong[6]} and is {kept[6]}" in str(
                caught.value
            )
    assert neighbour.result(60).tokens == whole.tokens
    assert made.load().running == 0 and made.submit(ask("none", "greedy")).result(60).tokens


def test_other_weights_are_found():
    """By the tokens, and before that by the hash of the model.  Where passes are as wide as before,
    with pages too, a text that is written again has the same bits of log-probabilities."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    noise = functools.partial(jax.random.normal, jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.3 * noise(x.shape, x.dtype), target.params)
    other = dataclasses.replace(target, params=params)
    request = Request(prompts=[[1, 2, 3]], max_new_tokens=20, temperature=1.0, seed=3, eos=[],
                      logprobs=0)  # fmt: skip
    lookup = {"lookup": BoundDrafter(specjax.NGram(4))}
    engines = [Engine(one, lookup, slots=1, capacity=48, chunk=16, cache_tokens=96, page=16,
                      expected=4, logprobs=0) for one in (target, target, other)]  # fmt: skip
    whole = engines[0].submit(request).result(60)
    for made in engines[:2]:
        for fast in (False, True):
            tokens, _, served = read(made.submit(request, resume=whole.tokens[:11], fast=fast))
            assert (tokens, served.tokens) == (whole.tokens[11:], whole.tokens)
            if not fast:
                assert raw(served).tobytes() == raw(whole).tobytes()
    with pytest.raises(Disagreement, match=r"token \d+ of the resumed text"):
        engines[2].submit(request, resume=whole.tokens[:11]).result(60)
    hashes = [made.model_hash for made in engines]
    assert hashes[0] == hashes[1] != hashes[2]
    for made in engines:
        made.close()


def test_the_hash_of_a_model():
    """One number, one bit, a name, a type or the tokenizer changes it; the layout of a kernel in
    memory does not."""
    target = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    (path, leaf), *_ = jax.tree_util.tree_leaves_with_path(target.params)
    own = model_hash(target)
    assert own == model_hash(dataclasses.replace(target, name="another name"))

    def changed(**fields: Any) -> str:
        return model_hash(dataclasses.replace(target, **fields))

    def with_leaf(new: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, x: new(x) if p == path else x,
                                                target.params)  # fmt: skip

    swapped = with_leaf(lambda x: x[::-1])
    nudged = with_leaf(lambda x: x.at[(0,) * x.ndim].set(np.nextafter(x[(0,) * x.ndim], np.inf)))
    renamed = {"more": target.params}
    made = [changed(params=params) for params in (swapped, nudged, renamed)]
    made += [
        changed(files={"config.json": b"{}"}),
        changed(tokenizer=serving.models()[0].tokenizer),
    ]
    assert leaf.size > 1 and len({own, *made}) == 6
    matrix = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    two = [dataclasses.replace(target, params={"q": {name: x}})
           for name, x in (("kernel", matrix), ("weight", matrix.T.copy()))]  # fmt: skip
    assert model_hash(two[0]) == model_hash(two[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "text"}, "resume='text'; pass a list of token ids"),
        ({"resume": [1, 10**6]}, "resume: text 0 holds token ids from 1"),
        ({"resume": [1] * 27}, "resume has 27 tokens, and max_new_tokens=26: pass the same"),
        ({"resume": Delivered(27, None, "x")}, "resume has 27 tokens"),
        ({"resume": Delivered(3, None, "x"), "fast": True}, "pass them as resume="),
        ({"fast": True}, "fast=True is for a text that is resumed"),
        ({"resume": [1], "fast": 1}, "fast=1 is not allowed"),
        ({"resume": 5}, "resume=5; pass a list"),
    ],
)
def test_bad_tokens_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine().submit(ask("none", "greedy"), **options)


def test_nothing_is_compiled():
    whole = texts()["constraint"][0]
    engine.cache_clear()  # the programs of an older one may have been forgotten to save memory
    made = engine()
    before = made.compiled()
    for fast in (False, True):
        made.submit(ask("draft", "constraint"), resume=whole.tokens[:5], fast=fast).result(60)
    assert made.compiled() == before and load.CAPACITY > len(whole.tokens)
