"""Tokenises texts into files of token ids, as a stream: only a few texts are in memory.

    tokenizer.json     the tokenizer
    train.bin          the token ids of all texts but those that are held out
    held_out.bin       the token ids of these
    corpus.json        settings, counts and hashes, written last
    progress.json      until then: the progress of the files, and the hashes of their contents

The texts are read once to divide them, once more if a tokenizer is trained on them, and once to be
tokenised.  An interrupted call keeps its finished texts.  Of a single text the end is held out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import tokenizers
from tqdm import tqdm

from specjax.files import read_tokenizer
from specjax.parallel import leader
from specjax.training.corpus import (
    LEAST,
    Source,
    Tokens,
    digest,
    holds_out,
    number_of,
    read_documents,
    too_few,
    train_tokenizer,
    where_to_cut,
)
from specjax.training.mesh import together
from specjax.training.mixture import Mixture
from specjax.training.record import write

_WORDS, _PARTS = "tokenizer.json", ("train", "held_out")
_BATCH = 1 << 20
"""Characters that are tokenised at a time."""
_SAVE = 1 << 26
"""Characters between two records of the progress."""


@dataclasses.dataclass(frozen=True)
class _Split:
    """The division of a source's texts, and their number."""

    count: int
    only: str | None  # the hash of the one text that is held out, if none is by its number
    cut: int | None = None  # the index at which a single text is divided into two

    @classmethod
    def of(cls, source: Source) -> _Split:
        """Reads all texts.

        Raises:
          ValueError: there are fewer than two, and no single text whose end can be held out.
        """
        count, chosen, least, text = 0, False, (2**32, ""), ""
        for _, text in read_documents(source):
            count, chosen = count + 1, chosen or holds_out(text)
            least = min(least, (number_of(text), _hash(text)))
        if count == 1 and (cut := where_to_cut(text)) is not None:
            print(
                f"--data is one text of {len(text)} characters: its last {len(text) - cut} are "
                "held out for evaluation",
                flush=True,
            )
            return cls(2, _hash(text[cut:]), cut)
        if count < 2:
            few = too_few(source, count)
            raise ValueError(
                f"{few}.  Training needs at least two texts, one of them held out, or one text of "
                f"at least {LEAST} characters, whose end is held out"
            )
        return cls(count, None if chosen else least[1])

    def texts(self, source: Source) -> Iterator[tuple[pathlib.Path, str]]:
        """Reads the texts of the divided source again."""
        return read_documents(source, tells=False, cut=self.cut)

    def part(self, text: str) -> str:
        held = holds_out(text) if self.only is None else _hash(text) == self.only
        return _PARTS[held]


def prepare(
    source: Source, out: pathlib.Path, vocab_size: int, tokenizer: str | None
) -> tuple[tokenizers.Tokenizer, Tokens, Tokens]:
    """Tokenises `source` into `out`, or reads the files that an earlier call wrote there.

    Returns:
      The tokenizer, the training tokens and the held-out tokens.

    Raises:
      ValueError: `out` was made with other settings, one of its files is damaged, or the source has
        fewer than two texts.
    """
    manifest = out / "corpus.json"
    settings = {
        "source": dataclasses.asdict(source),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
    }
    settings = json.loads(json.dumps(settings))  # JSON turns tuples into lists
    if leader() and manifest.exists():
        _check(out, manifest, settings)
    elif leader():
        out.mkdir(parents=True, exist_ok=True)
        _tokenise(source, out, settings)
    together(f"read {out}")
    loaded = read_tokenizer(out / _WORDS)
    dtype = _dtype(loaded)
    return loaded, Tokens(out / "train.bin", dtype), Tokens(out / "held_out.bin", dtype)


def prepare_all(
    source: Source,
    weights: tuple[float, ...],
    out: pathlib.Path,
    vocab_size: int,
    tokenizer: str | None,
) -> tuple[tokenizers.Tokenizer, Tokens | Mixture, Tokens | Mixture]:
    """Runs `prepare` for the folders of a source, which are mixed by weights if there are any.

    The parts are in folders of `out` by their number.  A new tokenizer is trained on all of them.
    """
    if not weights:
        return prepare(source, out, vocab_size, tokenizer)
    sources = [dataclasses.replace(source, folders=(folder,)) for folder in source.folders]
    file = out / _WORDS if tokenizer is None else pathlib.Path(tokenizer)
    if tokenizer is None and leader() and not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        splits = [_Split.of(each) for each in sources]
        _save_tokenizer(_trained(sources, splits, vocab_size), file)
    together(f"trained {file}")
    made = [
        prepare(each, out / str(number), vocab_size, str(file))
        for number, each in enumerate(sources)
    ]
    words, parts, tests = zip(*made, strict=True)
    first, *others = [digest(out / str(number) / _WORDS) for number in range(len(made))]
    if any(other != first for other in others):
        raise ValueError(
            f"the parts of {out} have different tokenizers: delete it to tokenise --data again"
        )
    return words[0], Mixture(parts, weights), Mixture(tests, weights)


