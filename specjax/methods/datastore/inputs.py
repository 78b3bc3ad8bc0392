"""Tokenises texts, token lists and files into the tokens of a datastore."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np
import tokenizers
from tqdm import tqdm

from specjax._internal.checks import items, number, reworded, shown
from specjax.methods.datastore.lookup import DEPTH
from specjax.methods.datastore.sorting import SEPARATORS, bytes_to_build, token_dtype
from specjax.parallel import devices_of, require
from specjax.text import no_panic

Entry = str | pathlib.Path | Sequence[int] | np.ndarray
"""A text, a file, or a list of token ids."""

_RAW, _NUMPY = ".bin", ".npy"
_TRIED, _TRIED_BYTES = 32, 20_000  # files, and bytes of each, that predict the others
_KINDS = "pass texts, lists of token ids, or pathlib.Path of files"


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The predicted size of a datastore, before its corpus is tokenised."""

    tokens: int
    bytes: int  # of the datastore
    memory: int  # bytes, while it is built

    def __str__(self) -> str:
        return (
            f"about {self.tokens:,} tokens: {self.bytes / 1e6:,.1f} MB, "
            f"and {self.memory / 1e6:,.0f} MB of memory while it is built"
        )


def text_files(
    paths: Iterable[pathlib.Path], pattern: str = "*", exclude: Sequence[str] = ()
) -> list[pathlib.Path]:
    """Returns the files among `paths`, and those below its folders that match `pattern`.

    Files below a folder whose name is in `exclude` are left out.

    Raises:
      ValueError: a path does not exist, or there is no such file.
    """
    found: list[pathlib.Path] = []
    paths = list(paths)
    for root in paths:
        if not root.exists():
            raise ValueError(f"{root} does not exist; pass a file or a folder of files")
        for path in [root] if root.is_file() else sorted(root.rglob(pattern)):
            excluded = any(part in exclude for part in path.relative_to(root).parts[:-1])
            if path.is_file() and not excluded:
                found.append(path)
    if not found:
        raise ValueError(
            f"no file below {', '.join(map(str, paths))} matches {pattern!r}: pass another folder "
            "or pattern"
        )
    return found


def predict_size(
    entries: Sequence[Entry], tokenizer: tokenizers.Tokenizer | None, vocab_size: int
) -> Predicted:
    """Predicts the size of a datastore, from the sizes of its files and the tokens of some of them.

    Raises:
      ValueError: as `read_tokens`.
    """
    width = token_dtype(vocab_size).itemsize
    known = [_size(index, entry, width) for index, entry in enumerate(entries)]
    texts = [entry for entry, (_, is_text) in zip(entries, known, strict=True) if is_text]
    rate = 1.0
    if texts:
        step = max(len(texts) // _TRIED, 1)
        parts = [_beginning(entry) for entry in texts[::step][:_TRIED]]
        size = sum(len(part.encode()) for part in parts)
        rate = sum(len(_encode(part, tokenizer)) for part in parts) / max(size, 1)
    total = int(sum(size * (rate if is_text else 1) for size, is_text in known)) + len(known)
    return Predicted(total, (width + 4) * total, bytes_to_build(vocab_size) * total)


def check_fits(predicted: Predicted, capacity: int | None) -> None:
    """Raises ValueError if the corpus is too large for the capacity or for the machine's memory."""
    if capacity is not None and predicted.tokens > 1.25 * capacity:
        raise ValueError(
            f"the corpus has about {predicted.tokens:,} tokens, and capacity={capacity:,}: raise "
            "the capacity, or leave texts out"
        )
    require(
        predicted.memory,
        devices_of(None),
        f"building a datastore of about {predicted.tokens:,} tokens",
        "leave texts out, or build it on a machine with more memory",
    )


def read_tokens(
    entries: Sequence[Entry], tokenizer: tokenizers.Tokenizer | None, vocab_size: int
) -> np.ndarray:
    """Returns [DEPTH + T] tokens of all entries, with separators before, between and after them.

    Files that are not UTF-8 text are left out, as are empty ones; a progress line counts the rest.

    Raises:
      ValueError: an entry of another kind, a token outside the vocabulary, texts without a
        tokenizer, or no entry with a token.
    """
    dtype = token_dtype(vocab_size)
    separator = np.array([SEPARATORS[dtype]], dtype)
    parts, left_out = [np.repeat(separator, DEPTH)], 0
    for index, entry in enumerate(tqdm(entries, "tokenising", unit="text", disable=None)):
        ids = _ids(index, entry, tokenizer, vocab_size)
        if ids is None or len(ids) == 0:
            left_out += 1
            continue
        parts += [ids.astype(dtype), separator]
    if len(parts) == 1:
        count = f"all {left_out} texts are empty, or no UTF-8 text" if left_out else "no text"
        raise ValueError(f"the datastore would be empty ({count}): pass at least one text")
    return np.concatenate(parts)


def _ids(
    index: int, entry: Entry, tokenizer: tokenizers.Tokenizer | None, vocab_size: int
) -> np.ndarray | None:
    """Returns the tokens of an entry; None for a file that is not text."""
    if isinstance(entry, pathlib.Path):
        name = str(entry)
        if entry.suffix in (_RAW, _NUMPY):
            ids = _token_file(entry, vocab_size)
        else:
            text = _text(entry)
            return None if text is None else _encode(text, tokenizer)
    elif isinstance(entry, str):
        return _encode(entry, tokenizer)
    else:
        name, ids = f"text {index}", entry
        if not _is_tokens(entry):
            listed = items(entry)
            if listed is None or any(not isinstance(number(token), int) for token in listed):
                raise ValueError(f"{name} is {shown(entry)}; {_KINDS}")
            ids = np.array(listed, np.int64)
        ids = np.asarray(ids)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{name} has token ids from {ids.min()} to {ids.max()}, and the vocabulary has "
            f"{vocab_size}: tokenise it with this tokenizer"
        )
    return ids


