"""Tokenises texts into files of token ids, as a stream: only a few texts are in memory.

    tokenizer.json     the tokenizer
    train.bin          the token ids of all texts but those that are held out
    held_out.bin       the token ids of these
    corpus.json        settings, counts and hashes, written last
    progress.json      until then: the division of the texts, and the hash of the tokenizer
    parts/             until then: token ids of a few texts, by the hash of these and the tokenizer

The texts are read once to divide them, once more if a tokenizer is trained on them, and once to be
tokenised.  An interrupted call keeps its finished parts.  Of a single text the end is held out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

from specjax._internal.checks import settle
from specjax.files import read_tokenizer
from specjax.parallel import leader
from specjax.training import corpus
from specjax.training.corpus import Source, Tokens
from specjax.training.mesh import together
from specjax.training.mixture import Mixture
from specjax.training.record import write
from specjax.training.shards import digest, read_if_whole, read_shard, save_shard

_WORDS, _PARTS = "tokenizer.json", ("train", "held_out")
_PROGRESS, _FOLDER = "progress.json", "parts"
_BATCH = 1 << 20
"""Characters that are tokenised at a time, into one part."""
Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Split:
    """The division of a source's texts, and their number."""

    count: int
    sha256: str  # of the hashes of the texts
    only: str | None  # the hash of the one text that is held out, if none is by its number
    cut: int | None = None  # the index at which a single text is divided into two

    @classmethod
    def of(cls, source: Source) -> _Split:
        """Reads all texts."""
        count, chosen, least, text, texts = 0, False, (2**32, ""), "", hashlib.sha256()
        for _, text in corpus.read_documents(source):
            count, chosen = count + 1, chosen or corpus.holds_out(text)
            texts.update(_hash(text).encode())
            least = min(least, (corpus.number_of(text), _hash(text)))
        if count == 1 and (cut := corpus.where_to_cut(text)) is not None:
            print(
                f"--data is one text of {len(text)} characters: its last {len(text) - cut} are "
                "held out for evaluation",
                flush=True,
            )
            both = _hash(text[:cut]), _hash(text[cut:])
            return cls(2, hashlib.sha256("".join(both).encode()).hexdigest(), both[1], cut)
        if count < 2:
            few = corpus.too_few(source, count)
            raise ValueError(
                f"{few}.  Training needs at least two texts, one of them held out, or one text of "
                f"at least {corpus.LEAST} characters, whose end is held out"
            )
        return cls(count, texts.hexdigest(), None if chosen else least[1])

    def texts(self, source: Source) -> Iterator[tuple[pathlib.Path, str]]:
        """Reads the texts of the divided source again."""
        return corpus.read_documents(source, tells=False, cut=self.cut)

    def part(self, text: str) -> str:
        held = corpus.holds_out(text) if self.only is None else _hash(text) == self.only
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
        write(file, _trained(sources, splits, vocab_size).to_str(pretty=True))
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


def _tokenise(source: Source, out: pathlib.Path, settings: Settings) -> None:
    """Writes the files of `out`, or continues them."""
    split = _begun(out, settings)
    if split is None:
        split = _Split.of(source)
        if settings["tokenizer"] is None:
            words = _trained([source], [split], settings["vocab_size"])
        else:
            words = read_tokenizer(settings["tokenizer"])
        write(out / _WORDS, words.to_str(pretty=True))
        facts = {"split": dataclasses.asdict(split), _WORDS: digest(out / _WORDS)}
        write(out / _PROGRESS, json.dumps({"settings": settings, **facts}))
    words, hashes = read_tokenizer(out / _WORDS), {_WORDS: digest(out / _WORDS)}
    (out / _FOLDER).mkdir(exist_ok=True)
    texts, parts, kept, held_out = hashlib.sha256(), [], 0, []
    count = 0
    for batch in _batches(split, source):
        key = hashlib.sha256(hashes[_WORDS].encode())
        for path, text in batch:
            key.update(_hash(text).encode())
            texts.update(_hash(text).encode())
            held_out += [str(path)] if split.part(text) == "held_out" else []
        parts.append(out / _FOLDER / f"{key.hexdigest()}.safetensors")
        if read_if_whole(parts[-1]) is None:
            save_shard(parts[-1], _ids(split, words, batch))
        else:
            kept += len(batch)
        count += len(batch)
    settle(
        (
            count != split.count,
            f"--data had {split.count} texts and now has {count}: it must not change while it is "
            f"tokenised.  Delete {out} and begin again",
        ),
        (
            count == split.count and texts.hexdigest() != split.sha256,
            f"--data has changed since {out} was begun: delete it to tokenise --data again",
        ),
    )
    if kept:
        print(f"{out}: {kept} of {count} texts were tokenised already", flush=True)
    tokens = {name: _join(parts, name, out / f"{name}.bin") for name in _PARTS}
    hashes |= {f"{name}.bin": digest(out / f"{name}.bin") for name in _PARTS}
    facts = {
        "settings": settings,
        "files": count,
        "tokens": tokens,
        "held_out": held_out,
        "sha256": hashes,
    }
    # Last: it says that the others are whole.
    write(out / "corpus.json", json.dumps(facts, indent=1))
    (out / _PROGRESS).unlink()
    shutil.rmtree(out / _FOLDER)


