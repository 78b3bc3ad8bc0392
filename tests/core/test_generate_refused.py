"""What `generate` refuses: the error names value and cure, and nothing was compiled or run."""

import math

import counted
import jax
import language_models
import pytest
from naive_sources import drawn
from toy_models import transformer

import specjax


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def draft():
    return language_models.draft()


@pytest.fixture(scope="module")
def wordless():
    return language_models.wordless()


# prompts, options, words of the error: the value and the cure.
REFUSED = {
    "no prompt": ([], {}, ["prompts is empty", "at least one"]),
    "empty text": ("", {}, ["prompt 0 is empty", "at least one token"]),
    "empty text among others": (["a", "", "b"], {}, ["prompt 1 is empty", "at least one token"]),
    "no tokens": ([[1], []], {}, ["prompt 1 is empty", "at least one token"]),
    "tokens in no list": ([1, 2, 3], {}, ["prompts", "list"]),
    "token too large": ([[1, 2], [3, 320]], {}, ["prompt 1", "320", "vocabulary"]),
    "token negative": ([[-1, 2]], {}, ["prompt 0", "-1", "vocabulary", "320"]),
    "empty stop": ("a", {"stop": ""}, ["stop", "empty string", "remove"]),
    "empty stop among others": ("a", {"stop": ["x", ""]}, ["stop", "empty string", "remove"]),
    "no new tokens": ("a", {"max_new_tokens": 0}, ["max_new_tokens=0", "at least 1"]),
    "negative new tokens": ("a", {"max_new_tokens": -3}, ["max_new_tokens=-3", "at least 1"]),
    "beyond the context": (
        [[1] * 10],
        {"max_new_tokens": 503},
        ["10", "503", "513", "target", "512", "=502"],
    ),
    "prompt beyond it": (
        [[1] * 600],
        {"max_new_tokens": 5},
        ["600", "605", "512", "shorten the prompt"],
    ),
    "nan temperature": (
        "a",
        {"temperature": math.nan},
        ["temperature=nan", "0 (greedy) or greater"],
    ),
    "infinite temperature": (
        "a",
        {"temperature": math.inf},
        ["temperature=inf", "0 (greedy) or greater"],
    ),
    "negative temperature": (
        "a",
        {"temperature": -0.5},
        ["temperature=-0.5", "0 (greedy) or greater"],
    ),
    "one bad temperature": (
        ["a", "b"],
        {"temperature": [0, -2]},
        ["temperature=-2", "0 (greedy) or greater"],
    ),
    "no temperature": ("a", {"temperature": []}, ["temperature", "0 values for 1 rows"]),
    "two temperatures": (
        ["a"] * 3,
        {"temperature": [0, 1]},
        ["temperature", "2 values for 3 rows", "one per row"],
    ),
    "top_p 0": ("a", {"top_p": 0}, ["top_p=0", "(0, 1]"]),
    "top_p above 1": ("a", {"top_p": 1.5}, ["top_p=1.5", "(0, 1]"]),
    "top_p nan": ("a", {"top_p": math.nan}, ["top_p=nan", "(0, 1]"]),
    "top_k negative": ("a", {"top_k": -1}, ["top_k=-1", "0 (off) or greater"]),
    "top_k half": ("a", {"top_k": 2.5}, ["top_k=2.5", "whole number"]),
    "min_p above 1": ("a", {"min_p": 1.1}, ["min_p=1.1", "[0, 1]"]),
    "num_drafts too few": (
        ["a"] * 3,
        {"num_drafts": [1, 2]},
        ["num_drafts", "2 values for 3 prompts", "one per prompt"],
    ),
    "num_drafts negative": (
        ["a", "b"],
        {"num_drafts": [1, -1]},
        ["num_drafts=-1", "0 (plain) or greater"],
    ),
    "num_drafts half": ("a", {"num_drafts": [1.5]}, ["num_drafts=1.5", "whole number"]),
    "repetition penalty 0": (
        "a",
        {"repetition_penalty": 0},
        ["repetition_penalty=0", "above 0", "1 switches it off"],
    ),
    "one bad penalty": (
        ["a", "b"],
        {"repetition_penalty": [1, -1]},
        ["repetition_penalty=-1", "above 0"],
    ),
    "presence nan": ("a", {"presence_penalty": math.nan}, ["presence_penalty=nan", "finite"]),
    "frequency infinite": (
        "a",
        {"frequency_penalty": math.inf},
        ["frequency_penalty=inf", "finite"],
    ),
    "bias of no token": ("a", {"logit_bias": {320: 1.0}}, ["logit_bias", "320", "0 to 319"]),
    "bias nan": ("a", {"logit_bias": {5: math.nan}}, ["logit_bias={5: nan}", "finite, or -inf"]),
    "biases too few": (["a"] * 3, {"logit_bias": [{}, {}]}, ["logit_bias", "2 values for 3 rows"]),
    "empty bad word": ("a", {"bad_words": [[5], []]}, ["bad_words", "empty sequence", "remove"]),
    "empty bad text": ("a", {"bad_words": [" "]}, ["bad_words", "empty text", "remove"]),
    "bad words as one text": ("a", {"bad_words": "x"}, ["bad_words='x'", "list"]),
    "bad word of no token": ("a", {"bad_words": [[5, -1]]}, ["bad_words", "-1", "0 to 319"]),
    "bad word that ends": ("a", {"bad_words": [[0]]}, ["bad_words", "min_new_tokens", "eos=[]"]),
    "least above most": (
        "a",
        {"min_new_tokens": 9, "max_new_tokens": 8},
        ["min_new_tokens=9", "max_new_tokens=8"],
    ),
    "least negative": ("a", {"min_new_tokens": -1}, ["min_new_tokens=-1", "0 (off) or greater"]),
    "end of no token": ("a", {"eos": 320}, ["eos=320", "0 to 319"]),
    "ends too few": (["a"] * 3, {"eos": [[1], [2]]}, ["eos", "2 lists for 3 prompts"]),
    "logprobs negative": ("a", {"logprobs": -1}, ["logprobs=-1", "[0, 320]"]),
    "logprobs beyond": ("a", {"logprobs": 321}, ["logprobs=321", "[0, 320]"]),
    "function of another shape": (
        "a",
        {"logits_processor": lambda logits, text, counts: logits[:5]},
        ["logits_processor", "(5,)", "(320,)", "keep their shape"],
    ),
    "function of no shape": (
        "a",
        {"logits_processor": lambda logits, text, counts: (logits, counts)},
        ["logits_processor", "tuple", "(320,)"],
    ),
    "seeds too few": (
        ["a"] * 3,
        {"seed": [1, 2]},
        ["seed", "2 values for 3 prompts", "one per prompt"],
    ),
    "seeds too many": ("a", {"seed": [1, 2]}, ["seed", "2 values for 1 prompts", "one per prompt"]),
}


