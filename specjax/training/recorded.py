"""What a target says about a data set, on disk: a draft then learns without the target in memory.

    teacher.json          the request (hashes of the target and its tokenizer, settings, k), counts,
                          hashes of the files below, and whether the recording is complete
    config.json, ...      the files of the target's folder without its weights
    00000.safetensors     a chunk of sequences: tokens [R, T + 1] int32; drawn [R, T] uint8 and
                          limit [R] int32, as in `Written`; of each next token top_ids [R, T, k] and
                          top_log_probs [R, T, k] float32, after temperature, top-k and top-p; and
                          the SHA-256 of all that in the file's metadata

First come the sequences of text, then those with answers, then those that are held out.  The
content of a chunk depends on its number alone, so an interrupted call continues where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors
from tqdm import tqdm

from specjax.files import read_json
from specjax.parallel import leader
from specjax.training.corpus import digest
from specjax.training.mesh import together
from specjax.training.record import write as write_text
from specjax.training.shards import read_shard, save_shard
from specjax.training.sources import TARGET, TEXT, MixOptions, sources
from specjax.training.written import Written, shuffled

MANIFEST = "teacher.json"
_HEADER = 4096
"""The most bytes that a file of a chunk has beside its arrays."""
_GB = 10**9
_OPEN = 64
"""Files that are open at a time."""

Outputs = tuple[np.ndarray, np.ndarray]
"""top_ids and top_log_probs [R, T, k] of tokens [R, T + 1]."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is recorded.

    Attributes:
      hashes: `model_hashes` of the target, and the hashes of the data.
      settings: `temperature`, `top_k` and `top_p` of the log-probabilities.
      top: k.
      dtype: type of the target's weights.
      isolate_documents: were documents read on their own?
      length: T, the tokens that are predicted in a sequence.
      chunk: the sequences of a file.
      vocab_size: V of the target.
      counts: the sequences of text, with answers, and held out.
    """

    hashes: dict[str, str]
    settings: dict[str, float]
    top: int
    dtype: str
    isolate_documents: bool
    length: int
    chunk: int
    vocab_size: int
    counts: tuple[int, int, int]

    @property
    def ids_type(self) -> type:
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @property
    def files(self) -> int:
        return -(-sum(self.counts) // self.chunk)

    def rows(self, number: int) -> range:
        """The sequences of a chunk."""
        return range(number * self.chunk, min((number + 1) * self.chunk, sum(self.counts)))

    def bytes(self, number: int) -> int:
        """The most bytes of a chunk's file."""
        width = np.dtype(self.ids_type).itemsize + 4
        row = 4 * (self.length + 1) + self.length + 4 + self.length * self.top * width
        return len(self.rows(number)) * row + _HEADER


