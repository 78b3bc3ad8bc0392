"""A datastore as a folder: `datastore.safetensors`, and `datastore.json` that describes it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from specjax.files import find_folder, read_json
from specjax.methods.datastore.lookup import DEPTH
from specjax.methods.datastore.record import Datastore

DESCRIPTION, ARRAYS = "datastore.json", "datastore.safetensors"
_FORMAT, _CURE = "specjax datastore 1", "build the datastore again"
_DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I32": np.dtype("<i4")}


def save_datastore(folder: str | os.PathLike[str], store: Datastore) -> None:
    """Writes a datastore; a folder that holds one is replaced.

    Raises:
      OSError: the folder cannot be written.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> store = specjax.Datastore.build(["import os\\n", "import sys\\n"], target)
      >>> specjax.save_datastore("store", store)
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / DESCRIPTION).unlink(missing_ok=True)  # a folder without it is not whole
    new = path / f"{ARRAYS}.new"
    arrays = {"tokens": store.tokens, "order": store.order, "starts": store.starts}
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, new)
    os.replace(new, path / ARRAYS)
    facts = {
        "format": _FORMAT,
        "tokens": store.size,
        "capacity": store.capacity,
        "vocab_size": store.vocab_size,
        "vocabulary": store.vocabulary,
        "sha256": _digest(path / ARRAYS),
    }
    (path / DESCRIPTION).write_text(json.dumps(facts, indent=1) + "\n")


def describe_datastore(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the description of a datastore, without reading its arrays.

    Raises:
      ValueError: the folder is not a datastore, or its description is damaged.
      OSError: it cannot be read.
    """
    path = find_folder(str(folder)) / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: {path.parent} is no datastore, or not whole; make one with "
            "specjax datastore build"
        )
    facts = dict(read_json(path))
    wanted = {"tokens": int, "capacity": int, "vocab_size": int, "sha256": str}
    if facts.get("format") != _FORMAT:
        raise ValueError(f"{path}: format is {facts.get('format')!r}, not {_FORMAT!r}; {_CURE}")
    for name, kind in wanted.items():
        value = facts.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or value in (0, ""):
            raise ValueError(f"{path}: {name} is {value!r}; {_CURE}")
    if not isinstance(facts.get("vocabulary"), str | None):
        raise ValueError(f"{path}: vocabulary is {facts['vocabulary']!r}; {_CURE}")
    return facts


def load_datastore(folder: str | os.PathLike[str], capacity: int | None = None) -> Datastore:
    """Reads a datastore.  Its arrays are mapped from the file, and not copied.

    Args:
      folder: a folder of `save_datastore` or `specjax datastore build`, or org/name on the Hub.
      capacity: the most tokens that the loaded one can hold; by default the one it was built with.

    Raises:
      ValueError: it is not a datastore, is damaged, or has more tokens than the capacity.
      OSError: it cannot be read.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> specjax.save_datastore("store", specjax.Datastore.build(["import os\\n"], target))
      >>> store = specjax.load_datastore("store")
      >>> store.drafter(target, num_drafts=4).proposer.max_depth
      4
    """
    path = find_folder(str(folder))
    facts, file = describe_datastore(path), path / ARRAYS
    if _digest(file) != facts["sha256"]:
        raise ValueError(
            f"{file} is damaged (its SHA-256 is not the one in {DESCRIPTION}): {_CURE}"
        )
    arrays = _map(file)
    tokens, order, starts = arrays["tokens"], arrays["order"], arrays["starts"]
    shapes = len(tokens) - DEPTH, len(starts) - 1
    if shapes != (facts["tokens"], facts["vocab_size"]) or len(order) != starts[-1]:
        raise ValueError(f"{file} does not fit {DESCRIPTION}: {_CURE}")
    made = Datastore(tokens, order, starts, facts["capacity"], facts["vocabulary"], name=path.name)
    most = made.capacity if capacity is None else capacity
    if made.size > most:
        raise ValueError(
            f"{path} has {made.size:,} tokens, and capacity={most:,}: raise the capacity"
        )
    return dataclasses.replace(made, capacity=most)


def _map(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of the file by name, as views of it."""
    try:
        with safetensors.safe_open(file, "np") as opened:  # checks the header against the length
            names = set(opened.keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or truncated ({error}): {_CURE}") from None
    if names != {"tokens", "order", "starts"}:
        raise ValueError(f"{file} holds {', '.join(sorted(names)) or 'nothing'}: {_CURE}")
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    arrays = {}
    for name in sorted(names):
        kind, shape = header[name]["dtype"], tuple(header[name]["shape"])
        if kind not in (("U16", "U32") if name == "tokens" else ("I32",)) or len(shape) != 1:
            raise ValueError(f"{file}: {name} is {kind}{list(shape)}; {_CURE}")
        start = 8 + length + header[name]["data_offsets"][0]
        arrays[name] = np.memmap(file, _DTYPES[kind], "r", start, shape)
    return arrays


def _digest(file: pathlib.Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
