"""Tables between real tokenizers trained here: byte-level, sentencepiece-style, and refused
ones."""

import functools
import json

import folders
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specjax.text.vocabulary import translate

TEXT = [
    folders.TEXT * 3,
    "naïve café; def main(argv): return [int(x) for x in argv[1:]]\n\n\tprint(1.25)",
    "日本語 and 🙂",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


@functools.cache
def byte_level(vocab_size=320, end=folders.END):
    """A byte-level tokenizer as in GPT-2."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(TEXT * 4, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return made


@functools.cache
def sentencepiece():
    """A tokenizer as in Llama 2: BPE over ▁ with a token for every byte, and <s> starts a text."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    known = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXT[:2] * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=known, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    parts = json.loads(made.to_str())
    parts["pre_tokenizer"] = None
    parts["added_tokens"] = [
        added for added in parts["added_tokens"] if added["content"] in SPECIAL
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


@functools.cache
def unigram():
    """A unigram tokenizer with Metaspace, and no token for unknown characters."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXT[:2] * 4, trainer)
    return made


TOKENIZERS = {
    "byte-level": byte_level,
    "fewer": functools.partial(byte_level, 280),
    "other end": functools.partial(byte_level, 300, "<eot>"),
    "sentencepiece": sentencepiece,
    "unigram": unigram,
}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]
MARK = "A"  # after it, a decoded token keeps its leading space


def text_of(tokenizer, ids):
    """The text of tokens, by a tokenizer's own decoder."""
    mark = tokenizer.token_to_id(MARK) or tokenizer.token_to_id("a")
    before = tokenizer.decode([mark], skip_special_tokens=False)
    return tokenizer.decode([mark, *ids], skip_special_tokens=False)[len(before) :]


def tables(ours, theirs, **options):
    """The tables between two of TOKENIZERS, with padded vocabularies."""
    ours, theirs = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    return (
        ours,
        theirs,
        translate(ours, theirs, ours.get_vocab_size() + 7, theirs.get_vocab_size() + 3, **options),
    )


def spelling(table, token):
    return table.pieces[token, : table.count[token]].tolist()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_pieces_spell_the_token(ours, theirs):
    """Each tokenizer's own decoder gives the same text for a token and for its pieces."""
    ours, theirs, table = tables(ours, theirs, max_pieces=100)
    compared = 0
    for token in range(ours.get_vocab_size()):
        pieces, text = spelling(table, token), text_of(ours, [token])
        if pieces and "\ufffd" not in text and ours.id_to_token(token) not in SPECIAL:
            assert text_of(theirs, pieces) == text
            compared += 1
    assert compared > 40


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_shared_tokens_are_one_to_one(ours, theirs):
    """A token that can be proposed has a draft token of its own, which also is its spelling."""
    ours, theirs, table = tables(ours, theirs)
    shared = np.flatnonzero(table.to_draft >= 0)
    assert table.num_shared == len(shared) > 20
    assert len(set(table.to_draft[shared])) == len(shared)
    for token in shared:
        assert spelling(table, token) == [table.to_draft[token]]
    assert table.to_draft.max() < theirs.get_vocab_size()
    assert table.pieces.min() >= 0
    assert (table.count[ours.get_vocab_size() :] == 0).all()
    assert (table.to_draft[ours.get_vocab_size() :] == -1).all()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_to_itself_a_vocabulary_translates_into_itself(name):
    """Every token maps to itself, except for byte tokens that an ordinary token also stands for."""
    ours, _, table = tables(name, name)
    twice = {
        ours.token_to_id(f"<0x{ord(c):02X}>") for c in map(chr, range(128)) if ours.token_to_id(c)
    } - {None}
    twice |= {ours.token_to_id("<0x20>")} - {None}
    for token in range(ours.get_vocab_size()):
        if token in twice:
            assert table.to_draft[token] == -1 and spelling(table, token) != [token]
        else:
            assert table.to_draft[token] == token
    assert table.expansion == 1


@pytest.mark.parametrize("theirs", ["byte-level", "fewer", "sentencepiece"])
def test_where_the_draft_has_every_byte_all_is_read(theirs):
    """This includes tokens that are no text alone, such as a part of a character."""
    for ours in TOKENIZERS:
        if ours != theirs:
            ours, _, table = tables(ours, theirs)
            unread = {
                ours.id_to_token(token)
                for token in np.flatnonzero(table.count[: ours.get_vocab_size()] == 0)
            }
            assert unread <= {*SPECIAL, folders.END, "<eot>"}


def test_pieces_are_those_of_the_tokenizer():
    """They are what the draft was trained on, not the longest match or single bytes, also within
    words."""
    ours, theirs, table = tables("byte-level", "fewer")
    several = [t for t in range(1, ours.get_vocab_size()) if table.count[t] > 1]
    assert len(several) > 20
    for token in several:
        assert spelling(table, token) == [
            p.id for p in theirs.model.tokenize(ours.id_to_token(token))
        ]
    ours, theirs, table = tables("byte-level", "sentencepiece")
    for written, wanted in {
        "Ġcat": ["▁cat"],
        "at": ["at"],
        "Ġ": ["▁"],
        "Ċ": ["\n"],
        "ł": ["<0xA0>"],
    }.items():
        assert [theirs.id_to_token(p) for p in spelling(table, ours.token_to_id(written))] == wanted


def test_a_character_that_the_draft_lacks():
    """It is spelt in bytes if the draft has them, and cannot be spelt otherwise."""
    ours = byte_level(330)
    token = next(t for word, t in ours.get_vocab().items() if word.startswith("æĹ"))
    text = {"æĹ": b"\xe6\x97", "æĹ¥": b"\xe6\x97\xa5"}[ours.id_to_token(token)]
    table = translate(ours, sentencepiece(), 330, 400)
    assert [sentencepiece().id_to_token(p) for p in spelling(table, token)] == [
        f"<0x{b:02X}>" for b in text
    ]
    assert translate(ours, unigram(), 330, 90).count[token] == 0


def test_special_tokens():
    """They are matched by their string or by a role that the caller names, never with ordinary
    text."""
    ours, theirs = byte_level(300, "<eot>"), byte_level()
    assert translate(ours, theirs, 300, 320).count[0] == 0
    table = translate(ours, theirs, 300, 320, [(0, 0)])
    assert (spelling(table, 0), table.to_draft[0]) == ([0], 0)
    table = translate(sentencepiece(), unigram(), 400, 90)
    assert [int(table.to_draft[t]) for t in range(3)] == [unigram().token_to_id(t) for t in SPECIAL]
    # Two EOS tokens of the target are one of the draft: both are read, and the first is proposed.
    table = translate(unigram(), theirs, 90, 320, [(2, 0), (1, 0)])
    assert (spelling(table, 1), spelling(table, 2), table.to_draft[2], table.to_draft[1]) == (
        [0],
        [0],
        0,
        -1,
    )


def test_the_start_of_texts():
    """A draft that reads <s> first gets it, unless the target writes a start of its own, which
    counts as it."""
    assert translate(byte_level(), sentencepiece(), 320, 400).start.tolist() == [1]
    assert translate(sentencepiece(), byte_level(), 400, 320).start.tolist() == []
    starting = tokenizers.Tokenizer.from_str(byte_level().to_str())
    starting.post_processor = processors.TemplateProcessing(
        single=f"{folders.END} $A", special_tokens=[(folders.END, 0)]
    )
    table = translate(starting, sentencepiece(), 320, 400)
    assert (table.start.tolist(), spelling(table, 0), table.to_draft[0]) == ([], [1], 1)


def test_the_end_of_an_overlong_token_is_kept():
    """At most `max_pieces` are kept, the last ones."""
    ours, _, whole = tables("byte-level", "fewer", max_pieces=100)
    _, _, cut = tables("byte-level", "fewer", max_pieces=2)
    assert whole.pieces.shape[1] > 2 == cut.pieces.shape[1]
    for token in range(ours.get_vocab_size()):
        assert spelling(cut, token) == spelling(whole, token)[-2:]


def test_ids_beyond_the_models_are_left_out():
    """Tokenizers may hold more ids than their models."""
    table = translate(byte_level(), sentencepiece(), 300, 270)
    assert table.to_draft.shape == (300,)
    assert max(table.to_draft.max(), table.pieces.max()) < 270


def test_expansion():
    """The mean number of pieces, rounded up."""
    _, _, table = tables("byte-level", "fewer")
    assert table.expansion == -(-table.count.sum() // (table.count > 0).sum()) == 2


@pytest.mark.parametrize("draft", [False, True])
def test_tokens_that_are_no_bytes_are_refused(draft):
    """WordPiece does not say where spaces are."""
    made = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "the": 1, "##re": 2}, unk_token="[UNK]")
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    with pytest.raises(
        ValueError, match="WordPiece tokenizer that is neither byte-level nor sentencepiece-style"
    ):
        translate(*((byte_level(), made) if draft else (made, byte_level())), 320, 320)
