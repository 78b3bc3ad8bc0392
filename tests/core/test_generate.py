"""`generate`: batches, stop strings, streams and figures."""

import math

import counted
import generated
import language_models
import numpy as np
import pytest
from generated import NEW, PROMPTS, drain, generate

import specjax
from specjax.generation.prompts import padded_length

CIRCLE = "A日b語cédQ🙂RST"  # 20 tokens, most of them a part of a character
LINE = "Zthe cat sat.NUMBERS"  # 11 tokens after the first, some of several characters


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def draft():
    return language_models.draft()


@pytest.fixture(scope="module")
def wordless():
    return language_models.wordless()


@pytest.fixture(scope="module")
def circle():
    """Writes CIRCLE repeatedly."""
    return language_models.scribe(CIRCLE, end=False)


@pytest.fixture(scope="module")
def line():
    """Writes LINE once."""
    return language_models.scribe(LINE, end=True)


@pytest.fixture(params=["none", "draft"])
def speculation(request, draft):
    """The options of a way to draft; `tests/product/test_generate_lookup.py` has another one."""
    return {
        "none": {"proposer": "none"},
        "draft": {"proposer": "draft", "draft": draft, "num_drafts": 2},
    }[request.param]


def going_round(length):
    """The first `length` characters after the A."""
    return (CIRCLE[1:] + CIRCLE * length)[:length]


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_a_batch_is_the_prompt_alone(temperature):
    """Without drafts; `tests/product/test_generate_lookup.py` has drafts, and so have the
    laws of `laws.py`."""
    generated.check_rows_alone(temperature, proposer="none")


def test_single_prompt_is_a_list_of_one(target):
    """A string is a batch of one row."""
    out = generate(target, PROMPTS[0], max_new_tokens=NEW, temperature=1.0)
    assert out.tokens == generate(target, PROMPTS[:1], max_new_tokens=NEW, temperature=1.0).tokens
    assert len(out.text) == len(out.tokens) == len(out.finish) == 1