def _tokenise(source: Source, out: pathlib.Path, settings: dict[str, Any]) -> None:
    """Writes the files of `out`, or continues them."""
    progress = _Progress.read(out, settings)
    if progress is None:
        split = _Split.of(source)
        if settings["tokenizer"] is None:
            words = _trained([source], [split], settings["vocab_size"])
        else:
            words = read_tokenizer(settings["tokenizer"])
        _save_tokenizer(words, out / _WORDS)
        progress = _Progress(out, settings, split, {_WORDS: digest(out / _WORDS)})
    words = read_tokenizer(out / _WORDS)
    dtype, done = _dtype(words), progress.documents
    documents = progress.split.texts(source)
    if done:
        print(f"{out}: {done} of {progress.split.count} texts are tokenised already", flush=True)
    batch: list[tuple[str, str]] = []
    waiting = since = 0
    with progress.files() as files:
        bar = tqdm(
            documents, desc="tokenising", unit="text", total=progress.split.count, disable=None
        )
        for number, (path, text) in enumerate(bar):
            if number < done:
                progress.passed(text)
                if number == done - 1:
                    progress.check_passed()
                continue
            batch.append((str(path), text))
            waiting += len(text)
            if waiting < _BATCH:
                continue
            progress.add(words, batch, dtype, files)
            since, waiting, batch = since + waiting, 0, []
            if since >= _SAVE:
                progress.save(files)
                since = 0
        progress.add(words, batch, dtype, files)
        progress.save(files)
    if progress.documents != progress.split.count:
        raise ValueError(
            f"--data had {progress.split.count} texts and now has {progress.documents}: it must "
            f"not change while it is tokenised.  Delete {out} and begin again"
        )
    facts = {
        "settings": settings,
        "files": progress.documents,
        "tokens": progress.tokens,
        "held_out": progress.held_out,
        "sha256": progress.hashes(),
    }
    # Last: it says that the others are whole.
    write(out / "corpus.json", json.dumps(facts, indent=1))
    progress.path.unlink()


class _Files:
    """The two files of token ids, with the hashes of their contents."""

    def __init__(self, out: pathlib.Path, sizes: dict[str, int]) -> None:
        self.open: dict[str, BinaryIO] = {}
        self.hashes = {part: hashlib.sha256() for part in _PARTS}
        for part in _PARTS:
            path = out / f"{part}.bin"
            path.touch()
            file = open(path, "r+b")
            file.truncate(sizes[part])
            while block := file.read(1 << 20):
                self.hashes[part].update(block)
            self.open[part] = file

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.open.values():
            file.close()

    def write(self, part: str, content: bytes) -> None:
        self.open[part].write(content)
        self.hashes[part].update(content)

    def sync(self) -> None:
        """Flushes the files to disk, so that their contents survive if the machine stops."""
        for file in self.open.values():
            file.flush()
            os.fsync(file.fileno())


