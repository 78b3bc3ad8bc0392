"""Records a target's outputs on disk, so that a draft learns without the target in memory.

    teacher.json          the request (hashes of the target and its tokenizer, settings, what is
                          recorded), counts, hashes of the files below, and whether the recording is
                          complete
    config.json, ...      the files of the target's folder without its weights
    shared.safetensors    with hidden states: the target's embedding, final norm and output matrix,
                          which drafters use
    00000.safetensors     a chunk of sequences: tokens [R, T + 1] int32; drawn [R, T] uint8 and
                          limit [R] int32, as in `Written`; the target's outputs for them (`Said`);
                          and the SHA-256 of all that in the file's metadata

First come the sequences of text, then those with answers, then those that are held out.  The
content of a chunk depends only on its number, so an interrupted call continues where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from tqdm import tqdm

from specjax._internal.checks import reworded, settle
from specjax.parallel import leader
from specjax.training import shards
from specjax.training.mesh import together
from specjax.training.ordering import Rows, batches, numbered, shuffled
from specjax.training.record import write as write_text
from specjax.training.shards import check_request, digest, read_if_whole, read_shard, save_shard
from specjax.training.trees import Row
from specjax.training.written import Written

MANIFEST = "teacher.json"
_HEADER = 4096
"""The most bytes of a chunk's file in addition to its arrays."""
_GB = 10**9
_OPEN = 64
"""Files that are open at a time."""

CANDIDATES = ("top_ids", "top_log_probs")
STATES = "states"

