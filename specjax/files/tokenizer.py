"""Reads the tokenizer of a folder.

Some damaged files make the tokenizers library panic, or allocate without end.  So a tokenizer is
first built and used in a process with limits.
"""

from __future__ import annotations

import hashlib
import os
import pathlib

import tokenizers

from specjax.files.folder import read_bytes
from specjax.files.hub import SLOW_TOKENIZER
from specjax.text import ask, no_panic

_CURE = "download it again, or write it anew with transformers"

_tried: set[bytes] = set()
"""Digests of the files that were built without harm."""


def read_tokenizer(path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, with truncation and padding switched off.

    The file may hold settings for both, left over from an earlier call of the tokenizer.  They
    would silently cut or pad a prompt.  transformers ignores them as well, unless a call sets them.

    Raises:
      ValueError: the file is not a tokenizer, or building it takes too long or too much memory.
      OSError: it is missing or cannot be read.
    """
    content = read_bytes(pathlib.Path(path))
    digest = hashlib.sha256(content).digest()
    if digest not in _tried:
        answer = ask("tokenizers", f"the tokenizer {path}", _CURE, content)
        if "refused" in answer:
            raise ValueError(f"{path} is not a tokenizer: {answer['refused']}; {_CURE}")
        _tried.add(digest)
    with no_panic(f"{path} is not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def find_tokenizer(folder: pathlib.Path, vocab_size: int) -> tokenizers.Tokenizer | None:
    """The tokenizer of a model's folder, if it has one.

    Raises:
      ValueError: as `read_tokenizer`; it is in an older format, or that of another model.
      OSError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        old = [name for name in SLOW_TOKENIZER if (folder / name).exists()]
        if old:
            raise ValueError(
                f"{folder} has a tokenizer in an older format ({', '.join(old)}) and no "
                "tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        return None
    tokenizer = read_tokenizer(path)
    # Added tokens may be outside the embedding (Gemma 3's image token is); `generate` refuses their
    # ids.
    greatest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if greatest >= vocab_size:
        raise ValueError(
            f"{path} has token ids up to {greatest}, and the embedding only {vocab_size} rows: it "
            "is the tokenizer of another model"
        )
    return tokenizer
