"""From the tokens of one tokenizer to those of another: static tables, made once from the two.

Tokens are compared by the BYTES that they stand for, whatever alphabet a tokenizer writes them in:

    byte-level BPE    Ġthe        b" the"         <|endoftext|>   itself
    sentencepiece     ▁the        b" the"         </s>            itself
    byte fallback     <0xE6>      b"\\xe6"

So far this is the intersection of the two vocabularies (Timor et al. 2025, arXiv 2502.05202); tokens outside
it are spelt in several of the other's tokens, so that a draft can at least read what it cannot propose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from flax import struct
from tqdm import tqdm

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_CHARACTER = {b: b for b in _PRINTABLE} | {
    b: 256 + n for n, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
_BYTE = {character: byte for byte, character in _CHARACTER.items()}
"""GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100."""

_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
_LARGE = 20_000


@struct.dataclass
class Translation:
    """The tables.  V is the target's vocabulary size; ids of the draft are what they hold.

    Law: a token with `to_draft[v] >= 0` is spelt by that token alone, so that what was proposed costs one to read.
    """

    pieces: Any  # [V, M] int32; what spells a target token, padded with 0
    count: Any  # [V] int32; how many pieces; 0 for what the draft cannot read
    to_draft: (
        Any  # [V] int32; the draft token that stands for the same bytes, -1 where there is none
    )
    start: (
        Any  # [K] int32; what the draft's texts begin with, where the target's begin with nothing
    )

    @property
    def num_shared(self) -> int:
        """Tokens that can be proposed.  Of concrete tables."""
        return int((np.asarray(self.to_draft) >= 0).sum())

    @property
    def expansion(self) -> int:
        """Draft tokens to reserve for a target token: the mean over the vocabulary, rounded up.  Of concrete tables."""
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
    """The tables between two tokenizers, as NumPy arrays.

    Args:
      target, draft: byte-level or sentencepiece-style.
      target_size, draft_size: of the models' vocabularies, padding included.
      same: (target id, draft id) of special tokens that play the same role, such as the ends of text.  Others go
        together where their strings are equal.
      max_pieces: M at most; of a token that needs more the last ones are kept.

    Raises:
      ValueError: a tokenizer whose tokens do not stand for bytes.
    """
    ours, theirs = _Vocabulary.read(target, target_size), _Vocabulary.read(draft, draft_size)
    to_ours, to_theirs = ours.canonical(), theirs.canonical()
    to_draft = np.full(target_size, -1, np.int32)
    spelt: dict[int, list[int]] = {}
    unknown = []
    for token, meaning in ours.meaning.items():
        found = to_theirs.get(meaning)
        if found is not None:
            spelt[token] = [found]
            if to_ours[meaning] == token:
                to_draft[token] = found
        elif isinstance(meaning, bytes):
            unknown.append((token, meaning))
    taken = set(to_draft.tolist())
    for token, found in [*same, *zip(ours.start, theirs.start, strict=False)]:
        if token < target_size and found < draft_size and to_draft[token] < 0:
            spelt[token] = [found]
            if found not in taken:
                to_draft[token] = found
                taken.add(found)
    quiet = None if len(unknown) > _LARGE else True
    for token, meaning in tqdm(
        unknown, desc="translating tokens", unit="token", disable=quiet, leave=False
    ):
        if token not in spelt:
            spelt[token] = theirs.spell(meaning, to_theirs)[-max_pieces:]

    count = np.zeros(target_size, np.int32)
    count[list(spelt)] = [len(pieces) for pieces in spelt.values()]
    pieces = np.zeros((target_size, max(1, count.max(initial=1))), np.int32)
    places = np.arange(pieces.shape[1]) < count[:, None]
    pieces[places] = [piece for token in sorted(spelt) for piece in spelt[token]]
    return Translation(
        pieces, count, to_draft, np.array([] if ours.start else theirs.start, np.int32)
    )


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """What the tokens of a tokenizer mean: bytes, or a special token (a str)."""

    model: Any
    byte_level: bool
    meaning: dict[int, bytes | str]  # in the order in which equal ones are preferred
    start: list[int]  # the special token that the tokenizer puts before every text, if any

    @classmethod
    def read(cls, tokenizer: tokenizers.Tokenizer, size: int) -> _Vocabulary:
        found = json.loads(tokenizer.to_str())
        parts = json.dumps(
            [found["pre_tokenizer"], found["decoder"], found["normalizer"]], ensure_ascii=False
        )
        byte_level = '"ByteLevel"' in parts
        if not byte_level and _SPACE not in parts:
            raise ValueError(
                f"a {found['model']['type']} tokenizer that is neither byte-level nor sentencepiece-style cannot be "
                "translated: its tokens do not stand for bytes"
            )
        special = {added["id"]: added["special"] for added in found["added_tokens"]}

        def meaning(token: str, number: int) -> bytes | str | None:
            if number in special:
                return token if special[number] else token.encode()
            if not byte_level:
                return _bytes_of(token)
            try:
                return token.translate(_BYTE).encode("latin-1")
            except UnicodeEncodeError:
                return None

        # Byte-fallback tokens come last: text is made of the ordinary ones.
        order = sorted(
            tokenizer.get_vocab(with_added_tokens=True).items(),
            key=lambda item: (_is_fallback(item[0]), item[1]),
        )
        meanings = ((number, meaning(token, number)) for token, number in order if number < size)
        start = [
            number
            for number in tokenizer.encode("").ids[:1]
            if special.get(number) and number < size
        ]
        return cls(tokenizer.model, byte_level, {number: m for number, m in meanings if m}, start)

    def canonical(self) -> dict[bytes | str, int]:
        """Of tokens that mean the same, the one to use."""
        found: dict[bytes | str, int] = {}
        for number, meaning in self.meaning.items():
            found.setdefault(meaning, number)
        return found

    def spell(self, text: bytes, known: dict[bytes | str, int]) -> list[int]:
        """The tokens that the tokenizer's model makes of `text`, or one a byte, or none.

        Past its normalizer and pre-tokenizer, which would take a part of a word for a whole one.
        """
        try:
            if self.byte_level:
                written = text.decode("latin-1").translate(_CHARACTER)
            else:
                written = text.decode().replace(" ", _SPACE)
            pieces = [token.id for token in self.model.tokenize(written)]
        except UnicodeDecodeError:  # a part of a character
            pieces = []
        if b"".join(m for m in map(self.meaning.get, pieces) if isinstance(m, bytes)) == text:
            return pieces
        pieces = [known.get(bytes([byte]), -1) for byte in text]
        return [] if -1 in pieces else pieces


def _is_fallback(token: str) -> bool:
    return _FALLBACK.fullmatch(token) is not None


def _bytes_of(token: str) -> bytes:
    """Of a sentencepiece token."""
    return (
        bytes([int(token[3:5], 16)]) if _is_fallback(token) else token.replace(_SPACE, " ").encode()
    )


def vocabulary_digest(tokenizer: tokenizers.Tokenizer) -> str:
    """Equal for tokenizers that give the same tokens the same ids."""
    pairs = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
