"""`generate`: batches, stop strings, streams, settings a row, and what it refuses."""

import math

import folders
import jax
import numpy as np
import pytest

import specjax
from specjax.generate import TextStream

NEW = 40
PROMPTS = ["the cat", "on", "a hat, a dog and a rat of"]
CIRCLE = "A日b語cédQ🙂RST"  # 20 tokens, most of them a part of a character
LINE = "Zthe cat sat.NUMBERS"  # 11 tokens after the first, some of several characters


@pytest.fixture(scope="module")
def target():
    return specjax.load(folders.target())


@pytest.fixture(scope="module")
def draft():
    return specjax.load(folders.draft())


@pytest.fixture(scope="module")
def wordless():
    return specjax.load(folders.wordless())


@pytest.fixture(scope="module")
def circle():
    """Writes CIRCLE round and round."""
    return specjax.load(folders.scribe(CIRCLE, end=False))


@pytest.fixture(scope="module")
def line():
    """Writes LINE once."""
    return specjax.load(folders.scribe(LINE, end=True))


@pytest.fixture(params=["none", "ngram", "draft"])
def speculation(request, draft):
    """The options of each way to guess."""
    return {"none": {}, "ngram": {"proposer": specjax.NGram()}, "draft": {"draft": draft}}[request.param]


def going_round(length):
    """The first `length` characters after the A."""
    return (CIRCLE[1:] + CIRCLE * length)[:length]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_a_batch_is_the_prompt_alone(target, speculation, temperature):
    """A ragged batch gives each prompt what it gets alone with the same seed."""
    options = {"max_new_tokens": NEW, "temperature": temperature, **speculation}
    together = specjax.generate(target, PROMPTS, seed=[3, 1, 2], **options)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [3, 1, 2], strict=True)):
        alone = specjax.generate(target, prompt, seed=[seed], **options)
        assert (alone.tokens[0], alone.text[0], alone.finish[0]) == (
            together.tokens[row],
            together.text[row],
            together.finish[row],
        )
        assert len(set(alone.tokens[0])) > 8, "too monotonous to prove anything"


def test_single_prompt_is_a_list_of_one(target):
    """A string is a batch of one row."""
    out = specjax.generate(target, PROMPTS[0], max_new_tokens=NEW, temperature=1.0)
    assert out.tokens == specjax.generate(target, PROMPTS[:1], max_new_tokens=NEW, temperature=1.0).tokens
    assert len(out.text) == len(out.tokens) == len(out.finish) == 1


