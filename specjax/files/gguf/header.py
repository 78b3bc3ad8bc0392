"""Reads the header of a GGUF file: its fields, and where its tensors are.

Every number of it is checked before it is used, since the file may be damaged or hostile.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

from specjax._internal.checks import shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_FIELDS = 2**16
_MOST_TENSORS = 2**17
_LONGEST = 2**20  # bytes of a text
_ALIGNMENT = "general.alignment"
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
_AGAIN = "download it again"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in the file; `shape` is that of a NumPy array."""

    kind: int
    shape: tuple[int, ...]
    start: int  # byte of the file


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says before its tensors."""

    fields: Mapping[str, Any]
    entries: Mapping[str, Entry]
    size: int  # bytes of the file


class _Cursor:
    """Reads one value after the other, and nothing beyond the end."""

    def __init__(self, file: pathlib.Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"{self.file} is damaged or truncated in its header: {_AGAIN}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, most: int) -> int:
        found = self.number("<Q")
        if found > most:
            raise ValueError(f"{self.file} says that it has {found} {what}: {_AGAIN}")
        return found

    def text(self) -> str:
        return self.take(self.count("bytes in one text", _LONGEST)).decode(errors="replace")

    def value(self, kind: int, inside: bool = False) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST or inside:
            raise ValueError(f"{self.file} has a field of the type {kind}, which is not known")
        kind = self.number("<I")
        many = self.count("values in one list", len(self.data))
        if kind in _SCALARS:
            form = _SCALARS[kind]
            size = struct.calcsize(form)
            content = self.take(many * size)
            return list(struct.unpack(f"<{many}{form[1]}", content))
        return [self.value(kind, True) for _ in range(many)]


def read_gguf(file: pathlib.Path) -> Header:
    """Returns the header of a file.

    Raises:
      ValueError: it is no GGUF file of these versions, or is damaged or truncated.
      OSError: it cannot be read.
    """
    with open(file, "rb") as stream:
        if stream.read(4) != MAGIC:
            raise ValueError(f"{file} is no GGUF file: {_AGAIN}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(file, _Cursor(file, data))


def _header(file: pathlib.Path, cursor: _Cursor) -> Header:
    cursor.take(4)
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"{file} is a GGUF file of version {version}; specjax reads 2 and 3")
    tensors = cursor.count("tensors", _MOST_TENSORS)
    count = cursor.count("fields", _MOST_FIELDS)
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"{file} has the field {shown(name)} twice: {_AGAIN}")
        fields[name] = cursor.value(cursor.number("<I"))
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(tensors):
        name = cursor.text()
        axes = cursor.number("<I")
        if not 1 <= axes <= 4:
            raise ValueError(f"{file}: {shown(name)} has {axes} axes: {_AGAIN}")
        shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
        if math.prod(shape) > 2**48 or min(shape) < 1 or name in found:
            raise ValueError(f"{file}: {shown(name)} has shape {list(shape)}, or is there twice")
        found[name] = (cursor.number("<I"), shape, cursor.number("<Q"))
    alignment = fields.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{file} has {_ALIGNMENT} {shown(alignment)}, which is no power of 2")
    start = -(-cursor.at // alignment) * alignment
    entries = {}
    for name, (kind, shape, offset) in found.items():
        if offset % alignment:
            raise ValueError(f"{file}: {shown(name)} does not start at a multiple of {alignment}")
        entries[name] = Entry(kind, shape, start + offset)
    return Header(fields, entries, len(cursor.data))
