"""Translates the tokens of one tokenizer into those of another, with tables that are made once.

Two tokens are equal if they stand for the same BYTES, even if the tokenizers spell them
differently:

    byte-level BPE    Ġthe        b" the"         <|endoftext|>   itself
    sentencepiece     ▁the        b" the"         </s>            itself
    byte fallback     <0xE6>      b"\\xe6"

The tokens in both vocabularies are the intersection of Timor et al. 2025, arXiv 2502.05202.  Each
other token of the target is spelt with several tokens of the draft, so the draft model can read it
but never proposes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable

import numpy as np
import tokenizers
from flax import struct
from jax import Array
from tqdm import tqdm

from specjax._internal.checks import items, shown, typed, whole
from specjax.text.rust import no_panic
from specjax.text.words import CHARACTER, SPACE, Words, is_fallback

_MOST = 2**24  # tokens
_LARGE = 20_000  # tokens to spell, from which on a progress bar is shown

_Table = Array | np.ndarray  # NumPy when it is made, and an Array on the device


@struct.dataclass
class Translation:
    """Tables with the ids of draft tokens; V is the target's vocabulary size.

    A token with `to_draft[v] >= 0` is spelt by that single token, so the draft model reads each of
    its own drafts as one token.
    """

    pieces: _Table  # [V, M] int32; the draft tokens that spell a target token, padded with 0
    count: _Table  # [V] int32; the number of pieces; 0 for a token that the draft cannot read
    to_draft: _Table  # [V] int32; the draft token that stands for the same bytes, or -1
    # [K] int32; the token that starts the draft's texts (BOS), if the target's texts have none.
    start: _Table

    @property
    def num_shared(self) -> int:
        """The number of tokens that can be proposed.  The tables must not be traced."""
        return int((np.asarray(self.to_draft) >= 0).sum())

    @property
    def expansion(self) -> int:
        """The draft tokens to reserve for a target token: the mean over the vocabulary, rounded up.

        The tables must not be traced.
        """
        counts = np.asarray(self.count)
        return math.ceil(counts[counts > 0].mean()) if counts.any() else 1


def translate(
    target: tokenizers.Tokenizer,
    draft: tokenizers.Tokenizer,
    target_size: int,
    draft_size: int,
    same: Iterable[tuple[int, int]] = (),
    max_pieces: int = 8,
) -> Translation:
    """Makes the tables between two tokenizers, as NumPy arrays.

    Args:
      target, draft: byte-level or sentencepiece-style tokenizers.
      target_size, draft_size: the models' vocabulary sizes, padding included.
      same: (target id, draft id) of special tokens that play the same role, such as EOS.  Other
        special tokens are paired if their strings are equal.
      max_pieces: the greatest M; a token that needs more pieces keeps its last ones.

    Raises:
      ValueError: a tokenizer whose tokens do not stand for bytes, or an argument of another kind.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> size = target.model.vocab_size
      >>> tables = specjax.translate(target.tokenizer, target.tokenizer, size, size)
      >>> tables.num_shared  # the tokens that can be drafted
      512
    """
    typed("a tokenizers.Tokenizer", tokenizers.Tokenizer, target=target, draft=draft)
    wanted = f"a whole number in [1, {_MOST}]"
    target_size = whole("target_size", target_size, 1, _MOST, wanted)
    draft_size = whole("draft_size", draft_size, 1, _MOST, wanted)
    max_pieces = whole("max_pieces", max_pieces, 1, 2**10, "a whole number in [1, 1024]")
    pairs = [_pair(pair) for pair in items(same) or ()]
    ours, theirs = _Vocabulary.read(target, target_size), _Vocabulary.read(draft, draft_size)
    to_ours, to_theirs = ours.canonical(), theirs.canonical()
    to_draft = np.full(target_size, -1, np.int32)
    spelt: dict[int, list[int]] = {}
    unknown: list[tuple[int, bytes]] = []
    for token, meaning in ours.meaning.items():
        twin = to_theirs.get(meaning)
        if twin is not None:
            spelt[token] = [twin]
            if to_ours[meaning] == token:
                to_draft[token] = twin
        elif isinstance(meaning, bytes):
            unknown.append((token, meaning))
    taken = set(to_draft.tolist())
    for token, twin in [*pairs, *zip(ours.start, theirs.start, strict=False)]:
        if token < target_size and twin < draft_size and to_draft[token] < 0:
            spelt[token] = [twin]
            if twin not in taken:
                to_draft[token] = twin
                taken.add(twin)
    quiet = None if len(unknown) > _LARGE else True
    for token, meaning in tqdm(
        unknown, desc="translating tokens", unit="token", disable=quiet, leave=False
    ):
        if token not in spelt:
            spelt[token] = theirs.spell(meaning, to_theirs)[-max_pieces:]

    count = np.zeros(target_size, np.int32)
    count[list(spelt)] = [len(pieces) for pieces in spelt.values()]
    pieces = np.zeros((target_size, max(1, count.max(initial=1))), np.int32)
    used = np.arange(pieces.shape[1]) < count[:, None]
    pieces[used] = [piece for token in sorted(spelt) for piece in spelt[token]]
    return Translation(
        pieces, count, to_draft, np.array([] if ours.start else theirs.start, np.int32)
    )


def _pair(pair: object) -> tuple[int, int]:
    """Returns a pair of `same`, checked."""
    ids = items(pair)
    if ids is None or len(ids) != 2:
        raise ValueError(f"same has {shown(pair)}; pass pairs (target id, draft id)")
    ours, theirs = (whole("same", each, 0, 2**31 - 1, "pairs of token ids") for each in ids)
    return ours, theirs


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The meaning of each token of a tokenizer: bytes, or a special token (a str)."""

    model: tokenizers.models.Model
    byte_level: bool
    meaning: dict[int, bytes | str]  # of several tokens with one meaning, the preferred is first
    start: list[int]  # the special token that the tokenizer puts before every text, if any

    @classmethod
    def read(cls, tokenizer: tokenizers.Tokenizer, size: int) -> _Vocabulary:
        words = Words(tokenizer)
        if not words.stand_for_bytes:
            kind = type(tokenizer.model).__name__
            raise ValueError(
                f"a {kind} tokenizer that is neither byte-level nor "
                "sentencepiece-style cannot be translated: its tokens do not stand for bytes"
            )
        # Byte-fallback tokens come last, since an ordinary token with the same bytes is preferred.
        order = sorted(
            tokenizer.get_vocab(with_added_tokens=True).items(),
            key=lambda item: (is_fallback(item[0]), item[1]),
        )
        meanings = ((n, words.meaning(token, n)) for token, n in order if n < size)
        start = [
            number
            for number in tokenizer.encode("").ids[:1]
            if words.is_special(number) and number < size
        ]
        return cls(tokenizer.model, words.byte_level, {n: m for n, m in meanings if m}, start)

    def canonical(self) -> dict[bytes | str, int]:
        """Returns the preferred token for each meaning."""
        preferred: dict[bytes | str, int] = {}
        for number, meaning in self.meaning.items():
            preferred.setdefault(meaning, number)
        return preferred

    def spell(self, text: bytes, known: dict[bytes | str, int]) -> list[int]:
        """Returns the tokens that spell `text`, or [] if there are none.

        They are the tokens of the tokenizer's model for `text`, or else one token for each byte.
        The normalizer and the pre-tokenizer are skipped: they would treat a part of a word as a
        whole word.
        """
        try:
            if self.byte_level:
                written = text.decode("latin-1").translate(CHARACTER)
            else:
                written = text.decode().replace(" ", SPACE)
            with no_panic("the draft's tokenizer cannot spell a token of the target"):
                pieces = [token.id for token in self.model.tokenize(written)]
        except UnicodeDecodeError:  # a part of a character
            pieces = []
        if b"".join(m for m in map(self.meaning.get, pieces) if isinstance(m, bytes)) == text:
            return pieces
        pieces = [known.get(bytes([byte]), -1) for byte in text]
        return [] if -1 in pieces else pieces


def token_bytes(tokenizer: tokenizers.Tokenizer, size: int) -> list[bytes | None]:
    """Returns the bytes of each of `size` tokens; None for special tokens and padding.

    Raises:
      ValueError: a tokenizer whose tokens do not stand for bytes.
    """
    written: list[bytes | None] = [None] * size
    for token, meaning in _Vocabulary.read(tokenizer, size).meaning.items():
        written[token] = meaning if isinstance(meaning, bytes) else None
    return written


def vocabulary_digest(tokenizer: tokenizers.Tokenizer) -> str:
    """Returns a hash that is equal for tokenizers that give the same tokens the same ids."""
    pairs = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