@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
def test_token_prompts_are_their_text(target, make):
    """Token ids stand for the text that encodes to them."""
    ids = [make(target.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    options = {"max_new_tokens": NEW, "temperature": 1.0}
    tokens, text = (specjax.generate(target, p, **options) for p in (ids, PROMPTS))
    assert (tokens.tokens, tokens.text) == (text.tokens, text.text)


def test_tokens_in_tokens_out(target, wordless):
    """Without tokenizer.json the tokens are the same, and the texts empty."""
    ids = [target.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    out = specjax.generate(wordless, ids, max_new_tokens=NEW)
    assert out.tokens == specjax.generate(target, ids, max_new_tokens=NEW).tokens
    assert out.text == [""] * 3


def test_draft_without_tokenizer(wordless):
    """A target and a draft that both lack a tokenizer go together if their vocabularies are of one size."""
    out = specjax.generate(wordless, [[5, 6]], draft=wordless, max_new_tokens=NEW)
    assert out.tokens == specjax.generate(wordless, [[5, 6]], max_new_tokens=NEW).tokens


def test_text_is_the_tokens_decoded(target):
    """`text` is `tokens` in words, special tokens left out."""
    out = specjax.generate(target, PROMPTS, max_new_tokens=NEW)
    assert out.text == [target.tokenizer.decode(row) for row in out.tokens]


# --- settings a row --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"temperature": [0.0, 1.0, 3.0]}, [{"temperature": t} for t in (0.0, 1.0, 3.0)]),
        ({"temperature": 3.0, "top_k": [1, 3, 0]}, [{"temperature": 3.0, "top_k": k} for k in (1, 3, 0)]),
        ({"temperature": 3.0, "top_p": [1e-6, 0.5, 1.0]}, [{"temperature": 3.0, "top_p": p} for p in (1e-6, 0.5, 1.0)]),
        ({"temperature": 3.0, "min_p": [1.0, 0.2, 0.0]}, [{"temperature": 3.0, "min_p": p} for p in (1.0, 0.2, 0.0)]),
    ],
    ids=["temperature", "top_k", "top_p", "min_p"],
)
def test_settings_a_row(target, options, settings):
    """A list gives each row its own setting: that of the prompt alone, the first row being greedy."""
    out = specjax.generate(target, PROMPTS[:1] * 3, seed=[7, 7, 7], max_new_tokens=NEW, **options)
    alone = [
        specjax.generate(target, PROMPTS[0], seed=[7], max_new_tokens=NEW, **setting).tokens[0] for setting in settings
    ]
    assert out.tokens == alone
    assert out.tokens[0] == specjax.generate(target, PROMPTS[0], max_new_tokens=NEW).tokens[0]
    assert len({tuple(row) for row in out.tokens}) == 3


def test_seeds_a_row(target):
    """Equal seeds write equal texts, other seeds others."""
    a, b, c = specjax.generate(target, PROMPTS[:1] * 3, seed=[5, 5, 6], max_new_tokens=NEW, temperature=1.0).tokens
    assert a == b != c


def test_one_seed_for_all_rows(target):
    """With one seed the rows of a prompt differ, and the next call repeats them."""
    options = {"seed": 5, "max_new_tokens": NEW, "temperature": 1.0}
    rows = specjax.generate(target, PROMPTS[:1] * 3, **options).tokens
    assert len({tuple(row) for row in rows}) == 3
    assert specjax.generate(target, PROMPTS[:1] * 3, **options).tokens == rows


@pytest.mark.parametrize("kind", [np.int64, np.uint32, int])
def test_seed_of_any_integer_type(target, kind):
    """A NumPy integer is a seed as an int is."""
    options = {"max_new_tokens": NEW, "temperature": 1.0}
    out = specjax.generate(target, PROMPTS, seed=kind(5), **options)
    assert out.tokens == specjax.generate(target, PROMPTS, seed=5, **options).tokens


def test_another_seed_is_another_text(target):
    """The seed matters."""
    one, two = (specjax.generate(target, PROMPTS, seed=s, max_new_tokens=NEW, temperature=1.0).tokens for s in (5, 6))
    assert all(a != b for a, b in zip(one, two, strict=True))


# --- ends ------------------------------------------------------------------------------------------------------------


def test_limit(circle):
    """A text that does not end is cut at max_new_tokens."""
    out = specjax.generate(circle, "A", max_new_tokens=25)
    assert (len(out.tokens[0]), out.finish) == (25, ["limit"])


def test_eos(line):
    """An end-of-text token ends the row; it is among the tokens and not in the text."""
    out = specjax.generate(line, "Z", max_new_tokens=25)
    assert (out.text, out.finish) == ([LINE[1:]], ["eos"])
    assert out.tokens[0] == [*line.tokenizer.encode(LINE).ids[1:], 0]


def test_eos_at_the_limit(line):
    """A text that ends with its last permitted token has ended."""
    tokens = len(line.tokenizer.encode(LINE).ids)
    assert specjax.generate(line, "Z", max_new_tokens=tokens).finish == ["eos"]
    assert specjax.generate(line, "Z", max_new_tokens=tokens - 1).finish == ["limit"]


STOPS = [
    # stop, text, tokens without the prompt's
    (".", "the cat sat", 4),
    (" ", "the", 2),  # the space begins the token of " cat"
    ("ca", "the ", 2),  # within one token
    ("e cat s", "th", 3),  # begins within a token, ends within another
    ("UMB", "the cat sat.N", 8),  # three tokens
    ([".", "cat"], "the ", 2),  # the earliest, not the first of the list
    (["cat", "."], "the ", 2),
    (["nowhere", "NU"], "the cat sat.", 6),
    ("BERS", "the cat sat.NUM", 11),  # the last token before the end
]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "ngram"])
@pytest.mark.parametrize(("stop", "text", "tokens"), STOPS)
def test_stop(line, stop, text, tokens, speculative):
    """The text ends where the stop string begins; the tokens are the fewest that contain it."""
    proposer = specjax.NGram() if speculative else None
    out = specjax.generate(line, "Z", max_new_tokens=25, stop=stop, proposer=proposer)
    assert (out.text, out.finish) == ([text], ["stop"])
    assert out.tokens == [line.tokenizer.encode(LINE).ids[1 : tokens + 1]]