@pytest.fixture
def refused(monkeypatch):
    """`generate` raises ValueError with every word in its message, and nothing was compiled or
    run."""

    def touched(*_, **__):
        raise AssertionError("the decoder was reached")

    monkeypatch.setattr(specjax.Decoder, "prefill", touched)
    jax.random.key(0)

    def check(model, prompts, words, without=None, **options):
        before = counted.compilations()
        with pytest.raises(ValueError) as caught:
            specjax.generate(model, prompts, **options)
        assert counted.compilations() == before
        assert [word for word in words if word not in str(caught.value)] == [], caught.value
        assert without is None or without not in str(caught.value), caught.value

    return check


@pytest.mark.parametrize("case", REFUSED)
def test_refused(refused, target, case):
    """The error names the value and the cure."""
    prompts, options, words = REFUSED[case]
    refused(target, prompts, words, **options)


@pytest.mark.parametrize("swap", [False, True])
def test_draft_without_a_tokenizer(refused, target, wordless, swap):
    """A model without a tokenizer is no draft for one with a tokenizer, nor the other way round."""
    target, draft = (wordless, target) if swap else (target, wordless)
    refused(target, [[1]], ["target", "wordless", "no tokenizer", "NGram()"], draft=draft)


def test_draft_context(refused, target, draft):
    """The text must fit into the draft's context too."""
    refused(
        target,
        [[1] * 10],
        ["10", "300", "310", "draft", "256", "=246"],
        draft=draft,
        max_new_tokens=300,
    )


