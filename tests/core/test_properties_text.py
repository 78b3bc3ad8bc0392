"""Drawn vocabularies, texts and stop strings: spellings by bytes, and a naive search for stops."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from properties import law, seeds
from tokenizers import decoders, models, pre_tokenizers

from specjax.methods.draft_model.translated import spell
from specjax.text import Translation, translate
from specjax.text.stop_strings import Texts

BYTE_LEVEL, PIECES = "byte level", "sentencepiece"
ALPHABET = "ab é"
"""One of these characters is a space, and one is two bytes."""


PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTERS = {byte: chr(byte) for byte in PLAIN} | {
    byte: chr(256 + n) for n, byte in enumerate(sorted({*range(256)} - {*PLAIN}))
}
BYTES = {character: byte for byte, character in CHARACTERS.items()}
"""GPT-2's character for each byte, by its rule."""


def byte_level(text):
    """The text as GPT-2 writes it in its vocabulary."""
    return "".join(CHARACTERS[byte] for byte in text.encode())


@st.composite
def vocabularies(draw):
    """A tokenizer of BPE, and what each of its tokens means: bytes, or a special token's string."""
    kind = draw(st.sampled_from([BYTE_LEVEL, PIECES]))
    characters = draw(st.lists(st.sampled_from(ALPHABET), min_size=1, unique=True))
    if kind == BYTE_LEVEL:
        tokens = list(dict.fromkeys("".join(map(byte_level, characters))))
    else:
        tokens = [c.replace(" ", "▁") for c in characters]
    merges = []
    for left, right in draw(st.lists(st.tuples(*[st.integers(0, 30)] * 2), max_size=8)):
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    if kind == PIECES and draw(st.booleans()):
        tokens += [f"<0x{byte:02X}>" for byte in ALPHABET.encode()]
    order = draw(st.permutations(range(len(tokens))))
    tokenizer = tokenizers.Tokenizer(
        models.BPE({tokens[n]: i for i, n in enumerate(order)}, merges, byte_fallback=False)
    )
    if kind == BYTE_LEVEL:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    specials = draw(st.lists(st.sampled_from(["<s>", "</s>", "<x>"]), unique=True))
    tokenizer.add_special_tokens(specials)
    return tokenizer, {i: meaning(tokenizer, i, kind) for i in range(tokenizer.get_vocab_size())}


def meaning(tokenizer, token, kind):
    """What a token stands for, apart from the library: the decoder of its own tokenizer."""
    text = tokenizer.id_to_token(token)
    if text in ("<s>", "</s>", "<x>"):
        return text
    if text.startswith("<0x"):
        return bytes.fromhex(text[3:5])
    if kind == PIECES:
        return text.replace("▁", " ").encode()
    return bytes(BYTES[character] for character in text)


def test_spellings_stand_for_the_same_bytes():
    """Of each token: its pieces are its bytes, or their end; a single token is its twin; and a
    token is without pieces only if the draft cannot write it."""
    seen = {"twin": 0, "several": 0, "none": 0, "cut": 0, "role": 0}

    @law(150)
    @given(
        vocabularies(),
        vocabularies(),
        st.integers(1, 4),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=2),
    )
    def check(target, draft, most, roles):
        (ours, our_meaning), (theirs, their_meaning) = target, draft
        specials = [[n for n, m in x.items() if isinstance(m, str)] for _, x in (target, draft)]
        same = [(specials[0][a % len(specials[0])], specials[1][b % len(specials[1])])
                for a, b in roles if all(specials)]  # fmt: skip
        sizes = len(our_meaning), len(their_meaning)
        made = translate(ours, theirs, *sizes, same=same, max_pieces=most)
        shared = [v for v in made.to_draft.tolist() if v >= 0]
        assert len(set(shared)) == len(shared), "a draft token has one twin"
        bytes_known = set(their_meaning.values())
        for token, wanted in our_meaning.items():
            pieces = made.pieces[token, : made.count[token]].tolist()
            spelt = [their_meaning[piece] for piece in pieces]
            twin = made.to_draft[token]
            if twin >= 0:
                assert pieces == [twin] and (spelt == [wanted] or (token, twin) in same)
                seen["twin"] += 1
            elif isinstance(wanted, str):
                assert wanted not in bytes_known
                if pieces:  # it plays the role of a token that is another one's twin
                    assert (token, *pieces) in same and pieces[0] in shared
                    seen["role"] += 1
                else:
                    assert token not in dict(same)
            elif pieces and b"".join(spelt) == wanted:
                seen["several"] += 1
            elif pieces:
                assert len(pieces) == most and wanted.endswith(b"".join(spelt))
                seen["cut"] += 1
            else:
                assert any(bytes([byte]) not in bytes_known for byte in wanted)
                seen["none"] += 1
            if wanted in bytes_known:
                assert spelt == [wanted]

    check()
    assert seen.pop("role") and min(seen.values()) >= 10, seen


ROWS, WIDTH, SIZE, MOST, INTO = 3, 6, 11, 4, 9
"""Rows and tokens of a text, tokens of the target, pieces of each, and the width of the result."""


