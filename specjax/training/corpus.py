"""Text files, a tokenizer, and streams of token ids whose batches depend only on the step.

Every document is `<|endoftext|>` followed by its text, so that the token which starts a prompt also
ends a document.  A hash of its text decides whether a file is held out, so the split depends
neither on where the files are nor on the other files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tokenizers

from specjax.options.fields import REQUIRED, Options, count, option
from specjax.training.ordering import Rows, shuffled
from specjax.training.rows import has_rows, holds_conversations, read_texts
from specjax.training.shards import digest
from specjax.training.trees import Row

END_OF_TEXT = "<|endoftext|>"
_HELD_OUT_OF = 100  # one file in a hundred

LEAST = 1000
"""Characters of a single text whose end can be held out."""
_BLOCK = 1 << 22
"""Token ids that are read at a time."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of text: the files below `folders` that match `pattern`.

    Without a pattern these are the files of rows in a folder, or if it has none, all of its files
    that are not hidden.  Files in a folder whose name is in `exclude` are left out.
    """

    folders: tuple[str, ...]
    pattern: str | None = None
    exclude: tuple[str, ...] = ()
    max_bytes: int = 200_000
    column: str | None = None  # of files of rows
    conversations: tuple[str, ...] = ()  # files that hold no text, and are left out


@dataclasses.dataclass(frozen=True)
class TextOptions(Options):
    """The options that describe a source of text."""

    group = "data"

    data: tuple[str, ...] = option(
        REQUIRED,
        "folders or files: text of any ending, JSON lines, parquet, or datasets of Hugging Face",
    )
    pattern: str | None = option(
        None,
        "glob pattern of the files below a folder; by default its JSON lines, parquet and arrow "
        "files, or if it has none, all texts",
    )
    column: str | None = option(
        None,
        "column of such a file with a text or a conversation; default: messages, conversations, "
        "text or content",
    )
    exclude: tuple[str, ...] = option((), "names of folders to leave out")
    max_bytes: int = count(
        200_000, "bytes of the largest text that is read; larger ones are mostly tables"
    )

    @property
    def source(self) -> Source:
        return Source(self.data, self.pattern, self.exclude, self.max_bytes, self.column)


def read_documents(
    source: Source, tells: bool = True, cut: int | None = None
) -> Iterator[tuple[pathlib.Path, str]]:
    """Yields the distinct texts of a source, in sorted order: of a file, or of each row of a file.

    Binary, empty and large texts are skipped.  The number of large ones is printed if `tells`.  A
    file that is all of the data is read whatever its size.  Each text becomes two at the index
    `cut`.  In addition to the text that is read, a hash of 16 bytes of each text is in memory.

    Raises:
      ValueError: a folder does not exist, or a file holds conversations or a broken row.
    """
    seen: set[bytes] = set()
    count, largest = 0, (0, pathlib.Path())
    most = math.inf if is_one_file(source) else source.max_bytes
    for path, size, read in _texts(source, tells):
        if size > most:
            count, largest = count + 1, max(largest, (size, path))
        if not 0 < size <= most:
            continue
        raw = read()
        digest = hashlib.sha256(raw).digest()[:16]
        if digest in seen or b"\0" in raw:
            continue
        seen.add(digest)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if cut is None:
            yield path, text
        else:
            yield path, text[:cut]
            yield path / "end", text[cut:]
    if count and tells:
        size, path = largest
        print(
            f"texts larger than --max-bytes {source.max_bytes}, left out: {count} "
            f"(the largest is {path}, {size} bytes)",
            flush=True,
        )


def _texts(source: Source, tells: bool) -> Iterator[tuple[pathlib.Path, int, Callable[[], bytes]]]:
    """Returns the name and the size of each text of a source, and a function that reads it."""
    for path in files_of(source, tells):
        if str(path) in source.conversations:
            continue
        if not has_rows(path):
            yield path, path.stat().st_size, path.read_bytes
            continue
        if holds_conversations(path, source.column):
            raise ValueError(
                f"{path} holds conversations, which only a target's chat template turns into text: "
                "pass it to train.distill, or name a column of texts with --column"
            )
        for where, text in read_texts(path, source.column):
            raw = text.encode(errors="surrogatepass")  # half a pair is not UTF-8, and is skipped
            yield path / where, len(raw), functools.partial(bytes, raw)


def files_of(source: Source, tells: bool = True) -> list[pathlib.Path]:
    """Returns the files of a source.  If it `tells`, the files that are left out are counted aloud.

    Raises:
      ValueError: a folder does not exist.
    """
    found = []
    for root in map(pathlib.Path, source.folders):
        files = list(_below(root, source, source.pattern))
        rows = [path for path in files if has_rows(path)]
        if source.pattern is None and root.is_dir() and 0 < len(rows) < len(files):
            if tells:
                print(f"{root}: reading its {len(rows)} files of rows; --pattern reads others")
            files = rows
        found += files
    return found


def _below(root: pathlib.Path, source: Source, pattern: str | None) -> Iterator[pathlib.Path]:
    """The file `root`, or the files below it that match `pattern`; by default, all but hidden."""
    if not root.exists():
        raise ValueError(f"--data: {root} does not exist")
    for path in [root] if root.is_file() else sorted(root.rglob(pattern or "*")):
        parts = path.relative_to(root).parts
        hidden = pattern is None and any(part.startswith((".", "cache-")) for part in parts)
        excluded = any(part in source.exclude for part in parts[:-1])
        if path.is_file() and not excluded and not hidden:
            yield path


def is_one_file(source: Source) -> bool:
    """Returns whether the data is a single file of text."""
    paths = [pathlib.Path(folder) for folder in source.folders]
    return len(paths) == 1 and paths[0].is_file() and not has_rows(paths[0])


def where_to_cut(text: str) -> int | None:
    """Returns the index at which the held-out end of a single text begins.

    It is a twentieth of the text, from the first line that begins there; None: the text has less
    than `LEAST` characters.
    """
    if len(text) < LEAST:
        return None
    start = len(text) - len(text) // 20
    line = text.find("\n", start, len(text) - len(text) // 40)
    return start if line < 0 else line + 1


def too_few(source: Source, count: int) -> str:
    """Returns the error message for a source with too few texts, with the number of files."""
    large = sum(size > source.max_bytes for _, size, _ in _texts(source, tells=False))
    below = [path for root in source.folders for path in _below(pathlib.Path(root), source, "*")]
    endings = collections.Counter(path.suffix or "no ending" for path in below)
    asked = "" if source.pattern is None else f" match --pattern {source.pattern!r}"
    kinds = ", ".join(f"{number} of {ending}" for ending, number in endings.most_common(5))
    return (
        f"--data: {count} different UTF-8 texts{asked} below "
        f"{', '.join(source.folders)}; texts larger than --max-bytes {source.max_bytes}: {large}; "
        f"all files there: {kinds or 'none'}"
    )


def number_of(text: str) -> int:
    """Returns a number below 2^32 from the hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def holds_out(text: str) -> bool:
    """Returns whether a text is one of the hundredth part that is held out."""
    return number_of(text) % _HELD_OUT_OF == 0