def _token_file(path: pathlib.Path, vocab_size: int) -> np.ndarray:
    """Returns the tokens of `train.bin`, as `train.pretrain` writes it, or of a NumPy array."""
    if path.suffix == _RAW:
        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        if path.stat().st_size % dtype.itemsize:
            raise ValueError(f"{path} is not a file of {dtype.name} token ids: write it again")
        return np.fromfile(path, dtype)
    with reworded(f"{path} is not an array of token ids (", "): write it again"):
        ids = np.load(path, allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path} is {ids.dtype}{list(ids.shape)}; a file of tokens has one row of whole numbers"
        )
    return ids


def _encode(text: str, tokenizer: tokenizers.Tokenizer | None) -> np.ndarray:
    if tokenizer is None:
        raise ValueError("texts need a tokenizer: pass tokenizer=, or lists of token ids")
    with no_panic(f"the text {shown(text)}"):
        return np.array(tokenizer.encode(text).ids if text else [], np.int64)


def _text(path: pathlib.Path) -> str | None:
    raw = path.read_bytes()
    try:
        return None if b"\0" in raw else raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_tokens(entry: Entry) -> TypeGuard[np.ndarray]:
    return isinstance(entry, np.ndarray) and entry.ndim == 1 and entry.dtype.kind in "iu"


def _size(index: int, entry: Entry, width: int) -> tuple[int, bool]:
    """Returns the bytes of an entry and True, or the number of its tokens and False."""
    if isinstance(entry, pathlib.Path):
        size = entry.stat().st_size
        is_text = entry.suffix not in (_RAW, _NUMPY)
        return (size if is_text else size // width), is_text
    if isinstance(entry, str):
        return len(entry.encode(errors="replace")), True
    if not _is_tokens(entry) and items(entry) is None:
        raise ValueError(f"text {index} is {shown(entry)}; {_KINDS}")
    return len(entry), False


def _beginning(entry: Entry) -> str:
    if isinstance(entry, pathlib.Path):
        with open(entry, "rb") as file:
            return file.read(_TRIED_BYTES).decode("utf-8", "ignore")
    return entry[:_TRIED_BYTES] if isinstance(entry, str) else ""
