"""The rollout worker for tunix: what its learners rely on, one pitfall a test."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import sys
from typing import Any

import jax
import numpy as np
import pytest
import tunix_stand_in
from tunix_stand_in import RolloutConfig, Tokenizer

import specjax
from specjax import kernels

pytestmark = pytest.mark.xdist_group("tunix")  # a share takes all of them, or none

PAD, EOS = 511, 0
TEXTS = ["def main(", "import os", "def main(", "x = 1", "def main("]


@functools.cache
def target() -> specjax.LanguageModel:
    return specjax.load(specjax.shipped("tiny/target"))


@functools.cache
def nudged() -> Any:
    noise = functools.partial(jax.random.normal, jax.random.key(1))
    return jax.tree.map(lambda x: x + 0.03 * noise(x.shape, x.dtype), target().params)


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer(target().tokenizer, **{"pad": PAD, "eos": EOS, **changes})


def config(**changes: Any) -> RolloutConfig:
    usual = {"max_tokens_to_generate": 20, "temperature": 1.0, "max_prompt_length": 8,
             "return_logprobs": True}  # fmt: skip
    return RolloutConfig(**{**usual, **changes})


@pytest.fixture(scope="module")
def module():
    """Our module with the stand-in for tunix; afterwards neither is left."""
    with pytest.MonkeyPatch.context() as patch:
        tunix_stand_in.install(patch)
        yield importlib.import_module("specjax.rollouts.tunix")
    sys.modules.pop("specjax.rollouts.tunix", None)


@pytest.fixture(scope="module")
def shared(module):
    """A worker, made as a cluster of tunix makes it."""
    engine = functools.partial(module.SpecjaxRollout, target=target(), slots=4, capacity=96)
    modes = {"train": config(), "eval": config(max_tokens_to_generate=24, seed=1)}
    made = engine(rollout_actor=None, tokenizer=tokenizer(), mesh=None, rollout_config=modes)
    yield made
    made.close()


@pytest.fixture
def worker(shared):
    """The same with its first weights."""
    yield shared
    if shared.version:
        shared.update_params(target().params)


def texts(made: Any) -> list[list[int]]:
    return [tokens.tolist() for tokens in made.tokens]


def test_shapes_and_types(worker):
    made = worker.generate(TEXTS, config())
    assert made.left_padded_prompt_tokens.shape == (5, 8)
    assert made.left_padded_prompt_tokens.dtype == np.int32 and made.logits is None
    for row, text in zip(made.left_padded_prompt_tokens, TEXTS, strict=True):
        ids = tokenizer().encode(text)
        assert row.tolist() == [PAD] * (8 - len(ids)) + ids
    for tokens, logprobs in zip(made.tokens, made.logprobs, strict=True):
        assert tokens.dtype == np.int32 and 0 < len(tokens) <= 20
        assert logprobs.dtype == np.float32 and len(logprobs) == len(tokens)
    whole = tokenizer().decode([*tokenizer().encode(TEXTS[0]), *made.tokens[0]])
    assert made.text[0] == whole[len(TEXTS[0]) :]
    assert worker.generate(TEXTS[:1], config(return_logprobs=False)).logprobs is None
    assert (worker.pad_id(), worker.eos_id(), worker.model()) == (PAD, EOS, None)


def test_long_prompts_are_padded_to_a_power_of_two(worker):
    made = worker.generate(["def main(" * 5, "x"], config(max_tokens_to_generate=2))
    assert made.left_padded_prompt_tokens.shape[1] in (16, 32)
    assert (made.left_padded_prompt_tokens[1][:-1] == PAD).sum() > 8


def test_one_bos(module):
    """It is added, and of several in the text one stays."""
    with_bos = tokenizer(bos=7)
    for text, ids in (("x", [9]), ("bx", [7, 9]), ("bbx", [7, 7, 9])):
        with_bos.encode = {text: ids}.__getitem__  # type: ignore[method-assign]
        made = object.__new__(module.SpecjaxRollout)
        made._tokenizer = with_bos
        assert made._encode(text) == [7, 9]


def test_samples_of_a_group_are_no_clones(worker):
    """In one call, in calls of one prompt from several threads, and in the next step, also if a
    group has one or two samples; without a seed no call repeats another."""
    made = texts(worker.generate(TEXTS, config()))
    again = texts(worker.generate(TEXTS, config()))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(worker.generate, ["def main("], config()) for _ in range(4)]
        alone = [texts(call.result(60))[0] for call in calls]
    group = [made[0], made[2], made[4], again[0], again[2], again[4], *alone]
    assert len({tuple(tokens) for tokens in group}) == len(group)


def test_a_seed_gives_the_same_texts_in_any_order(worker):
    """After an update of the weights the keys of a seed come again, for a shuffled batch too, and
    old texts are drafts."""
    seeded = config(seed=jax.random.key(4))
    first = texts(worker.generate(TEXTS, seeded))
    assert texts(worker.generate(TEXTS, seeded)) != first  # other occurrences of the prompts
    worker.update_params(target().params)
    before = worker._engine.load()
    second = worker.generate(TEXTS[::-1], seeded)
    assert sorted(texts(second)) == sorted(first)
    assert texts(second)[1] == first[3] and texts(second)[3] == first[1]
    assert worker._engine.load().finished == before.finished + 5
    worker.update_params(target().params)
    other = texts(worker.generate(TEXTS, config(seed=5)))
    assert other != first


def test_texts_are_those_of_plain_decoding_with_old_ones_as_drafts(worker):
    """Under the same and under other weights; a pass gives several tokens."""
    seeded = config(seed=11, eos_tokens=[])
    old = texts(worker.generate(["def main("], seeded))
    fresh = []
    for params in (target().params, nudged()):
        worker.update_params(params)
        handles = []
        submit = worker._engine.submit

        def kept(request, index, submit=submit, handles=handles):
            handles.append(submit(request, index))
            handles.append(submit(dataclasses.replace(request, expected=None), index))
            return handles[-2]

        worker._engine.submit = kept
        made = texts(worker.generate(["def main("], seeded))
        del worker._engine.submit
        drafted, plain = (handle.result(60) for handle in handles)
        assert made == [plain.tokens] == [drafted.tokens]
        fresh.append(made)
        if params is target().params:
            assert drafted.stats.target_passes == -(-20 // 9)
    assert fresh[0] == old != fresh[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(worker, temperature):
    """Ratios of 1.000 at a learning rate of 0, in batches of one, too."""
    made = worker.generate(TEXTS, config(temperature=temperature))
    width = max(len(tokens) for tokens in made.tokens)
    completions = np.full((5, width), PAD, np.int32)
    for row, tokens in zip(completions, made.tokens, strict=True):
        row[: len(tokens)] = tokens
    whole = worker.get_per_token_logps(made.left_padded_prompt_tokens, completions)
    one = worker.get_per_token_logps(made.left_padded_prompt_tokens[3:4], completions[3:4])
    assert whole.shape == (5, width)
    np.testing.assert_allclose(one[0], whole[3], atol=1e-5)
    for number, (tokens, logprobs) in enumerate(zip(made.tokens, made.logprobs, strict=True)):
        text = np.array([[*tokenizer().encode(TEXTS[number]), *tokens]])
        logits = np.array(target().model.apply(target().params, text, np.arange(text.shape[1])[None]
                                               ).logits, np.float64)[0]  # fmt: skip
        at = np.arange(text.shape[1] - len(tokens) - 1, text.shape[1] - 1)
        plain = jax.nn.log_softmax(logits[at])
        exact = np.asarray(plain)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(whole[number, : len(tokens)], exact, atol=2e-5)
        logits[:, PAD] = -np.inf  # it is never drawn
        warm = np.asarray(jax.nn.log_softmax(logits[at] / temperature))
        drawn = warm[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(np.exp(logprobs - drawn), 1.0, atol=1e-3)


def test_an_eos_stays_and_several_may_end(worker):
    whole = texts(worker.generate(["def main("], config(seed=2, eos_tokens=[])))[0]
    worker.update_params(target().params)
    end = whole[7]
    ended = worker.generate(["def main("], config(seed=2, eos_tokens=[EOS, end]))
    cut = whole.index(end) + 1
    assert texts(ended)[0] == whole[:cut] and len(ended.logprobs[0]) == cut


def test_the_pad_token_is_never_drawn(module, worker):
    """Though the model would like nothing better; and it may not end texts."""
    likes = jax.tree.map(lambda x: x, target().params)
    head = likes["head"]["kernel"]
    likes["head"]["kernel"] = head.at[:, PAD].set(head[:, 10] * 1.0)
    worker.update_params(likes)
    made = worker.generate(["def main("] * 6, config(temperature=2.0))
    assert not any(PAD in tokens for tokens in texts(made))
    with pytest.raises(ValueError, match=r"the pad token 0 ends texts \(eos \[0\]\)"):
        module.SpecjaxRollout(None, tokenizer(pad=EOS), None, config(), target=target())
    with pytest.raises(ValueError, match="the pad token 511 ends texts"):
        worker.generate(["x"], config(eos_tokens=[3, PAD]))


def test_settings_that_are_off_in_tunix(worker):
    """top_p None, top_k None and -1, temperature 0."""
    seeds = []
    for off in ({"top_p": None, "top_k": None}, {"top_p": 1.0, "top_k": -1}):
        worker.update_params(target().params)
        seeds.append(texts(worker.generate(["x = 1"], config(seed=3, **off))))
    assert seeds[0] == seeds[1]
    greedy = worker.generate(["x = 1"] * 2, config(temperature=0.0))
    assert texts(greedy)[0] == texts(greedy)[1] and (greedy.logprobs[0] < 0).all()


def test_new_weights_forget_what_was_read(worker):
    """Prompts that were copied from a row of old weights would change texts."""
    prompt = "def main(a, b, c):\n    return a + b + c"
    for params in (target().params, nudged(), target().params):
        worker.update_params(params)
        seeded = config(seed=6, eos_tokens=[])
        made = texts(worker.generate([prompt], seeded))[0]
        again = texts(worker.generate([prompt], seeded))[0]
        ids = np.array([[*tokenizer().encode(prompt), *made]])
        out = target().model.apply(params, ids, np.arange(ids.shape[1])[None])
        assert made != again and np.isfinite(np.asarray(out.logits)).all()
        logps = worker.get_per_token_logps(ids[:, : -len(made)], ids[:, -len(made) :])
        worker.update_params(params)
        back = worker.generate([prompt], config(seed=6, eos_tokens=[], return_logprobs=True))
        assert texts(back)[0] == made
        np.testing.assert_allclose(back.logprobs[0], logps[0], atol=2e-3)


def test_updates_under_a_transfer_guard(worker):
    """tunix forbids transfers between host and device during a sync on a CPU."""
    compiled = worker._engine.compiled()
    weights = nudged()
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            worker.update_params(weights, filter_types=("Param",))
    worker.generate(["x = 1"], config())
    assert worker._engine.compiled() == compiled


def test_states_with_other_names_are_mapped(module):
    """LoRA sends its leaves alone: without a function they are refused, with one merged."""

    def merge(state: Any, kinds: Any, now: Any) -> Any:
        assert kinds == ("LoRAParam",)
        new = jax.tree.map(lambda x: x, target().params)
        new["head"]["kernel"] = new["head"]["kernel"] + state["a"] @ state["b"]
        return new

    state = {"a": np.full((64, 1), 0.01, np.float32), "b": np.ones((1, 512), np.float32)}
    made = module.SpecjaxRollout(None, tokenizer(), None, config(), target=target(), slots=1,
                                 to_params=merge)  # fmt: skip
    made.update_params(state, filter_types=("LoRAParam",))
    assert not np.array_equal(made._engine.target.params["head"]["kernel"],
                              target().params["head"]["kernel"])  # fmt: skip
    assert made.version == 1
    made.close()


def test_refused(module, worker):
    """And the worker goes on."""
    lora = {"a": np.zeros((64, 1), np.float32)}
    with pytest.raises(ValueError, match="with LoRA it has the leaves of the LoRA alone"):
        worker.update_params(lora, filter_types=("LoRAParam",))
    wider = jax.tree.map(lambda x: np.concatenate([x, x], -1), target().params)
    with pytest.raises(ValueError, match="and those of the engine"):
        worker.update_params(wider)
    with pytest.raises(ValueError, match="seed="):
        worker.generate(["x"], config(seed="now"))
    with pytest.raises(ValueError, match="max_new_tokens"):
        worker.generate(["x"], config(max_tokens_to_generate=500))
    with pytest.raises(ValueError, match=r"pass what specjax\.load"):
        module.SpecjaxRollout(None, tokenizer(), None, config(), target=3)
    if kernels.widens_columns():
        kept = specjax.load(specjax.shipped("tiny/target"), keep_bfloat16=True)
        with pytest.raises(ValueError, match="load it without keep_bfloat16=True"):
            module.SpecjaxRollout(None, tokenizer(), None, config(), target=kept)
    with pytest.raises(ValueError, match="pass tokenizer= and rollout_config="):
        module.SpecjaxRollout(target=target())
    assert len(texts(worker.generate(["x"], config()))[0]) > 0


def test_without_tunix_the_import_says_what_to_install():
    sys.modules.pop("specjax.rollouts.tunix", None)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tunix", "tunix.rl.rollout.base_rollout"):
            patch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"needs google-tunix .*\[tunix\]"):
            importlib.import_module("specjax.rollouts.tunix")
