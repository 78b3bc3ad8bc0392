"""A packed matrix as NumPy arrays, and the tensors of a file that hold one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from specjax.files.headers import Stored

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of e2m1, by their codes."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

RAW = {
    "F8_E4M3": E4M3, "F8_E8M0": np.dtype("u1"), "U8": np.dtype("u1"), "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""The dtypes of the tensors that hold packed matrices; e8m0 is read as its exponents."""


def raw(tensor: Stored) -> np.ndarray:
    """Returns a view of the file, which is read when an element is accessed."""
    kind = RAW[tensor.kind]
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, kind)
    return np.asarray(np.memmap(tensor.file, kind, "r", tensor.start, tensor.shape or (1,)))


class Scales(NamedTuple):
    """The scales of a matrix: that of a group is `each`, times or divided by `whole`."""

    each: np.ndarray  # [..., out, groups], a float dtype, or uint8: s stands for 2^(s - 127)
    whole: np.ndarray | None = None  # [..., out, 1] float32
    divided: bool = False

    def numbers(self) -> np.ndarray:
        """Returns the scales in float32."""
        each = self.each
        if each.dtype == np.uint8:
            each = np.ldexp(np.float32(1), each.astype(np.int32) - 127)
        each = each.astype(np.float32)
        if self.whole is None:
            return each
        return each / self.whole if self.divided else each * self.whole


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix [out, in] of codes, or a stack of them; `models.packed.Packed` says what they mean.

    Here each code of 4 bits is a byte.
    """

    codes: np.ndarray  # [..., out, in]: int8, uint8 or float8_e4m3fn
    scales: Scales
    group: int
    bits: int
    zeros: np.ndarray | None = None  # [..., out, groups] int16
    offset: int = 0  # of every code, besides its zero
    order: np.ndarray | None = None  # [in] int32
    fp4: bool = False
    least: np.ndarray | None = None  # [..., out, groups] float32, is subtracted at the end
    rows: int = 1  # the outputs that share a scale

    def dequantise(self) -> np.ndarray:
        """Returns the matrix [..., out, in] in float32, with its inputs in order."""
        inputs = self.codes.shape[-1]

        def spread(each: np.ndarray) -> np.ndarray:
            if each.shape[-1] == 1:
                return each
            return np.repeat(each, self.group, axis=-1)[..., :inputs]

        wide = _FP4[self.codes] if self.fp4 else self.codes.astype(np.float32)
        if self.offset:
            wide -= np.float32(self.offset)
        if self.zeros is not None:
            wide -= spread(self.zeros.astype(np.float32))
        with np.errstate(over="ignore"):  # the reader finds what is not finite
            wide *= spread(self.scales.numbers())
            if self.least is not None:
                wide -= spread(self.least)
        if self.order is None:
            return wide
        made = np.empty_like(wide)
        made[..., self.order] = wide
        return made


@dataclasses.dataclass(frozen=True)
class PackedTensor(Stored):
    """A matrix of a file in the layout of a dense one, which several tensors hold.

    `map` returns it dequantised.  If `turned` is set, the layout is [..., in, out].
    """

    form: str = ""  # of the matrix, for people
    group: int = 1  # the inputs that share a scale
    parts: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    read: Callable[[], Packed] | None = None
    turned: bool = False

    @property
    def bytes_of_a_number(self) -> float:
        """The bytes of its tensors for each number of the matrix."""
        held = sum(math.prod(part.shape) * RAW[part.kind].itemsize for part in self.parts.values())
        return held / max(math.prod(self.shape), 1)

    def packed(self) -> Packed:
        assert self.read is not None
        return self.read()

    def map(self) -> np.ndarray:
        wide = self.packed().dequantise()
        return wide.swapaxes(-1, -2) if self.turned else wide


def packed_tensor(
    shape: Iterable[int],
    form: str,
    parts: Mapping[str, Stored],
    read: Callable[[], Packed],
    group: int,
    turned: bool = False,
) -> PackedTensor:
    """Returns the tensor of `shape` that `read` reads from `parts`.

    The first part has its codes, and one named "order" says that its inputs are out of order.
    """
    codes = next(iter(parts.values()))
    return PackedTensor(
        codes.file, "F32", tuple(shape), codes.start, form, group, parts, read, turned
    )


def nibbles(words: np.ndarray) -> np.ndarray:
    """Returns the codes of 4 bits [..., 2n] of bytes [..., n], the low half of a byte first."""
    made = np.empty((*words.shape[:-1], 2 * words.shape[-1]), np.uint8)
    made[..., 0::2], made[..., 1::2] = words & 15, words >> 4
    return made


def codes_of_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes [..., 32 n / bits] of int32 words [..., n], lowest bits first, as uint8."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return nibbles(octets) if bits == 4 else octets
