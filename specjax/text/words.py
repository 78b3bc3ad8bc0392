"""The single tokens of a tokenizer: their bytes, their names, and whether they are special."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable

import tokenizers

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The fields of a tokenizer's files that name a special token, in every tokenizer."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
CHARACTER = {b: b for b in _PRINTABLE} | {
    b: 256 + n for n, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
"""GPT-2's alphabet: printable bytes stand for themselves, the others start at U+0100."""

_BYTE = {character: byte for byte, character in CHARACTER.items()}
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
SPACE = "▁"
"""The character that sentencepiece writes for a space."""


class Words:
    """The tokens of one tokenizer, byte-level, sentencepiece-style or of another kind."""

    def __init__(self, tokenizer: tokenizers.Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def _added(self) -> dict[int, bool]:
        """The tokens that were added to the vocabulary, and whether each is special."""
        if self._tokenizer is None:
            return {}
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: token.special for number, token in added.items()}

    @functools.cached_property
    def _parts(self) -> str:
        """The components of the tokenizer that change how a token is spelt, as JSON."""
        made = self._tokenizer
        parts = [] if made is None else [made.pre_tokenizer, made.decoder, made.normalizer]
        return "".join(part.__getstate__().decode() for part in parts if part is not None)

    @functools.cached_property
    def byte_level(self) -> bool:
        """True if tokens are spelt in GPT-2's alphabet of bytes."""
        return '"ByteLevel"' in self._parts

    @functools.cached_property
    def stand_for_bytes(self) -> bool:
        """True if the bytes of a token follow from its spelling."""
        return self.byte_level or SPACE in self._parts

    def meaning(self, token: str, number: int) -> bytes | str | None:
        """Returns the bytes of a token, or the name of a special one; None: neither.

        Args:
          token: as the vocabulary spells it.
          number: its id.
        """
        if number in self._added:
            return token if self._added[number] else token.encode()
        if not self.byte_level:
            if is_fallback(token):
                return bytes([int(token[3:5], 16)])
            return token.replace(SPACE, " ").encode()
        try:
            return token.translate(_BYTE).encode("latin-1")
        except UnicodeEncodeError:
            return None

    def is_special(self, token: int) -> bool:
        """Returns whether texts leave this token out, such as an EOS."""
        return self._added.get(token, False)

    def written(self, token: int) -> str | None:
        """Returns a token as the vocabulary spells it, or None for an id without a token."""
        return None if self._tokenizer is None else self._tokenizer.id_to_token(token)

    def writes(self, token: int) -> bool:
        """Returns whether a token adds to the text: it is known, and not special."""
        return self.written(token) is not None and not self.is_special(token)

    def is_byte(self, token: int) -> bool:
        """Returns whether a token is spelt as a single byte, as "<0x0A>"."""
        written = self.written(token)
        return written is not None and is_fallback(written)

    def bytes_of(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None for special tokens and ids without a token.

        A sentencepiece token keeps its leading space, which the first word of a text loses.
        """
        written = self.written(token)
        if written is None or self.is_special(token):
            return None
        if not self.stand_for_bytes:
            assert self._tokenizer is not None
            return self._tokenizer.decode([token]).encode()
        made = self.meaning(written, token)
        return made if isinstance(made, bytes) else None

    def name(self, token: int) -> str:
        r"""Returns the name of a token where no text surrounds it.

        It is its own text, or the name of a special token.  Bytes that are not UTF-8 are given as
        in OpenAI's API, "bytes:\xe4\xb8", and ids without a token as "token_id:7".
        """
        own = self.bytes_of(token)
        if own is None:
            written = self.written(token)
            return f"token_id:{token}" if written is None else written
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def characters(self, tokens: Iterable[int]) -> list[str]:
        """Returns the characters that each of the tokens completes, by their bytes."""
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        return [reader.decode(self.bytes_of(token) or b"") for token in tokens]


def is_fallback(token: str) -> bool:
    """Returns whether a token is spelt as a single byte, as "<0x0A>"."""
    return _FALLBACK.fullmatch(token) is not None