def held_out_texts(texts: list[str]) -> set[str]:
    """Returns one text in a hundred, chosen by its hash, but at least one."""
    return {text for text in texts if holds_out(text)} or {min(texts, key=number_of)}


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE (arXiv 1508.07909) that prepends END_OF_TEXT to every text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


def end_of_text(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns the id of END_OF_TEXT, or None if the tokenizer has no such token."""
    return tokenizer.token_to_id(END_OF_TEXT)


def starts_of_documents(tokenizer: tokenizers.Tokenizer, isolate: bool) -> int | None:
    """Returns the id of the token that starts a document, or None unless documents are isolated."""
    start = end_of_text(tokenizer) if isolate else None
    if isolate and start is None:
        raise ValueError(
            f"--isolate-documents needs a tokenizer with {END_OF_TEXT}, which starts a document"
        )
    return start


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A stream of token ids on disk, cut into windows."""

    path: pathlib.Path
    dtype: type = np.uint16

    @functools.cached_property
    def ids(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r")

    @functools.cached_property
    def inputs(self) -> dict[str, str]:
        """Hashes of the tokenizer and of the text, by name."""
        return {"tokenizer": digest(self.path.parent / "tokenizer.json"), "text": digest(self.path)}

    def windows(self, length: int) -> int:
        """Returns the number of rows of this length in an epoch."""
        windows = (len(self.ids) - length - 1) // length
        if windows < 1:
            raise ValueError(
                f"{self.path} has {len(self.ids)} tokens: too few for a sequence of {length}; pass "
                f"more --data, or a --sequence-length of at most {max(1, (len(self.ids) - 1) // 2)}"
            )
        return windows

    def blocks(self) -> Iterator[np.ndarray]:
        """All token ids, in parts that fit into memory."""
        for first in range(0, len(self.ids), _BLOCK):
            yield np.asarray(self.ids[first : first + _BLOCK])

    def rows(self, length: int, seed: int) -> Rows:
        """Returns endless rows of `length` + 1 tokens: the inputs and, shifted by one, the labels.

        A row is a function of its number, so a resumed run reads the same ones as an uninterrupted
        run.  Each epoch cuts the stream into windows at another offset, and reads them in another
        order.
        """
        drawn, limit = np.zeros(length, np.float32), np.array(length, np.int32)

        def window(epoch: int, number: int) -> Row:
            start = number * length + shift(epoch)
            tokens = np.asarray(self.ids[start : start + length + 1], np.int32)
            return {"tokens": tokens, "drawn": drawn, "limit": limit}

        @functools.lru_cache(2)
        def shift(epoch: int) -> int:
            return int(np.random.default_rng((seed, epoch, 1)).integers(length))

        return shuffled(self.windows(length), seed, window)
