"""Texts of targets and drafts in int8; `tests/core/test_quantised.py` has their numbers."""

import functools

import exports
import folders
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax import Decoder, DraftModel, LanguageModel, Match, NoProposer, Params, Rejection
from specjax.models.quantised import quantise

RULES = [Match(), Rejection()]


@functools.cache
def loaded():
    return LanguageModel(toys.model(), toys.weights(), name="toy")


def run(target, proposer, rule, draft, **changes):
    dec = Decoder(target.model, proposer, rule, (toys.EOS,), toys.CAPACITY)
    arrays = Params(target.params, draft)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


def chain(draft):
    return DraftModel(draft.model, toys.VOCAB, 3)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_quantised_draft_changes_no_text(rule):
    """The target in int8 drafts for itself: greedy and sampled texts are those of plain
    decoding."""
    draft = quantise(loaded())
    greedy = run(loaded(), chain(draft), rule, draft.params)
    assert toys.texts(greedy) == toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)
    # Drafts are accepted mostly, but not always.
    sampled = run(loaded(), chain(draft), rule, draft.params, temperature=1.0)
    for stats in (greedy.stats, sampled.stats):
        assert 0.5 < stats.accepted.sum() / stats.tested.sum()
    assert sampled.stats.accepted.sum() < sampled.stats.tested.sum()
    if rule.shared_noise:
        assert toys.texts(sampled) == toys.decoded("none", "match", 1.0)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantised_target_keeps_the_laws(temperature):
    """It is another model, but its text still does not depend on a draft or on other rows."""
    target = quantise(loaded())
    plain = toys.texts(run(target, NoProposer(), Match(), None, temperature=temperature))
    drafted = run(target, chain(loaded()), Match(), toys.weights(), temperature=temperature)
    assert toys.texts(drafted) == plain
    assert 0 < drafted.stats.accepted.sum()
    alone = run(target, NoProposer(), Match(), None, rows=[2], temperature=temperature)
    assert toys.texts(alone) == plain[2:3]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_generate_quantises(dtype):
    """`proposer="self-int8"` gives the text of plain decoding, and `draft_dtype="int8"` does the
    same; and so with int4."""
    target, prompts = loaded(), [[1, 2, 3], [9]]
    plain = specjax.generate(target, prompts, max_new_tokens=24)
    own = specjax.generate(
        target, prompts, max_new_tokens=24, proposer=f"self-{dtype}", num_drafts=3
    )
    other = specjax.generate(
        target, prompts, max_new_tokens=24, draft=target, draft_dtype=dtype, num_drafts=3
    )
    assert plain.tokens == own.tokens == other.tokens
    assert own.stats.acceptance_rate == other.stats.acceptance_rate > 0.4


def test_a_tied_embedding_gets_an_int8_copy():
    """This holds with a float32 copy and without one, as on other backends."""
    tied = folders.write(folders.random_llama(4, tie_word_embeddings=True), "quantised-tied")
    model = specjax.load(tied)
    assert model.model.module.separate_head
    bare = LanguageModel(
        specjax.LinenModel(model.model.module.clone(separate_head=False)),
        {name: leaf for name, leaf in model.params.items() if name != "head"},
    )
    made = [quantise(m) for m in (model, bare)]
    assert made[0].num_params == made[1].num_params
    for m in made:
        head = m.params["head"]["kernel"]
        wanted = np.asarray(model.params["embedding"])
        np.testing.assert_allclose(
            head.values * head.scale[:, None], wanted, atol=np.abs(wanted).max() / 250
        )
    tokens = folders.random_tokens(9)
    np.testing.assert_array_equal(*(toys.plain_logits(tokens, m.model, m.params) for m in made))


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_drafts_with_the_output_matrix_of_a_target_in_int8(name, temperature):
    """EAGLE-3 and P-EAGLE multiply with it, and the text is that of plain decoding."""
    target, drafter = quantise(exports.target()), exports.make(name)
    assert "head" in drafter.shares
    settings = {"max_new_tokens": 20, "eos": [], "temperature": temperature}
    plain = specjax.generate(target, [[1, 2, 3], [9, 4]], num_drafts=0, **settings)
    found = specjax.generate(target, [[1, 2, 3], [9, 4]], drafter=drafter, **settings)
    assert found.tokens == plain.tokens
