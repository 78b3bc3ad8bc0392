"""Token texts over HTTP: parts of characters, spaces, special tokens, stop strings."""

from __future__ import annotations

import types

import numpy as np
import pytest
from test_properties_text import BEFORE, FALLBACK, WRITER

from specjax.decoding.logprobs import Logprobs
from specjax.serve.handle import End, Handle
from specjax.text import Texts, Words

pytest.importorskip("pydantic")
from specjax.serve.http.answers import Writer, lorax_tokens
from specjax.serve.http.requests import Asked

EURO = [226, 130, 172]
CASES = [
    # The three bytes of one character, a token of two characters, and a special token.
    (WRITER, [0, 6, 7, 8, 9, 12], (), "a€ab", ["a", "", "", "€", "ab", "</s>"],
     [[97], *([b] for b in EURO), [97, 98], None], [0, 1, 1, 1, 2, 4]),
    # A space at the beginning of a word; the first one of a text is lost after a special token.
    (FALLBACK, [10, 10, 2, 1], (), "a a b", ["a", " a", " ", "b"],
     [[32, 97], [32, 97], [32], [98]], [0, 1, 3, 4]),
    # Bytes that are never a character.
    (FALLBACK, [0, 6, 7, 1], (), "a\ufffd\ufffdb", ["a", "\ufffd", "\ufffd", "b"],
     [[97], [226], [130], [98]], [0, 1, 2, 3]),
    # A stop string that ends inside of a token.
    (WRITER, [0, 3, 9], ("-a",), "a", ["a", "", ""], [[97], [45], [97, 98]], [0, 1, 1]),
]  # fmt: skip


def asked() -> Asked:
    return Asked([], 1, 0, "toy", None, None, None, "", None)


def handle_of(tokenizer, tokens, stops):
    """A handle to which the tokens were given one by one, and its increments in the meantime."""
    texts = Texts(types.SimpleNamespace(tokenizer=tokenizer), [BEFORE.get(tokenizer, 0)], stops)
    handle = Handle(texts, (None, None), 1, 2)
    made = []
    for count, token in enumerate(tokens, 1):
        # The token itself is the most probable one, and 7 is the next.
        known = Logprobs(*np.full((2, 1), -count, np.float32), np.array([[token, 7]]),
                         np.array([[-count, -count - 1]], np.float32))  # fmt: skip
        end = None
        if count == len(tokens):
            kept, text, stopped = texts.cut(0, tokens)
            end = End(len(kept), text, "stop" if stopped else "limit", (0,) * 6)
        handle.extend([token], [0], 0, known, end)
        at, sent = sum(len(new.tokens) for new in made), sum(len(new.text) for new in made)
        increment, _, ended = handle._since(at, sent)
        made += [] if increment is None else [increment]
        assert ended == (end is not None)
    return handle.result(), made


@pytest.mark.parametrize("case", CASES, ids=["bytes", "spaces", "broken", "stopped"])
def test_tokens_join_to_the_text(case):
    """Their bytes are their own, their offsets are into the text, and a stream has the same."""
    tokenizer, tokens, stops, text, words, written, offsets = case
    served, made = handle_of(tokenizer, tokens, stops)
    assert served.text == text and len(made) > 1
    writer = Writer(Words(tokenizer), asked(), False, 0, False)
    whole = writer.whole([served])["choices"][0]["logprobs"]
    parts = [writer.increment(0, new, new.text)["choices"][0]["logprobs"] for new in made]
    assert (whole["tokens"], whole["text_offset"]) == (words, offsets)
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values, name
    chat = Writer(Words(tokenizer), asked(), True, 0, False)
    content = chat.whole([served])["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == words
    assert [entry["bytes"] for entry in content] == written
    lorax = lorax_tokens(Words(tokenizer), served)
    assert [token["text"] for token in lorax] == words
    assert [token["special"] for token in lorax] == [own is None for own in written]
    assert "".join(token["text"] for token in lorax if not token["special"]) == text
    assert lorax == [token for new in made for token in lorax_tokens(Words(tokenizer), new)]
    # The chosen token has one name everywhere, and other tokens have names of their own.
    for word, best, (first, other) in zip(
        words, whole["top_logprobs"], [entry["top_logprobs"] for entry in content], strict=True
    ):
        assert first["token"] == word and word in best
        assert other["bytes"] == [130]


def test_names_of_single_tokens():
    """As OpenAI's API writes bytes that are no character; without a tokenizer there are numbers."""
    words = Words(WRITER)
    assert [words.name(n) for n in (7, 10, 12, 99)] == ["bytes:\\x82", " a", "</s>", "token_id:99"]
    served, _ = handle_of(None, [3, 4], ())
    answer = Writer(Words(None), asked(), False, 0, False).whole([served])["choices"][0]
    assert answer["text"] == "" and answer["logprobs"]["tokens"] == ["token_id:3", "token_id:4"]
    assert answer["logprobs"]["text_offset"] == [0, 0]