def test_stop_that_never_comes(line):
    """Half of a stop string is text."""
    out = specjax.generate(line, "Z", max_new_tokens=25, stop=["sat!", "BERST"])
    assert (out.text, out.finish) == ([LINE[1:]], ["eos"])


def test_stop_on_a_character_of_several_tokens(circle):
    """A stop string may be a character that is spread over tokens."""
    out = specjax.generate(circle, "A", max_new_tokens=25, stop="語")
    assert (out.text, out.finish, len(out.tokens[0])) == (["日b"], ["stop"], 7)


@pytest.mark.parametrize("stop", ["bcde", "🙂RST A", "R", "ST", "A日b語"])
def test_stop_across_chunks(circle, stop):
    """Wherever a stop string lies, a stream looks at its text every few steps only."""
    out = specjax.generate(circle, "A", max_new_tokens=100, stop=stop)
    whole = specjax.generate(circle, "A", max_new_tokens=100)
    at = whole.text[0].find(stop)
    assert (out.text, out.finish) == (([whole.text[0][:at]], ["stop"]) if at >= 0 else (whole.text, ["limit"]))


@pytest.mark.parametrize("prompt", list("AbcdRST"))
def test_overlapping_stops(circle, prompt):
    """Of stop strings that overlap, the one that is complete first: where chunks end does not matter."""
    out = specjax.generate(circle, prompt, max_new_tokens=60, stop=["dQ🙂", "Q"])
    start = (CIRCLE * 2).index(prompt) + 1
    wanted = (CIRCLE * 2)[start:].split("Q")[0]
    assert (out.text, out.finish) == ([wanted], ["stop"])


def test_rows_stop_alone(circle):
    """A stop string ends its row, and the others go on."""
    out = specjax.generate(circle, ["A", "Q", "R"], max_new_tokens=16, stop="🙂")
    assert (out.text[:2], out.finish[:2]) == (["日b語cédQ", ""], ["stop", "stop"])
    assert out.text[2].startswith("STA日b語")


def test_stop_and_seed(target, speculation):
    """Stopping cuts the text that would have been, sampled or not, whoever guesses."""
    options = {"max_new_tokens": NEW, "temperature": 1.0, **speculation}
    whole = specjax.generate(target, PROMPTS, **options)
    stop = whole.text[0][len(whole.text[0]) // 2]
    out = specjax.generate(target, PROMPTS, stop=stop, **options)
    assert out.text == [text.split(stop)[0] for text in whole.text]
    assert out.finish == ["stop" if stop in text else f for text, f in zip(whole.text, whole.finish, strict=True)]


# --- streams ---------------------------------------------------------------------------------------------------------


def drain(stream):
    assert isinstance(stream, TextStream) and stream.output is None
    return list(stream)


@pytest.mark.parametrize("stop", [(), "Sx", "RSTA日b語c"])
def test_stream_of_a_prompt(circle, stop):
    """The pieces of a prompt are strings and make up the text."""
    stream = specjax.generate(circle, "A", max_new_tokens=100, stream=True, stop=stop)
    pieces = drain(stream)
    assert len(pieces) > 3 or stop == "RSTA日b語c"
    assert "".join(pieces) == stream.output.text[0]
    assert stream.output.text == specjax.generate(circle, "A", max_new_tokens=100, stop=stop).text


def test_stream_of_a_list(target, speculation):
    """The pieces of a list are lists, a string a row, and make up the texts of a call without `stream`."""
    options = {"max_new_tokens": NEW, "temperature": 1.0, **speculation}
    stream = specjax.generate(target, PROMPTS, stream=True, **options)
    pieces = drain(stream)
    assert all(len(piece) == 3 for piece in pieces)
    whole = specjax.generate(target, PROMPTS, **options)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == stream.output.text == whole.text
    assert (stream.output.tokens, stream.output.finish) == (whole.tokens, whole.finish)


def test_stream_of_a_list_of_one(circle):
    """A list of one prompt streams lists."""
    assert all(isinstance(p, list) for p in drain(specjax.generate(circle, ["A"], max_new_tokens=25, stream=True)))


def test_stream_keeps_characters_whole(circle):
    """No piece holds a part of a character, wherever a chunk of steps ends."""
    for prompt in "AbcdQRST":
        stream = specjax.generate(circle, prompt, max_new_tokens=100, stream=True)
        pieces = drain(stream)
        start = CIRCLE.index(prompt) + 1
        text = stream.output.text[0].rstrip("\ufffd")
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert text == (CIRCLE * 6)[start : start + len(text)] and len(text) > 50


def test_stream_takes_nothing_back(circle):
    """What was streamed is never the beginning of a stop string that then comes."""
    for stop in ("語cé", "🙂RSTA", "TA日b語cédQ🙂RST"):
        stream = specjax.generate(circle, "A", max_new_tokens=100, stream=True, stop=stop)
        assert "".join(drain(stream)) == going_round(100).split(stop)[0]


def test_stream_raises_at_once(target):
    """What does not fit is raised by the call, not by the first piece."""
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        specjax.generate(target, "a", max_new_tokens=0, stream=True)


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [specjax.Match(), specjax.Rejection()], ids=["match", "rejection"])
def test_stats_add_up(target, speculation, rule):
    """Tokens are those that came out, tau is tokens a pass, alpha is a rate, and only where something was guessed."""
    out = specjax.generate(target, PROMPTS, max_new_tokens=NEW, temperature=1.0, rule=rule, **speculation)
    found = out.stats
    assert found.tokens == sum(map(len, out.tokens))
    assert found.mean_accepted_length == found.tokens / found.target_passes
    assert found.seconds > 0 and found.tokens_per_second == found.tokens / found.seconds
    if speculation:
        assert 0 <= found.acceptance_rate <= 1
        assert found.target_passes <= found.tokens
    else:
        assert found.acceptance_rate is None
        assert found.target_passes == found.tokens


