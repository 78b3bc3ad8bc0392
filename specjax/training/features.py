"""Caches the hidden states of a frozen target, read once for each sequence, on disk.

    FOLDER/3f/3f9a....safetensors     one sequence: states [T, F], and their SHA-256

A file's name is the SHA-256 of the sequence's tokens and of all that its states depend on, so a
file of another target or of other layers is never found.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from specjax.training.shards import read_shard, save_shard

_NAME = "states"
_GB = 10**9


class Features:
    """States of sequences of one length; those that are not on disk are computed.

    States are always rounded to bfloat16, whether they come from disk or not.  So a run does not
    depend on the contents of its folder at the start.

    Args:
      folder: created if needed.
      depends: everything on which the states depend, except the tokens.
      shape: (T, F) of the states of a sequence.
      limit: bytes that the folder may have.  Sequences that no longer fit are computed each time.
      read: computes the states [B, T, F] of tokens [B, T].

    Raises:
      ValueError: the disk has less free space than the limit.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        depends: Mapping[str, object],
        shape: tuple[int, int],
        limit: int,
        read: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._folder, self._read, self._shape = folder, read, shape
        self._depends = json.dumps(depends, sort_keys=True).encode()
        self._left = limit - sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
        self.bytes = 2 * shape[0] * shape[1]
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if self._left > free:
            raise ValueError(
                f"--keep-features {limit / _GB:g} needs {self._left / _GB:.1f} GB more in "
                f"{folder}, and the disk has {free / _GB:.1f} GB: pass a smaller number"
            )

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the states [B, T, F] bfloat16 of tokens [B, T].

        If one is missing, all are computed together, so that a state does not depend on which of
        the others were found.
        """
        paths = [self._path(row) for row in tokens]
        rows = [self._found(path) for path in paths]
        if any(row is None for row in rows):
            made = np.asarray(self._read(tokens)).astype(jnp.bfloat16)
            for index, path in enumerate(paths):
                if rows[index] is None:
                    rows[index] = made[index]
                    self._keep(path, made[index])
        return np.stack([row for row in rows if row is not None])

    def _path(self, row: np.ndarray) -> pathlib.Path:
        key = hashlib.sha256(self._depends + row.astype(np.int32).tobytes()).hexdigest()
        return self._folder / key[:2] / f"{key}.safetensors"

    def _found(self, path: pathlib.Path) -> np.ndarray | None:
        if not path.exists():
            return None
        try:
            states = read_shard(path)[_NAME].view(jnp.bfloat16)
        except (ValueError, KeyError) as error:
            print(f"{error}; these hidden states are computed again", flush=True)
            return None
        return states if states.shape == self._shape else None

    def _keep(self, path: pathlib.Path, states: np.ndarray) -> None:
        known = path.exists()  # a damaged file is replaced
        if self._left < self.bytes and not known:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # As whole numbers, since not every version of safetensors writes bfloat16 from NumPy.
        save_shard(path, {_NAME: np.ascontiguousarray(states).view(np.uint16)})
        if not known:
            self._left -= path.stat().st_size

    def __str__(self) -> str:
        room = max(0, self._left) // self.bytes
        return (
            f"hidden states of the target: {self.bytes / 1e6:.2f} MB a sequence; "
            f"{self._folder} has room for {room} more"
        )