def write(
    folder: pathlib.Path,
    request: Request,
    rows: Callable[[int], Written],
    outputs: Callable[[np.ndarray], Outputs],
    files: Mapping[str, bytes],
) -> None:
    """Record a target, or continue an unfinished recording.

    Args:
      folder: created if needed.
      request: what is recorded.
      rows: the sequences of chunk `number`.
      outputs: what the target says about tokens [R, T + 1].
      files: of the target's folder, by name, without its weights.

    Raises:
      ValueError: the folder holds a recording of another request, or the disk is too small for the
        rest of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / MANIFEST, json.loads(json.dumps(dataclasses.asdict(request)))
    if path.exists() and (before := read_manifest(folder)["request"]) != wanted:
        changes = [
            f"{name} was {before.get(name)} and is {wanted[name]}"
            for name in wanted
            if before.get(name) != wanted[name]
        ]
        raise ValueError(
            f"{folder} holds a recording of another request:\n  "
            + "\n  ".join(changes)
            + "\nchoose another folder, or delete it"
        )
    missing = [n for n in range(request.files) if not _file(folder, n).exists()]
    needed, free = sum(map(request.bytes, missing)), shutil.disk_usage(folder).free
    print(
        f"{sum(request.counts)} sequences of {request.length} tokens, {request.top} "
        f"log-probabilities each: {sum(map(request.bytes, range(request.files))) / _GB:.3f} GB, "
        f"{needed / _GB:.3f} GB of it still to write",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed / _GB:.3f} GB more, and the disk has {free / _GB:.3f} GB: "
            "pass a smaller --top or fewer --sequences, or another --out"
        )
    if leader():
        for name, content in files.items():
            (folder / name).write_bytes(content)
        _describe(folder, wanted, files, complete=False)
    bar = tqdm(
        range(request.files), desc="the target reads", unit="chunk",
        disable=None if leader() else True,
    )  # fmt: skip
    for number in bar:
        file = _file(folder, number)
        if file.exists():
            try:
                read_shard(file)
                continue
            except ValueError as error:
                print(f"{error}; it is written again", flush=True)
        made = rows(number)
        ids, log_probs = outputs(made.tokens)
        if leader():
            arrays = {
                "tokens": made.tokens.astype(np.int32),
                "drawn": made.drawn.astype(np.uint8),
                "limit": made.limit.astype(np.int32),
                "top_ids": ids.astype(request.ids_type),
                "top_log_probs": log_probs.astype(np.float32),
            }
            save_shard(file, {name: np.ascontiguousarray(x) for name, x in arrays.items()})
    if leader():
        _describe(folder, wanted, files, complete=True)
    together(f"wrote {folder}")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The `teacher.json` of a recording.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} has no {MANIFEST}: make it with python -m train.teacher")
    manifest = read_json(folder / MANIFEST)
    if not {"request", "complete", "files"} <= set(manifest):
        raise ValueError(
            f"{folder / MANIFEST} is not the description of a recording: bring it back from a "
            f"copy, or delete {folder} and record it again"
        )
    return manifest


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A complete recording, whose sequences are read when a batch needs them."""

    folder: pathlib.Path
    request: Request
    hash: str  # of all its chunks

    @classmethod
    def open(cls, folder: pathlib.Path) -> Recorded:
        """Check a recording: every byte of it is read once.

        Raises:
          ValueError: it is not complete, or one of its files is missing or damaged.
        """
        manifest = read_manifest(folder)
        fields = dict(manifest["request"])
        request = Request(**{**fields, "counts": tuple(fields["counts"])})
        again = "run the train.teacher that made it again"
        if not manifest["complete"]:
            raise ValueError(f"{folder} is not complete: {again}")
        for name, sha256 in manifest["files"].items():
            if not (folder / name).exists() or digest(folder / name) != sha256:
                raise ValueError(f"{folder / name} is not what was written there: {again}")
        whole = hashlib.sha256()
        for number in range(request.files):
            file = _file(folder, number)
            try:
                arrays = read_shard(file)
            except ValueError as error:
                raise ValueError(f"{error}: delete it, and {again}") from None
            if len(arrays["tokens"]) != len(request.rows(number)):
                raise ValueError(f"{file} has another number of sequences: delete it, and {again}")
            whole.update(digest(file).encode())
        return cls(folder, request, whole.hexdigest())

    def batch(self, options: MixOptions, step: int) -> dict[str, np.ndarray]:
        """The rows of a step, as those of `sources.mixed_rows`, with `top_ids` and `top_log_probs`.

        Each of the two kinds of sequences comes in an endless order, reshuffled every epoch.
        """
        text, answers, _ = self.request.counts
        first, counts = sources(options, step)
        numbers = [
            *(shuffled(n, text, options.seed) for n in _range(first[TEXT], counts[TEXT])),
            *(
                text + shuffled(n, answers, options.seed)
                for n in _range(first[TARGET], counts[TARGET])
            ),
        ]
        made = self.rows(numbers)
        made["drawn"] = made["drawn"].astype(np.float32)
        rows = options.batch_size
        return {**made, "number": step * rows + np.arange(rows, dtype=np.int32)}

    def held_out(self, first: int, count: int) -> dict[str, np.ndarray]:
        """Held-out rows in order; after the last one comes the first."""
        text, answers, held = self.request.counts
        made = self.rows([text + answers + n % held for n in _range(first, count)])
        return {**made, "drawn": made["drawn"].astype(np.float32)}

    def rows(self, numbers: list[int]) -> dict[str, np.ndarray]:
        """The sequences of these numbers."""
        found = [self._row(number) for number in numbers]
        stacked = {name: np.stack([row[name] for row in found]) for name in found[0]}
        return {**stacked, "top_ids": stacked["top_ids"].astype(np.int32)}

    def _row(self, number: int) -> dict[str, np.ndarray]:
        at, row = divmod(number, self.request.chunk)
        file = self._opened(_file(self.folder, at))
        return {name: file.get_slice(name)[row] for name in file.keys()}

    @functools.cached_property
    def _opened(self) -> Callable[[pathlib.Path], Any]:
        return functools.lru_cache(_OPEN)(lambda path: safetensors.safe_open(path, "np"))


def _range(first: int, count: int) -> range:
    return range(first, first + count)


def _file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"{number:05d}.safetensors"


def _describe(
    folder: pathlib.Path, request: Mapping[str, object], files: Mapping[str, bytes], complete: bool
) -> None:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    facts = {"request": request, "files": hashes, "complete": complete}
    write_text(folder / MANIFEST, json.dumps(facts, indent=2) + "\n")