@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
def test_token_prompts_are_their_text(target, make):
    """Token ids stand for the text that encodes to them."""
    ids = [make(target.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    options = {"max_new_tokens": NEW, "temperature": 1.0}
    tokens, text = (generate(target, p, **options) for p in (ids, PROMPTS))
    assert (tokens.tokens, tokens.text) == (text.tokens, text.text)


def test_tokens_in_tokens_out(target, wordless):
    """Without tokenizer.json the tokens are the same, and the texts are empty."""
    ids = [target.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    out = generate(wordless, ids, max_new_tokens=NEW)
    assert out.tokens == generate(target, ids, max_new_tokens=NEW).tokens
    assert out.text == [""] * 3


def test_draft_without_tokenizer(wordless):
    """A target and a draft without tokenizers fit together if their vocabularies have one size."""
    prompts = [[5, 6], [7], [5, 6, 7]]
    out = generate(wordless, prompts, draft=wordless, num_drafts=2, max_new_tokens=NEW)
    assert out.tokens == generate(wordless, prompts, max_new_tokens=NEW).tokens


def test_text_is_the_tokens_decoded(target):
    """`text` decodes `tokens` without special tokens."""
    out = generate(target, PROMPTS, max_new_tokens=NEW)
    assert out.text == [target.tokenizer.decode(row) for row in out.tokens]


# --- ends -----------------------------------------------------------------------------------------


def test_limit(circle):
    """A text that does not end is cut at max_new_tokens."""
    out = generate(circle, "A", max_new_tokens=25)
    assert (len(out.tokens[0]), out.finish) == (25, ["limit"])


def test_eos(line):
    """EOS ends the row; it is among the tokens but not in the text."""
    out = generate(line, "Z", max_new_tokens=25)
    assert (out.text, out.finish) == ([LINE[1:]], ["eos"])
    assert out.tokens[0] == [*line.tokenizer.encode(LINE).ids[1:], 0]


def test_eos_at_the_limit(line):
    """A text whose last permitted token is EOS has ended."""
    tokens = len(line.tokenizer.encode(LINE).ids)
    assert generate(line, "Z", max_new_tokens=tokens).finish == ["eos"]
    assert generate(line, "Z", max_new_tokens=tokens - 1).finish == ["limit"]


STOPS = [
    # stop, text, number of new tokens
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
    proposer = specjax.NGram() if speculative else "none"
    out = generate(line, "Z", max_new_tokens=25, stop=stop, proposer=proposer)
    assert (out.text, out.finish) == ([text], ["stop"])
    assert out.tokens == [line.tokenizer.encode(LINE).ids[1 : tokens + 1]]


def test_stop_that_never_comes(line):
    """Half of a stop string is ordinary text."""
    out = generate(line, "Z", max_new_tokens=25, stop=["sat!", "BERST"])
    assert (out.text, out.finish) == ([LINE[1:]], ["eos"])


def test_stop_on_a_character_of_several_tokens(circle):
    """A stop string may be a character that is spread over tokens."""
    out = generate(circle, "A", max_new_tokens=25, stop="語")
    assert (out.text, out.finish, len(out.tokens[0])) == (["日b"], ["stop"], 7)


@pytest.mark.parametrize("stop", ["bcde", "🙂RST A", "R", "ST", "A日b語"])
def test_stop_across_chunks(circle, stop):
    """Stop strings are found anywhere, although a stream checks its text only every few steps."""
    out = generate(circle, "A", max_new_tokens=100, stop=stop)
    whole = generate(circle, "A", max_new_tokens=100)
    at = whole.text[0].find(stop)
    assert (out.text, out.finish) == (
        ([whole.text[0][:at]], ["stop"]) if at >= 0 else (whole.text, ["limit"])
    )


@pytest.mark.parametrize("prompt", list("AbcdRST"))
def test_overlapping_stops(circle, prompt):
    """Of overlapping stop strings the one that is complete first ends the text, whatever the
    chunks."""
    out = generate(circle, prompt, max_new_tokens=60, stop=["dQ🙂", "Q"])
    start = (CIRCLE * 2).index(prompt) + 1
    wanted = (CIRCLE * 2)[start:].split("Q")[0]
    assert (out.text, out.finish) == ([wanted], ["stop"])


def test_rows_stop_alone(circle):
    """A stop string ends its row, and the others go on."""
    out = generate(circle, ["A", "Q", "R"], max_new_tokens=16, stop="🙂")
    assert (out.text[:2], out.finish[:2]) == (["日b語cédQ", ""], ["stop", "stop"])
    assert out.text[2].startswith("STA日b語")


def test_stop_and_seed(speculation):
    generated.check_stop(**speculation)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), "Sx", "RSTA日b語c"])
def test_stream_of_a_prompt(circle, stop):
    """The pieces of a prompt are strings and make up the text."""
    stream = generate(circle, "A", max_new_tokens=100, stream=True, stop=stop)
    pieces = drain(stream)
    assert len(pieces) > 3 or stop == "RSTA日b語c"
    assert "".join(pieces) == stream.output.text[0]
    assert stream.output.text == generate(circle, "A", max_new_tokens=100, stop=stop).text


def test_stream_of_a_list(speculation):
    generated.check_stream(**speculation)


def test_stream_of_a_list_of_one(circle):
    """A list of one prompt streams lists."""
    assert all(
        isinstance(p, list) for p in drain(generate(circle, ["A"], max_new_tokens=25, stream=True))
    )


def test_stream_keeps_characters_whole(circle):
    """No piece holds a part of a character, wherever a chunk of steps ends."""
    for prompt in "AbcdQRST":
        stream = generate(circle, prompt, max_new_tokens=100, stream=True)
        pieces = drain(stream)
        start = CIRCLE.index(prompt) + 1
        text = stream.output.text[0].rstrip("\ufffd")
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert text == (CIRCLE * 6)[start : start + len(text)] and len(text) > 50


def test_stream_takes_nothing_back(circle):
    """Streamed text is never the beginning of a stop string that follows."""
    for stop in ("語cé", "🙂RSTA", "TA日b語cédQ🙂RST"):
        stream = generate(circle, "A", max_new_tokens=100, stream=True, stop=stop)
        assert "".join(drain(stream)) == going_round(100).split(stop)[0]


def test_stream_raises_at_once(target):
    """The call itself raises, not the first piece."""
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(target, "a", max_new_tokens=0, stream=True)


# --- figures --------------------------------------------------------------------------------------


def test_stats_add_up(speculation):
    generated.check_stats(specjax.Match(), **speculation)


def test_stats_of_a_stop(circle):
    """Tokens behind a stop string are no output and do not count."""
    out = generate(circle, ["A", "Q", "R"], max_new_tokens=40, stop="🙂")
    assert out.stats.tokens == sum(map(len, out.tokens))


def test_draft_is_accepted(target, draft):
    """The target is its own perfect draft, and the noisy draft is right now and then."""
    perfect = generate(target, PROMPTS, draft=target, num_drafts=2, max_new_tokens=NEW).stats
    noisy = generate(target, PROMPTS, draft=draft, num_drafts=2, max_new_tokens=NEW).stats
    assert perfect.acceptance_rate == 1.0
    assert 0 < noisy.acceptance_rate < 1
    assert 1 < noisy.mean_accepted_length < perfect.mean_accepted_length <= 3


def test_num_drafts(target):
    """With gamma perfect drafts a pass emits gamma + 1 tokens, whatever the vocabulary padding."""
    padded, gamma = language_models.padded(), 2
    assert padded.model.vocab_size > target.model.vocab_size
    out = generate(target, [[5, 6]], draft=padded, num_drafts=gamma, max_new_tokens=NEW)
    assert out.stats.target_passes == math.ceil(len(out.tokens[0]) / (gamma + 1))


def test_num_drafts_a_row(target):
    """A prompt with 0 is decoded plainly in the program for the most drafts of the batch."""
    prompts = [[5, 6], [7], [5, 6, 7]]
    plain = generate(target, prompts, max_new_tokens=NEW)
    out = generate(target, prompts, draft=target, num_drafts=[2, 0, 1], max_new_tokens=NEW)
    assert out.tokens == plain.tokens
    lengths = [len(tokens) for tokens in out.tokens]
    passes = sum(math.ceil(n / (gamma + 1)) for n, gamma in zip(lengths, (2, 0, 1), strict=True))
    assert out.stats.target_passes == passes
    before = counted.compilations()
    generate(target, prompts, draft=target, num_drafts=[0, 2, 2], max_new_tokens=NEW)
    assert counted.compilations() == before


@pytest.mark.parametrize("rule", specjax.RULES.values(), ids=specjax.RULES)
def test_exact(target, rule):
    """An output says whether its rule keeps the target's distribution."""
    out = generate(target, PROMPTS, rule=rule(), max_new_tokens=NEW, temperature=1.0)
    assert out.exact is (rule not in (specjax.Typical, specjax.Threshold))


def test_context_is_filled_to_the_brim(target):
    """Prompt and new tokens may fill the whole context; only more is refused."""
    out = generate(target, [[5] * 500], max_new_tokens=12)
    assert len(out.tokens[0]) == 12 or out.finish == ["eos"]


def test_prompts_of_similar_lengths_share_a_width():
    """Few widths, and less than a third of what is read is padding."""
    widths = [padded_length(longest) for longest in range(1, 3000)]
    assert sorted(set(widths))[:8] == [16, 24, 32, 48, 64, 96, 128, 192]
    assert len(set(widths)) == 16
    for longest, width in enumerate(widths, 1):
        assert width >= longest
        assert width == 16 or (width - longest) * 3 < width