Said = Mapping[str, np.ndarray]
"""A target's outputs for tokens [R, T + 1]: of each next token `top_ids` [R, T, k] and
`top_log_probs` [R, T, k] float32, after temperature, top-k and top-p; and `states` [R, T, F], the
hidden states after the final norm, and those after each of the taps, as bits of bfloat16.
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of a recording.

    Attributes:
      hashes: `model_hashes` of the target, and the hashes of the data.
      settings: `temperature`, `top_k` and `top_p` of the log-probabilities.
      top: k; 0: no log-probabilities.
      dtype: type of the target's weights.
      isolate_documents: True if documents are read on their own.
      length: T, the tokens that are predicted in a sequence.
      chunk: the sequences of a file.
      vocab_size: V of the target.
      counts: the sequences of text, with answers, and held out.
      share: of the sequences with answers, if the sources were weighed; else None.
      hidden_size: E of the target if its hidden states are recorded, else 0.
      taps: the layers of these states in addition to the last.
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
    share: float | None = None
    hidden_size: int = 0
    taps: tuple[int, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Request:
        """Reads a request from a manifest; one of an earlier version has fewer fields."""
        counts, taps = tuple(fields["counts"]), tuple(fields.get("taps", ()))
        return cls(**{**fields, "counts": counts, "taps": taps})

    @property
    def ids_type(self) -> type:
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @property
    def state_size(self) -> int:
        """F, the numbers of a token's hidden states."""
        return self.hidden_size * (1 + len(self.taps))

    @property
    def row_bytes(self) -> int:
        """The bytes of a sequence."""
        width = np.dtype(self.ids_type).itemsize + 4
        token = self.top * width + 2 * self.state_size
        return 4 * (self.length + 1) + self.length + 4 + self.length * token

    @property
    def files(self) -> int:
        return -(-sum(self.counts) // self.chunk)

    def rows(self, number: int) -> range:
        """Returns the sequences of a chunk."""
        return range(number * self.chunk, min((number + 1) * self.chunk, sum(self.counts)))

    def bytes(self, number: int) -> int:
        """Returns the most bytes of a chunk's file."""
        return len(self.rows(number)) * self.row_bytes + _HEADER

    @property
    def _words(self) -> str:
        """Describes the recorded arrays of each token."""
        parts = [f"{self.top} log-probabilities"] * bool(self.top)
        layers = " ".join(map(str, self.taps))
        parts += [
            "the last hidden state" + f" and those of the layers {layers}" * bool(layers)
        ] * bool(self.hidden_size)
        return " and ".join(parts)


def write(
    folder: pathlib.Path,
    request: Request,
    rows: Rows,
    outputs: Callable[[np.ndarray], Said],
    files: Mapping[str, bytes],
) -> None:
    """Records a target's `outputs` for tokens [R, T + 1], or continues an unfinished recording.

    `rows` are the sequences of each chunk.  The recording gets the `files` of the target's folder,
    by name, without its weights; and of what drafters share.

    Raises:
      ValueError: the folder holds a recording of another request, or the disk is too small for the
        rest of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / MANIFEST, json.loads(json.dumps(dataclasses.asdict(request)))
    if path.exists():
        before = dataclasses.asdict(Request.read(read_manifest(folder)["request"]))
        check_request(folder, "recording", json.loads(json.dumps(before)), wanted)
    missing = [n for n in range(request.files) if not _file(folder, n).exists()]
    beside = sum(len(c) for name, c in files.items() if not (folder / name).exists())
    needed = sum(map(request.bytes, missing)) + beside
    whole = sum(map(request.bytes, range(request.files))) + sum(map(len, files.values()))
    free = shutil.disk_usage(folder).free
    print(
        f"{sum(request.counts)} sequences of {request.length} tokens, of each {request._words}: "
        f"{whole / _GB:.3f} GB, {needed / _GB:.3f} GB of it still to write",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed / _GB:.3f} GB more, and the disk has {free / _GB:.3f} GB: "
            "pass a smaller --top, fewer --sequences or layers, or another --out"
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
        if read_if_whole(file) is not None:
            continue
        made = rows[number]
        said = outputs(made["tokens"])
        if leader():
            arrays = {
                "tokens": made["tokens"].astype(np.int32),
                "drawn": made["drawn"].astype(np.uint8),
                "limit": made["limit"].astype(np.int32),
                **said,
            }
            if request.top:
                arrays["top_ids"] = said["top_ids"].astype(request.ids_type)
            save_shard(file, {name: np.ascontiguousarray(x) for name, x in arrays.items()})
    if leader():
        _describe(folder, wanted, files, complete=True)
    together(f"wrote {folder}")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the `teacher.json` of a recording."""
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} has no {MANIFEST}: make it with specjax train teacher")
    fields = {"request", "complete", "files"}
    return shards.read_manifest(folder / MANIFEST, "recording", fields, "record it")


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A complete recording, whose sequences are read when a batch needs them.

    Attributes:
      folder: of the recording.
      request: the request that it fulfils.
      hash: of all its chunks.
      names: the arrays that are read in addition to tokens and masks: `CANDIDATES`, or `STATES`.
      taps: the layers whose states are read, of those that were recorded.
    """

    folder: pathlib.Path
    request: Request
    hash: str
    names: Sequence[str] = CANDIDATES
    taps: tuple[int, ...] = ()

    @classmethod
    def open(cls, folder: pathlib.Path, names: Sequence[str] = CANDIDATES) -> Recorded:
        """Checks a recording: every byte of it is read once.

        Raises:
          ValueError: the recording is not complete, or lacks these arrays, or one of its files is
            missing or damaged.
        """
        manifest = read_manifest(folder)
        request = Request.read(manifest["request"])
        again = "run the train.teacher that made it again"
        none, cure = f"{folder} has no", "learn: record it again with"
        settle(
            (not manifest["complete"], f"{folder} is not complete: {again}"),
            (
                CANDIDATES[0] in names and not request.top,
                f"{none} log-probabilities, from which drafts {cure} --top 64",
            ),
            (
                STATES in names and not request.hidden_size,
                f"{none} hidden states, from which heads {cure} --drafters KIND",
            ),
            *(
                (
                    not (folder / name).exists() or digest(folder / name) != sha256,
                    f"{folder / name} is not what was written there: {again}",
                )
                for name, sha256 in manifest["files"].items()
            ),
        )
        whole = hashlib.sha256()
        for number in range(request.files):
            file, wanted = _file(folder, number), len(request.rows(number))
            with reworded("", f": delete it, and {again}"):
                found = len(read_shard(file)["tokens"])
                settle((found != wanted, f"{file} has another number of sequences"))
            whole.update(digest(file).encode())
        return cls(folder, request, whole.hexdigest(), names)

    def tapping(self, taps: tuple[int, ...]) -> Recorded:
        """Returns the recording with the states of these layers."""
        if not set(taps) <= set(self.request.taps):
            asked, there = (" ".join(map(str, x)) for x in (taps, self.request.taps))
            raise ValueError(
                f"{self.folder} has the hidden states of the layers {there or 'none'} beside the "
                f"last, and this drafter reads {asked}: record it again with --taps {asked}"
                + f", or let it read some of those (--taps {there})"
                * bool(there)
            )
        return dataclasses.replace(self, taps=taps)

    def batches(self, size: int, share: float, seed: int, whole: bool = False) -> Rows:
        """Returns the batches of a run by their steps; see `ordering.batches`.

        Each of the two kinds of sequences comes in an endless order, reshuffled every epoch.
        """
        text, answers, _ = self.request.counts
        parts = [
            shuffled(count, seed, lambda _, number, first=first: self.row(first + number))
            for first, count in ((0, text), (text, answers))
        ]
        return batches(parts[0], parts[1], size, share, whole=whole)

    def held_out(self, first: int, count: int) -> Row:
        """Returns held-out rows in order; after the last one comes the first."""
        text, answers, held = self.request.counts
        return self.rows([text + answers + n % held for n in range(first, first + count)])

    def held_out_rows(self) -> Written:
        """Returns all held-out sequences."""
        rows = dataclasses.replace(self, names=()).held_out(0, self.request.counts[2])
        return Written(rows["tokens"], rows["drawn"], rows["limit"])

    def rows(self, numbers: Sequence[int]) -> Row:
        """Returns the sequences of these numbers."""
        rows = numbered(lambda index: self.row(numbers[index]), len(numbers))
        return rows.batch(len(numbers))[0]

    def row(self, number: int, names: Sequence[str] | None = None) -> Row:
        """Returns a sequence with the arrays of `names`, by default those of the recording."""
        at, index = divmod(number, self.request.chunk)
        file = self._opened(_file(self.folder, at))
        wanted = ("tokens", "drawn", "limit", *(self.names if names is None else names))
        row: Row = {name: file.get_slice(name)[index] for name in wanted}
        row["drawn"] = row["drawn"].astype(np.float32)
        if "top_ids" in row:
            row["top_ids"] = row["top_ids"].astype(np.int32)
        if STATES in row:
            row[STATES] = self._tapped(row[STATES])
        return row

    def token_counts(self) -> np.ndarray:
        """Returns [V] how often each token is learned in sequences that are not held out."""
        size, text, answers = self.request.vocab_size, *self.request.counts[:2]
        counts = np.zeros(size, np.int64)
        for number in range(text + answers):
            row = self.row(number, ())
            labels, drawn = row["tokens"][1:], row["drawn"] > 0
            counts += np.bincount(labels[drawn] if drawn.any() else labels, minlength=size)
        return counts

    def _tapped(self, states: np.ndarray) -> np.ndarray:
        """Returns [T, F] bfloat16: the last hidden states, and those of `taps`."""
        size, there = self.request.hidden_size, self.request.taps
        layers = states.view(jnp.bfloat16).reshape(len(states), 1 + len(there), size)
        chosen = layers[:, [0, *(1 + there.index(tap) for tap in self.taps)]]
        return chosen.reshape(len(states), -1)

    @functools.cached_property
    def _opened(self) -> Callable[[pathlib.Path], Any]:
        return functools.lru_cache(_OPEN)(lambda path: safetensors.safe_open(path, "np"))


def _file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"{number:05d}.safetensors"


def _describe(
    folder: pathlib.Path, request: Mapping[str, object], files: Mapping[str, bytes], complete: bool
) -> None:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    facts = {"request": request, "files": hashes, "complete": complete}
    write_text(folder / MANIFEST, json.dumps(facts, indent=2) + "\n")