class _Progress:
    """The progress of the tokenisation."""

    def __init__(
        self,
        out: pathlib.Path,
        settings: dict[str, Any],
        split: _Split,
        sha256: dict[str, str],
        facts: dict[str, Any] | None = None,
    ) -> None:
        facts = facts or {}
        self.path, self.out, self.settings, self.split = (
            out / "progress.json", out, settings, split
        )  # fmt: skip
        self.documents: int = facts.get("documents", 0)
        self.tokens: dict[str, int] = facts.get("tokens", dict.fromkeys(_PARTS, 0))
        self.held_out: list[str] = facts.get("held_out", [])
        self._sizes: dict[str, int] = facts.get("bytes", dict.fromkeys(_PARTS, 0))
        self._sha256, self._read = dict(sha256), hashlib.sha256()
        self._wanted: str = facts.get("texts", "")

    @classmethod
    def read(cls, out: pathlib.Path, settings: dict[str, Any]) -> _Progress | None:
        """Reads the progress of an interrupted call; None if none fits."""
        path = out / "progress.json"
        if not path.exists():
            return None
        try:
            facts = json.loads(path.read_bytes())
            made = cls(out, settings, _Split(*facts["split"]), facts["sha256"], facts)
            if facts["settings"] == settings and made._whole():
                return made
        except (OSError, ValueError, KeyError, TypeError):
            pass  # as if it did not fit
        print(f"{path} does not fit: --data is tokenised from the beginning", flush=True)
        path.unlink()
        return None

    def _whole(self) -> bool:
        """Returns whether the files have the recorded contents; later bytes are cut off."""
        if any((self.out / f"{part}.bin").stat().st_size < self._sizes[part] for part in _PARTS):
            return False
        with self.files() as files:
            found = {f"{part}.bin": files.hashes[part].hexdigest() for part in _PARTS}
        return {_WORDS: digest(self.out / _WORDS), **found} == self._sha256

    def files(self) -> _Files:
        return _Files(self.out, self._sizes)

    def passed(self, text: str) -> None:
        """Records a text that is tokenised already."""
        self._read.update(_hash(text).encode())

    def check_passed(self) -> None:
        """Raises ValueError if the texts before this one are not those that were tokenised."""
        if self._read.hexdigest() != self._wanted:
            raise ValueError(
                f"--data has changed since {self.out} was begun: delete it to tokenise --data again"
            )

    def add(
        self,
        words: tokenizers.Tokenizer,
        batch: list[tuple[str, str]],
        dtype: type,
        files: _Files,
    ) -> None:
        """Tokenises some texts, each with its name."""
        encoded = words.encode_batch([text for _, text in batch])
        for (path, text), encoding in zip(batch, encoded, strict=True):
            part, ids = self.split.part(text), np.array(encoding.ids, dtype)
            files.write(part, ids.tobytes())
            self.tokens[part] += len(ids)
            self._sizes[part] += ids.nbytes
            if part == "held_out":
                self.held_out.append(path)
            self.passed(text)
        self.documents += len(batch)

    def save(self, files: _Files) -> None:
        files.sync()
        for part in _PARTS:
            self._sha256[f"{part}.bin"] = files.hashes[part].hexdigest()
        facts = {
            "settings": self.settings,
            "split": dataclasses.astuple(self.split),
            "documents": self.documents,
            "texts": self._read.hexdigest(),
            "tokens": self.tokens,
            "bytes": self._sizes,
            "held_out": self.held_out,
            "sha256": self._sha256,
        }
        write(self.path, json.dumps(facts))

    def hashes(self) -> dict[str, str]:
        return self._sha256


def _trained(sources: list[Source], splits: list[_Split], vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a new tokenizer, for the texts that are not held out."""
    count = sum(split.count for split in splits)
    print(f"training a tokenizer of {vocab_size} tokens on {count} files", flush=True)

    def texts() -> Iterator[str]:
        for source, split in zip(sources, splits, strict=True):
            for _, text in split.texts(source):
                if split.part(text) == "train":
                    yield text

    return train_tokenizer(texts(), vocab_size)


def _save_tokenizer(tokenizer: tokenizers.Tokenizer, path: pathlib.Path) -> None:
    write(path, tokenizer.to_str(pretty=True))


def _check(out: pathlib.Path, manifest: pathlib.Path, settings: dict[str, Any]) -> None:
    """Raises ValueError unless `out` was made with these settings, and is unchanged."""
    before, hashes = _read_manifest(manifest)
    if before != settings:
        raise ValueError(
            f"{manifest} was made with {before}, not with {settings}: "
            "choose another --out, or delete it"
        )
    for name, sha256 in hashes.items():
        if not (out / name).exists() or digest(out / name) != sha256:
            raise ValueError(
                f"{out / name} is not what was tokenised (its SHA-256 is not the one in "
                f"{manifest.name}): delete {out} to tokenise --data again"
            )


def _read_manifest(path: pathlib.Path) -> tuple[dict[str, object], dict[str, str]]:
    """Returns the settings and the hashes in `corpus.json`.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        facts = json.loads(path.read_bytes())
        return dict(facts["settings"]), dict(facts["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}): delete {path.parent} to tokenise --data again"
        ) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _dtype(tokenizer: tokenizers.Tokenizer) -> type:
    return np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