def test_stats_of_a_stop(circle):
    """Tokens behind a stop string are no output, and do not count."""
    out = specjax.generate(circle, ["A", "Q", "R"], max_new_tokens=40, stop="🙂")
    assert out.stats.tokens == sum(map(len, out.tokens))


def test_draft_is_accepted(target, draft):
    """The target is its own perfect draft, and the noisy one is right now and then."""
    perfect = specjax.generate(target, PROMPTS, draft=target, max_new_tokens=NEW).stats
    noisy = specjax.generate(target, PROMPTS, draft=draft, max_new_tokens=NEW).stats
    assert perfect.acceptance_rate == 1.0
    assert 0 < noisy.acceptance_rate < 1
    assert 1 < noisy.mean_accepted_length < perfect.mean_accepted_length <= 5


@pytest.mark.parametrize("gamma", [1, 4])
def test_num_drafts(target, gamma):
    """A perfect draft of gamma tokens makes a pass emit gamma + 1, however its vocabulary is padded."""
    padded = specjax.load(folders.padded())
    assert padded.model.vocab_size > target.model.vocab_size
    out = specjax.generate(target, [[5, 6]], draft=padded, num_drafts=gamma, max_new_tokens=NEW)
    assert out.stats.target_passes == math.ceil(len(out.tokens[0]) / (gamma + 1))


def test_num_drafts_a_row(target):
    """A prompt with 0 is decoded plainly beside others, in the program of the most drafts among them."""
    prompts = [[5, 6], [7], [5, 6, 7]]
    plain = specjax.generate(target, prompts, max_new_tokens=NEW)
    out = specjax.generate(target, prompts, draft=target, num_drafts=[4, 0, 2], max_new_tokens=NEW)
    assert out.tokens == plain.tokens
    lengths = [len(tokens) for tokens in out.tokens]
    passes = sum(math.ceil(n / (gamma + 1)) for n, gamma in zip(lengths, (4, 0, 2), strict=True))
    assert out.stats.target_passes == passes
    before = folders.compilations()
    specjax.generate(target, prompts, draft=target, num_drafts=[0, 4, 4], max_new_tokens=NEW)
    assert folders.compilations() == before


@pytest.mark.parametrize("rule", specjax.RULES.values(), ids=specjax.RULES)
def test_exact(target, rule):
    """An output says whether its rule keeps the target's distribution."""
    out = specjax.generate(target, PROMPTS, rule=rule(), max_new_tokens=NEW, temperature=1.0)
    assert out.exact is (rule not in (specjax.Typical, specjax.Threshold))


# --- refusals --------------------------------------------------------------------------------------------------------