def test_draft_and_proposer(refused, target, draft):
    """Only one of the two may be given."""
    refused(target, "a", ["draft=", "proposer=", "not both"], draft=draft, proposer=specjax.NGram())


def test_draft_as_proposer(refused, target, draft):
    """A draft model needs its weights."""
    for kind in (specjax.DraftModel, specjax.Universal):
        refused(
            target,
            "a",
            ["comes without its weights", "draft="],
            proposer=kind(draft.model, target.model.vocab_size),
        )


def test_a_proposer_of_other_models(refused, target, draft, wordless):
    """Weights and structure must belong to the same model."""
    size = target.model.vocab_size
    refused(
        target,
        "a",
        ["comes without its weights", "draft="],
        proposer=specjax.DraftTree(draft.model, size),
    )
    other = specjax.DraftModel(language_models.padded().model, size)
    refused(target, "a", ["other models", "draft.model"], draft=draft, proposer=other)
    refused(
        target,
        "a",
        ["target.model.vocab_size"],
        draft=draft,
        proposer=specjax.DraftTree(draft.model, size - 1),
    )
    other = specjax.EarlyExit(transformer(), 1)
    refused(target, "a", ["early exit", "another target"], proposer=other)


def test_a_prompt_that_fills_the_context(refused, target, draft):
    """No number of new tokens would help, so none is advised; 0 would be refused."""
    for length, model in ((512, "target"), (600, "target")):
        short = f"shorten the prompt by {length + 5 - 512} tokens"
        words = [
            f"prompt 1 has {length} tokens",
            f"the {model} {model!r}",
            "reads at most 512",
            short,
        ]
        refused(target, [[1], [1] * length], words, max_new_tokens=5, without="max_new_tokens=0")
    words = ["the draft 'draft'", "reads at most 256", "by 5 tokens", "without this draft"]
    refused(target, [[1] * 256], words, draft=draft, max_new_tokens=5, without=" or less")
    refused(target, [[1] * 511], ["by 4 tokens", "max_new_tokens=1 or less"], max_new_tokens=5)


class Fixed(specjax.DynamicTree):
    """Says that its nodes are a function of the text."""

    point_mass = True


def test_a_mix_that_cannot_be_judged(refused, target, draft):
    """Point masses on siblings cannot stand beside drawn drafts under a rule of independent
    draws."""
    size = target.model.vocab_size
    grown, drawn = (
        Fixed(specjax.DraftSource(draft.model, size), 2),
        specjax.DraftTree(draft.model, size, (2, 2)),
    )
    nested = specjax.FirstOf(specjax.NGram(2), specjax.FirstOf(grown, drawn))
    for mixed in (specjax.FirstOf(grown, drawn), specjax.FirstOf(drawn, grown), nested):
        words = ["Fixed over DraftSource proposes siblings as point masses", "rule match"]
        refused(target, "a", words, draft=draft, proposer=mixed, rule=specjax.Rejection())


def test_quantising_waits_for_all_checks(refused):
    """Quantising compiles a program per shape of a kernel, so it comes after all checks."""
    model = transformer(320)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    target = specjax.LanguageModel(model, drawn(shapes, 0), language_models.target().tokenizer)
    for how in ({"proposer": "self-int8"}, {"draft": target, "draft_dtype": "int8"}):
        for wrong in (
            {"seed": -1},
            {"logprobs": 999},
            {"temperature": -1},
            {"max_new_tokens": 512},
        ):
            refused(target, "a", [*wrong], **how, **wrong)


def test_text_without_tokenizer(refused, wordless):
    """A text needs a tokenizer."""
    refused(wordless, "a", ["wordless", "tokenizer.json", "token ids"])


def test_stop_without_tokenizer(refused, wordless):
    """A stop string needs a tokenizer too."""
    refused(wordless, [[1]], ["stop", "'x'", "tokenizer", "wordless"], stop="x")


def test_bad_word_without_tokenizer(refused, wordless):
    """A bad word needs a tokenizer too."""
    refused(wordless, [[1]], ["bad_words", "'x'", "tokenizer", "wordless"], bad_words=["x"])