def test_a_text_is_spelt_token_by_token():
    """The pieces of a row one after the other; of a row that needs more room, the last ones."""
    spelling = jax.jit(spell, static_argnums=3)
    cut = 0

    @law(60)
    @given(
        st.lists(st.lists(st.integers(1, 99), max_size=MOST), min_size=SIZE, max_size=SIZE),
        seeds,
    )
    def check(pieces, seed):
        nonlocal cut
        rng = np.random.default_rng(seed)
        table = np.zeros((SIZE, MOST), np.int32)
        for row, some in zip(table, pieces, strict=True):
            row[: len(some)] = some
        tables = Translation(
            jnp.array(table), jnp.array(list(map(len, pieces)), jnp.int32),
            jnp.zeros(SIZE, jnp.int32), jnp.zeros(0, jnp.int32),
        )  # fmt: skip
        tokens = rng.integers(0, SIZE, (ROWS, WIDTH)).astype(np.int32)
        count = rng.integers(0, WIDTH + 1, ROWS).astype(np.int32)
        spelt, length = map(np.asarray, spelling(tables, tokens, count, INTO))
        for row in range(ROWS):
            whole = [piece for token in tokens[row, : count[row]] for piece in pieces[token]]
            assert spelt[row].tolist() == whole[-INTO:] + [0] * (INTO - len(whole))
            assert length[row] == min(len(whole), INTO)
            cut += len(whole) > INTO

    check()
    assert cut >= 10


WRITER = tokenizers.Tokenizer(
    models.BPE(
        {byte_level(c): n for n, c in enumerate("ab -")}
        | {c: 4 + n for n, c in enumerate(byte_level("é€"))}
        | {byte_level("ab"): 9, byte_level(" a"): 10, byte_level("--"): 11},
        [("a", "b"), (byte_level(" "), "a"), ("-", "-")],
    )
)
WRITER.decoder = decoders.ByteLevel()
WRITER.add_special_tokens(["</s>"])
"""Some tokens are parts of characters, some are several characters, and one is special."""

FALLBACK = tokenizers.Tokenizer(
    models.BPE(
        {"a": 0, "b": 1, "▁": 2, "-": 3}
        | {f"<0x{byte:02X}>": 4 + n for n, byte in enumerate("é€".encode())}
        | {"ab": 9, "▁a": 10, "<0x0A>": 11},
        [("a", "b"), ("▁", "a")],
    )
)
FALLBACK.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
     decoders.Strip(" ", 1, 0)]
)  # fmt: skip
FALLBACK.add_special_tokens(["</s>"])
"""As Llama 2's: a run of bytes that is not UTF-8 becomes U+FFFD, also where a part of it is."""

BEFORE = {WRITER: 0, FALLBACK: 12}
"""The last token of the prompt; after a special one the first space of FALLBACK is lost."""

LONGEST = 12  # tokens of a text


def of(writer, tokens):
    return Texts(types.SimpleNamespace(tokenizer=writer), [BEFORE[writer]], ()).decode(0, tokens)


def test_a_text_is_cut_where_a_naive_search_cuts_it():
    """The fewest tokens with a stop string in them, and the text before the first of its stops,
    however many tokens come at once. What a stream has shown before is never taken back, and its
    pieces join to the text."""
    seen = dict.fromkeys((WRITER, FALLBACK), 0)
    held = 0

    @law(400)
    @given(
        st.sampled_from([WRITER, FALLBACK]),
        st.lists(st.integers(0, 12), max_size=LONGEST),
        st.lists(st.text("ab -é€\n", min_size=1, max_size=2), max_size=1),
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
        st.sets(st.integers(1, LONGEST)),
    )
    def check(writer, tokens, stops, parts, ends):
        nonlocal held
        text_of = lambda n: of(writer, tokens[:n])  # noqa: E731
        # Parts of the text, which begin and end in the middle of tokens.
        parts = [of(writer, tokens)[start : start + size] for start, size in parts]
        # One stop may end another.
        both = [stop for part in parts for stop in (part[1:], part)]
        stops = [*stops, *(stop for stop in both if stop and "\ufffd" not in stop)]
        texts = Texts(types.SimpleNamespace(tokenizer=writer), [BEFORE[writer]], tuple(stops))
        firsts = [n for n in range(len(tokens) + 1) if any(s in text_of(n) for s in stops)]
        wanted = tokens, of(writer, tokens), False
        if firsts:
            whole = text_of(firsts[0])
            places = [n for n in range(len(whole)) if any(whole[n:].startswith(s) for s in stops)]
            wanted = tokens[: firsts[0]], whole[: places[0]], True
            seen[writer] += 1
        known = at = 0
        shown, pieces = "", []
        for n in sorted({n for n in ends if n < len(tokens)} | {len(tokens)}):
            kept, text, stopped = texts.cut(0, tokens[:n], known)
            if stopped or n == len(tokens):
                break
            certain = texts.certain(0, kept)
            assert certain.startswith(shown) and wanted[1].startswith(certain)
            count, settled = texts.settled(0, kept, at)
            assert count >= at and settled == text_of(count) and certain.startswith(settled)
            pieces += texts.pieces(0, kept[:count], settled, at, len("".join(pieces)))
            assert "".join(pieces) == settled
            held += count < n
            known, at, shown = n, count, certain
        assert (kept, text, stopped) == wanted == texts.cut(0, tokens)
        pieces += texts.pieces(0, kept, text, at, len("".join(pieces)))
        assert "".join(pieces) == text and len(pieces) == len(kept)
        assert "".join(texts.pieces(0, kept, text)) == text

    check()
    assert min(seen.values()) >= 25 and held >= 50
