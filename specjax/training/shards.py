"""Reads and writes files of arrays with a checksum: safetensors with a SHA-256 in the metadata.

A folder of them is written for one request, which its manifest holds.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax._internal.checks import reworded
from specjax.files import read_json

_HASH = "sha256"


def digest(*paths: pathlib.Path) -> str:
    """Returns the SHA-256 of the contents of the files, one after the other."""
    sha256 = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()


def check_request(
    folder: pathlib.Path, kind: str, before: Mapping[str, object], wanted: Mapping[str, object]
) -> None:
    """Raises ValueError if the `kind` of data in a folder was made for another request."""
    if before == wanted:
        return
    changes = (
        f"{name} was {before.get(name)} and is {wanted.get(name)}"
        for name in {**wanted, **before}
        if before.get(name) != wanted.get(name)
    )
    raise ValueError(
        f"{folder} holds a {kind} of another request:\n  "
        + "\n  ".join(changes)
        + "\nchoose another folder, or delete it"
    )


def read_manifest(path: pathlib.Path, kind: str, fields: set[str], again: str) -> dict[str, Any]:
    """Returns the description of a folder of shards."""
    manifest = read_json(path)
    if not fields <= set(manifest):
        raise ValueError(
            f"{path} is not the description of a {kind}: bring it back from a copy, or delete "
            f"{path.parent} and {again} again"
        )
    return manifest


def save_shard(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file atomically: a process that is killed leaves the old file or the new one."""
    partial = path.with_suffix(".partial")
    safetensors.numpy.save_file(dict(arrays), partial, {_HASH: _hash(arrays)})
    partial.rename(path)


def read_shard(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file.

    Raises:
      ValueError: the file is damaged.
    """
    kinds = (safetensors.SafetensorError, OSError)
    with reworded(f"{path} cannot be read (", ")", kinds):
        with safetensors.safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}
            wanted = (file.metadata() or {}).get(_HASH)
    if wanted not in (None, _hash(arrays)):
        raise ValueError(f"{path} has changed since it was written (its SHA-256 differs)")
    return arrays


def read_if_whole(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a file; None if there is none, or with a message if it is damaged."""
    try:
        return read_shard(path) if path.exists() else None
    except ValueError as error:  # nothing is lost, since its content depends on its number
        print(f"{error}; it is written again", flush=True)
        return None


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    sha256 = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha256.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()