# prompts, options, words of the message: the value, and the cure.
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
    "beyond the context": ([[1] * 10], {"max_new_tokens": 503}, ["10", "503", "513", "target", "512", "=502"]),
    "prompt beyond it": ([[1] * 600], {"max_new_tokens": 5}, ["600", "605", "512", "shorten the prompt"]),
    "nan temperature": ("a", {"temperature": math.nan}, ["temperature=nan", "0 (greedy) or greater"]),
    "infinite temperature": ("a", {"temperature": math.inf}, ["temperature=inf", "0 (greedy) or greater"]),
    "negative temperature": ("a", {"temperature": -0.5}, ["temperature=-0.5", "0 (greedy) or greater"]),
    "one bad temperature": (["a", "b"], {"temperature": [0, -2]}, ["temperature=-2", "0 (greedy) or greater"]),
    "no temperature": ("a", {"temperature": []}, ["temperature", "0 values for 1 rows"]),
    "two temperatures": (["a"] * 3, {"temperature": [0, 1]}, ["temperature", "2 values for 3 rows", "one a row"]),
    "top_p 0": ("a", {"top_p": 0}, ["top_p=0", "(0, 1]"]),
    "top_p above 1": ("a", {"top_p": 1.5}, ["top_p=1.5", "(0, 1]"]),
    "top_p nan": ("a", {"top_p": math.nan}, ["top_p=nan", "(0, 1]"]),
    "top_k negative": ("a", {"top_k": -1}, ["top_k=-1", "0 (off) or greater"]),
    "top_k half": ("a", {"top_k": 2.5}, ["top_k=2.5", "whole number"]),
    "min_p above 1": ("a", {"min_p": 1.1}, ["min_p=1.1", "[0, 1]"]),
    "num_drafts too few": (["a"] * 3, {"num_drafts": [1, 2]}, ["num_drafts", "2 values for 3 prompts", "one a prompt"]),
    "num_drafts negative": (["a", "b"], {"num_drafts": [1, -1]}, ["num_drafts=-1", "0 (plain) or greater"]),
    "num_drafts half": ("a", {"num_drafts": [1.5]}, ["num_drafts=1.5", "whole number"]),
    "repetition penalty 0": ("a", {"repetition_penalty": 0}, ["repetition_penalty=0", "above 0", "1 switches it off"]),
    "one bad penalty": (["a", "b"], {"repetition_penalty": [1, -1]}, ["repetition_penalty=-1", "above 0"]),
    "presence nan": ("a", {"presence_penalty": math.nan}, ["presence_penalty=nan", "finite"]),
    "frequency infinite": ("a", {"frequency_penalty": math.inf}, ["frequency_penalty=inf", "finite"]),
    "bias of no token": ("a", {"logit_bias": {320: 1.0}}, ["logit_bias", "320", "0 to 319"]),
    "bias nan": ("a", {"logit_bias": {5: math.nan}}, ["logit_bias={5: nan}", "finite, or -inf"]),
    "biases too few": (["a"] * 3, {"logit_bias": [{}, {}]}, ["logit_bias", "2 values for 3 rows"]),
    "empty bad word": ("a", {"bad_words": [[5], []]}, ["bad_words", "empty sequence", "remove"]),
    "empty bad text": ("a", {"bad_words": [" "]}, ["bad_words", "empty text", "remove"]),
    "bad words as one text": ("a", {"bad_words": "x"}, ["bad_words='x'", "list"]),
    "bad word of no token": ("a", {"bad_words": [[5, -1]]}, ["bad_words", "-1", "0 to 319"]),
    "bad word that ends": ("a", {"bad_words": [[0]]}, ["bad_words", "min_new_tokens", "eos=[]"]),
    "least above most": ("a", {"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens=9", "max_new_tokens=8"]),
    "least negative": ("a", {"min_new_tokens": -1}, ["min_new_tokens=-1", "0 (off) or greater"]),
    "end of no token": ("a", {"eos": 320}, ["eos=320", "0 to 319"]),
    "ends too few": (["a"] * 3, {"eos": [[1], [2]]}, ["eos", "2 lists for 3 prompts"]),
    "logprobs negative": ("a", {"logprobs": -1}, ["logprobs=-1", "[0, 320]"]),
    "logprobs beyond": ("a", {"logprobs": 321}, ["logprobs=321", "[0, 320]"]),
    "function of another shape": (
        "a",
        {"logits_processor": lambda logits, text, counts: logits[:5]},
        ["logits_processor", "(5,)", "(320,)", "as many"],
    ),
    "function of no shape": (
        "a",
        {"logits_processor": lambda logits, text, counts: (logits, counts)},
        ["logits_processor", "tuple", "(320,)"],
    ),
    "seeds too few": (["a"] * 3, {"seed": [1, 2]}, ["seed", "2 values for 3 prompts", "one a prompt"]),
    "seeds too many": ("a", {"seed": [1, 2]}, ["seed", "2 values for 1 prompts", "one a prompt"]),
}


