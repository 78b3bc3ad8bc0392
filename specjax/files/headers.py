"""Reads the headers of safetensors files: the tensors that they hold, without their numbers."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax._internal.checks import reworded
from specjax._internal.fields import parse_object
from specjax.files.folder import read_bytes

KINDS = {
    "F32": jnp.dtype("float32"),
    "BF16": jnp.dtype("bfloat16"),
    "F16": jnp.dtype("float16"),
    "F64": jnp.dtype("float64"),
}
"""The names in safetensors of the dtypes that weights can have."""

WHOLE = {name: np.dtype(code) for name, code in
         {"I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1"}.items()}  # fmt: skip
"""The names of the dtypes that tables of whole numbers and flags can have."""

FLOATS_OF_8_BITS = {
    "F8_E4M3": jnp.dtype("float8_e4m3fn"),
    "F8_E8M0": jnp.dtype("float8_e8m0fnu"),
}
"""The names of the dtypes of packed numbers and of scales."""

_PIECE = 2**20  # numbers that are compared at once
_LONGEST = 2**25  # bytes of a header; one for 10^5 tensors has about 10^7


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file, not yet read."""

    file: pathlib.Path
    kind: str
    shape: tuple[int, ...]
    start: int  # byte of the file

    def map(self) -> np.ndarray:
        """Returns a view of the file, which is read when an element is accessed."""
        if 0 in self.shape:
            return np.zeros(self.shape, KINDS[self.kind])
        return np.asarray(np.memmap(self.file, KINDS[self.kind], "r", self.start, self.shape))


def equal(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors hold the same numbers, in a dtype that weights can have."""
    if one.shape != other.shape or not {one.kind, other.kind} <= set(KINDS):
        return False
    ours, theirs = one.map().reshape(-1), other.map().reshape(-1)
    pieces = range(0, ours.size, _PIECE)
    if one.kind == other.kind:  # bits, since NaN differs from itself
        ours, theirs = (x.view(f"u{x.itemsize}") for x in (ours, theirs))
    return all(np.array_equal(ours[at : at + _PIECE], theirs[at : at + _PIECE]) for at in pieces)


def open_tensors(files: Iterable[pathlib.Path]) -> tuple[dict[str, Stored], list[str]]:
    """Returns every tensor of the files by name, and a line for each one that is in two files."""
    stored: dict[str, Stored] = {}
    faults = []
    for file in files:
        for name, tensor in read_header(file):
            if name in stored:
                faults.append(f"{name} is in two files")
            stored[name] = tensor
    return stored, faults


_Header = list[tuple[str, Stored]]
_HELD: contextvars.ContextVar[dict[pathlib.Path, _Header] | None] = contextvars.ContextVar(
    "headers", default=None
)


@contextlib.contextmanager
def headers_once() -> Iterator[None]:
    """Reads the header of each file only once in its body, which may ask for it several times."""
    if _HELD.get() is not None:
        yield
        return
    token = _HELD.set({})
    try:
        yield
    finally:
        _HELD.reset(token)


def read_header(file: pathlib.Path) -> _Header:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: the file is not a safetensors file, or is truncated.
      OSError: it cannot be read.
    """
    held = _HELD.get()
    if held is None:
        return _read(file)
    if file not in held:
        held[file] = _read(file)
    return held[file]


def _read(file: pathlib.Path) -> _Header:
    length = int.from_bytes(read_bytes(file, 8), "little")
    kinds = (safetensors.SafetensorError, OSError)
    with reworded(f"{file} is damaged or truncated (", "); download it again", kinds):
        if length > _LONGEST:
            raise OSError(f"its header has {length} bytes, and at most {_LONGEST} are read")
        # This checks every offset, shape and dtype against the file's length.
        safetensors.safe_open(file, "np")
    entries = parse_object(read_bytes(file, 8 + length)[8:], file)
    entries.pop("__metadata__", None)
    return [
        (
            name,
            Stored(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                8 + length + entry["data_offsets"][0],
            ),
        )
        for name, entry in entries.items()
    ]
