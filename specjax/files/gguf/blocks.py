"""The tensors of a GGUF file: plain numbers, and blocks of codes with their scales.

A block has 32 numbers of a row (Q8_0, Q4_0) or 256 (Q4_K, Q6_K):

    Q8_0   w = d q               d in float16, q in [-128, 127]
    Q4_0   w = d (q - 8)         q of 4 bits: the first half of the block in the low halves of bytes
    Q4_K   w = d s q - m t       for every 32 numbers s and t of 6 bits, and d and m in float16
    Q6_K   w = d s (q - 32)      for every 16 numbers s in [-128, 127], q of 6 bits

They are held as groups of 32 (Q6_K: 16) codes of 8 or 4 bits; of Q4_K and Q6_K with d s in float32,
which holds it exactly.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from specjax._internal.checks import shown
from specjax.files.gguf.header import Entry, Header
from specjax.files.headers import Stored
from specjax.files.packed import Packed, PackedTensor, Scales, packed_tensor

PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""The kinds of plain numbers, by their number in the file."""


class Blocks(NamedTuple):
    """A kind of blocks."""

    name: str
    numbers: int  # of a block
    bytes: int
    group: int
    bits: int  # of a code as it is held
    scale_bytes: int  # for a group as it is held
    unpack: Callable[[np.ndarray], Packed]  # blocks [out, blocks of a row, bytes]


def _half(part: np.ndarray) -> np.ndarray:
    """Returns the numbers of float16 in bytes [..., 2n]."""
    return np.ascontiguousarray(part).view("<f2")


def _flat(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.reshape(len(codes), -1))


def _q8_0(blocks: np.ndarray) -> Packed:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Packed(_flat(codes), Scales(_half(blocks[..., :2])[..., 0]), 32, 8)


def _q4_0(blocks: np.ndarray) -> Packed:
    halves = blocks[..., 2:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
    return Packed(_flat(codes), Scales(_half(blocks[..., :2])[..., 0]), 32, 4, offset=8)


def _q4_k(blocks: np.ndarray) -> Packed:
    of_block = _half(blocks[..., :4]).astype(np.float32)
    low, least, both = np.split(blocks[..., 4:16], 3, axis=-1)
    scale = np.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], axis=-1)
    least = np.concatenate([least & 63, (both >> 4) | ((least >> 2) & 48)], axis=-1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2)
    return Packed(
        _flat(codes), Scales(_flat(of_block[..., :1] * scale.astype(np.float32))), 32, 4,
        least=_flat(of_block[..., 1:] * least.astype(np.float32)),
    )  # fmt: skip


def _q6_k(blocks: np.ndarray) -> Packed:
    shape = blocks.shape[:-1]
    low, high = blocks[..., :128].reshape(*shape, 2, 1, 64), blocks[..., 128:192]
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (high.reshape(*shape, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    each = _half(blocks[..., 208:]).astype(np.float32) * scale
    return Packed(_flat(codes), Scales(_flat(each)), 16, 8)


KINDS = {
    2: Blocks("Q4_0", 32, 18, 32, 4, 2, _q4_0),
    8: Blocks("Q8_0", 32, 34, 32, 8, 2, _q8_0),
    12: Blocks("Q4_K", 256, 144, 32, 4, 8, _q4_k),
    14: Blocks("Q6_K", 256, 210, 16, 8, 4, _q6_k),
}
"""By their number in the file."""

_OTHERS = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Turned(Stored):
    """A plain tensor whose outputs lie in the order of llama.cpp's rotations."""

    heads: int

    def map(self) -> np.ndarray:
        return halves(super().map(), self.heads)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows whose pairs of a head are halves, where the file has neighbours.

    llama.cpp turns numbers 2i and 2i + 1 of a head together; here, as in transformers, they are i
    and i + half of them.
    """
    parts = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


def stored_of(
    file: pathlib.Path, name: str, entry: Entry, header: Header, heads: int | None
) -> Stored:
    """Returns a tensor of a file; with `heads`, its rows are those of rotated heads.

    Raises:
      ValueError: its kind is not supported, or it does not fit the file.
    """
    shape = entry.shape
    if heads is not None and (shape[0] % heads or shape[0] // heads % 2):
        raise ValueError(f"{name} has {shape[0]} outputs, which {heads} heads do not divide")
    if entry.kind in PLAIN:
        size = 4 if entry.kind == 0 else 2
        _check_end(name, entry, header, math.prod(shape) * size)
        if heads is not None:
            return _Turned(file, PLAIN[entry.kind], shape, entry.start, heads)
        return Stored(file, PLAIN[entry.kind], shape, entry.start)
    if entry.kind not in KINDS:
        kind = _OTHERS.get(entry.kind, f"kind {entry.kind}")
        raise ValueError(
            f"{name} is stored as {kind}; specjax reads {', '.join(PLAIN.values())}, "
            f"{', '.join(kind.name for kind in KINDS.values())}"
        )
    kind = KINDS[entry.kind]
    if len(shape) != 2 or shape[1] % kind.numbers:
        raise ValueError(
            f"{name} has shape {list(shape)}, and {kind.name} holds matrices with a multiple of "
            f"{kind.numbers} inputs"
        )
    outputs, count = shape[0], shape[1] // kind.numbers
    _check_end(name, entry, header, outputs * count * kind.bytes)

    def read() -> Packed:
        where = (outputs, count, kind.bytes)
        blocks = np.asarray(np.memmap(file, np.uint8, "r", entry.start, where))
        if heads is not None:
            blocks = halves(blocks, heads)
        return kind.unpack(blocks)

    held = outputs * (shape[1] * kind.bits // 8 + shape[1] // kind.group * kind.scale_bytes)
    parts: Mapping[str, Stored] = {"codes": Stored(file, "U8", (held,), entry.start)}
    made: PackedTensor = packed_tensor(shape, f"GGUF {kind.name}", parts, read, kind.group)
    return made


def _check_end(name: str, entry: Entry, header: Header, size: int) -> None:
    if entry.start + size > header.size:
        raise ValueError(
            f"{name} ends at byte {entry.start + size} of a file of {header.size} bytes, which is "
            f"truncated ({shown(list(entry.shape))} numbers): download it again"
        )