@pytest.fixture
def refused(monkeypatch):
    """`generate` raises ValueError, its message holds every word, and nothing was compiled or run."""

    def touched(*_, **__):
        raise AssertionError("the decoder was reached")

    monkeypatch.setattr(specjax.Decoder, "prefill", touched)
    jax.random.key(0)

    def check(model, prompts, words, **options):
        before = folders.compilations()
        with pytest.raises(ValueError) as caught:
            specjax.generate(model, prompts, **options)
        assert folders.compilations() == before
        assert [word for word in words if word not in str(caught.value)] == [], caught.value

    return check


@pytest.mark.parametrize("case", REFUSED)
def test_refused(refused, target, case):
    """The message names the value and the cure."""
    prompts, options, words = REFUSED[case]
    refused(target, prompts, words, **options)


@pytest.mark.parametrize("swap", [False, True])
def test_draft_without_a_tokenizer(refused, target, wordless, swap):
    """A model without a tokenizer is no draft for one with it, nor the other way round."""
    target, draft = (wordless, target) if swap else (target, wordless)
    refused(target, [[1]], ["target", "wordless", "no tokenizer", "NGram()"], draft=draft)


def test_draft_context(refused, target, draft):
    """The draft reads the text too."""
    refused(target, [[1] * 10], ["10", "300", "310", "draft", "256", "=246"], draft=draft, max_new_tokens=300)


def test_draft_and_proposer(refused, target, draft):
    """One of the two."""
    refused(target, "a", ["draft=", "proposer=", "not both"], draft=draft, proposer=specjax.NGram())


def test_draft_as_proposer(refused, target, draft):
    """A draft model that comes without its weights."""
    for kind in (specjax.DraftModel, specjax.Universal):
        refused(target, "a", [kind.__name__, "draft="], proposer=kind(draft.model, target.model.vocab_size))


def test_a_proposer_of_other_models(refused, target, draft, wordless):
    """Weights and structure have to be of the same model."""
    size = target.model.vocab_size
    refused(target, "a", ["DraftTree", "draft="], proposer=specjax.DraftTree(draft.model, size))
    other = specjax.DraftModel(specjax.load(folders.padded()).model, size)
    refused(target, "a", ["DraftModel", "other models", "draft.model"], draft=draft, proposer=other)
    refused(target, "a", ["target.model.vocab_size"], draft=draft, proposer=specjax.DraftTree(draft.model, size - 1))
    refused(target, "a", ["EarlyExit", "another target"], proposer=specjax.EarlyExit(draft.model, 1))


@pytest.mark.parametrize("num_drafts", [0, -1])
def test_no_drafts(refused, target, draft, num_drafts):
    """A draft model has to propose something."""
    refused(target, "a", [f"num_drafts={num_drafts}", "at least 1"], draft=draft, num_drafts=num_drafts)


def test_text_without_tokenizer(refused, wordless):
    """A text needs a tokenizer."""
    refused(wordless, "a", ["wordless", "tokenizer.json", "token ids"])


def test_stop_without_tokenizer(refused, wordless):
    """A stop string needs one too."""
    refused(wordless, [[1]], ["stop", "'x'", "tokenizer", "wordless"], stop="x")


def test_bad_word_without_tokenizer(refused, wordless):
    """And so does a bad word."""
    refused(wordless, [[1]], ["bad_words", "'x'", "tokenizer", "wordless"], bad_words=["x"])


def test_context_is_filled_to_the_brim(target):
    """Prompt and new tokens may fill the context: refused is only what goes beyond."""
    out = specjax.generate(target, [[5] * 500], max_new_tokens=12)
    assert len(out.tokens[0]) == 12 or out.finish == ["eos"]