def _begun(out: pathlib.Path, settings: Settings) -> _Split | None:
    """Returns the division that an interrupted call made; None if none fits."""
    path = out / _PROGRESS
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_bytes())
        if facts["settings"] == settings and facts[_WORDS] == digest(out / _WORDS):
            return _Split(**facts["split"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # as if it did not fit
    print(f"{path} does not fit: --data is tokenised from the beginning", flush=True)
    return None


def _batches(split: _Split, source: Source) -> Iterator[list[tuple[pathlib.Path, str]]]:
    """Yields the texts, in lists of about `_BATCH` characters."""
    batch, size = [], 0
    bar = tqdm(split.texts(source), desc="tokenising", unit="text", total=split.count, disable=None)
    for path, text in bar:
        batch.append((path, text))
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ids(
    split: _Split, words: tokenizers.Tokenizer, batch: list[tuple[pathlib.Path, str]]
) -> dict[str, np.ndarray]:
    """Returns the token ids of some texts, by the file that they belong to."""
    texts, dtype = [text for _, text in batch], _dtype(words)
    found: dict[str, list[np.ndarray]] = {name: [np.zeros(0, dtype)] for name in _PARTS}
    for text, encoding in zip(texts, words.encode_batch(texts), strict=True):
        found[split.part(text)].append(np.array(encoding.ids, dtype))
    return {name: np.concatenate(ids) for name, ids in found.items()}


def _join(parts: list[pathlib.Path], name: str, file: pathlib.Path) -> int:
    """Writes the token ids of all parts into a file, and returns their number."""
    count = 0
    with open(file, "wb") as opened:
        for part in parts:
            ids = read_shard(part)[name]
            opened.write(ids.tobytes())
            count += len(ids)
        opened.flush()
        os.fsync(opened.fileno())  # they survive if the machine stops
    return count


def _trained(sources: list[Source], splits: list[_Split], vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a new tokenizer, for the texts that are not held out."""
    count = sum(split.count for split in splits)
    print(f"training a tokenizer of {vocab_size} tokens on {count} files", flush=True)

    def texts() -> Iterator[str]:
        for source, split in zip(sources, splits, strict=True):
            for _, text in split.texts(source):
                if split.part(text) == "train":
                    yield text

    return corpus.train_tokenizer(texts(), vocab_size)


def _check(out: pathlib.Path, manifest: pathlib.Path, settings: Settings) -> None:
    """Raises ValueError unless `out` was made with these settings, and is unchanged."""
    cure = f"delete {out} to tokenise --data again"
    try:
        facts = json.loads(manifest.read_bytes())
        before, hashes = dict(facts["settings"]), dict(facts["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} cannot be read ({error!r}): {cure}") from None
    settle(
        (
            before != settings,
            f"{manifest} was made with {before}, not with {settings}: choose another --out, or "
            "delete it",
        ),
        *(
            (
                not (out / name).exists() or digest(out / name) != sha256,
                f"{out / name} is not what was tokenised (its SHA-256 is not the one in "
                f"{manifest.name}): {cure}",
            )
            for name, sha256 in hashes.items()
        ),
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _dtype(tokenizer: tokenizers.Tokenizer) -> type:
    return np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
