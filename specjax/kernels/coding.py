"""The layout of a matrix of codes of 4 or 8 bits for which there is a kernel."""

from __future__ import annotations

import dataclasses
import math

ALL = 2**30
"""The inputs of a group if all inputs of an output share a scale."""


TOGETHER = 16
"""The outputs that are multiplied at once in tiles."""

_SEGMENTS = (128, 64, 32)
"""The inputs that are summed as whole numbers in tiles: the most that a group has.

Sums of 512 products of 8 bits are exact in float32.
"""


VNNI = 16
"""The words of vectors whose bytes only VNNI multiplies; AVX2 has vectors of 8."""

DIGIT_STEP = 16
"""The inputs of a matrix whose activations are digits are a multiple of it."""

_MOST_INPUTS = 2**15
"""The most inputs whose products with a digit are a whole number of 32 bits."""

_STEP = 128
"""The most activations that share a step."""


def together(group: int) -> int:
    """Returns the activations that share a step, if a matrix has groups of this many inputs."""
    return math.gcd(group, _STEP)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Vectors of a block that are summed before their scale is applied.

    Attributes:
      vectors: the numbers of these vectors.
      first: the first group of the vectors' lanes, among those of the block.
      count: the number of groups that the lanes have.
    """

    vectors: range
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class Coding:
    """Codes with scales by group.

    Attributes:
      bits: of a code: 4, and two codes are a byte, or 8.
      fp4: the codes are numbers of e2m1.
      signed: codes of 8 bits are signed.
      offset: is subtracted from every code.
      group: the inputs that share a scale; `ALL` if all inputs of an output do.
      scales: the dtype of the scales; "uint8" for powers of two.
      zeros: the dtype of the zeros, or None.
      lanes: the float32 numbers of a vector.
      segment: the inputs that are summed as whole numbers in tiles (AMX); 0 without them.
      rounded: the inputs that share a step, if activations are rounded to 8 bits; else 0.
      fp8: the codes are numbers of e4m3.
      cut: the last group of an output has fewer inputs than the others.
      digits: activations are multiplied as so many digits of 8 bits, 1 or 3 (see `digits.py`).
    """

    bits: int
    fp4: bool
    signed: bool
    offset: int
    group: int
    scales: str
    zeros: str | None
    lanes: int
    segment: int = 0
    rounded: int = 0
    fp8: bool = False
    cut: bool = False
    digits: int = 0

    @property
    def tiles(self) -> bool:
        return self.segment > 0

    def in_tiles(self, inputs: int, outputs: int) -> Coding | None:
        """Returns the coding for products in tiles, or None if they cannot be cut so."""
        fit = (size for size in _SEGMENTS if inputs % size == self.group % size == 0)
        segment = next(fit, None)
        if segment is None or outputs < TOGETHER or self.fp8:
            return None
        return dataclasses.replace(self, lanes=16, segment=segment)

    def in_digits(self, inputs: int) -> Coding | None:
        """Returns the coding for activations as digits, or None if there is no kernel for them."""
        takes = self.bits == 8 and self.group == ALL and self.zeros is None and not self.fp8
        if not takes or inputs % DIGIT_STEP or not 0 < inputs <= _MOST_INPUTS:
            return None
        return dataclasses.replace(self, lanes=16, digits=3)

    def in_bytes(self, inputs: int, lanes: int, vnni: bool) -> Coding | None:
        """Returns the coding for activations of 8 bits, or None if there is no kernel for them.

        Args:
          inputs: of the matrix.
          lanes: the words of a vector.
          vnni: the processor multiplies bytes; else it has AVX2, which 4 bits suffice for.
        """
        made = dataclasses.replace(self, lanes=lanes, rounded=together(self.group))
        block = made.rounded_block
        whole = self.group % block == 0 or self.group == made.rounded
        takes = not self.fp8 and (vnni or self.bits == 4) and made.rounded >= lanes
        return made if takes and whole and inputs % block == 0 else None

    @property
    def rounded_block(self) -> int:
        """The inputs that are multiplied at once, if activations are rounded."""
        return max(self.rounded, self.lanes * (8 if self.bits == 4 else 4))

    @property
    def name(self) -> str:
        return (
            f"specjax_codes_{self.kind}_{self.offset}_{self.group}_{self.scales}_{self.zeros}"
            f"_{self.lanes}_{self.segment}_{self.rounded}_{self.digits}{'_cut' * self.cut}"
        ).replace("-", "m")

    @property
    def kind(self) -> str:
        """The dtype of the codes."""
        return f"{'fp' if self.fp4 or self.fp8 else 'int' if self.signed else 'uint'}{self.bits}"

    def takes(self, inputs: int) -> bool:
        """Returns whether blocks divide the inputs, and pieces of blocks have whole groups."""
        least = 8 if self.bits == 4 else self.lanes
        whole = self.block % self.group == 0 or self.group % self.block == 0 or self.group == ALL
        table = self.lanes == 16 or not self.fp4
        return inputs % self.block == 0 and self.group % least == 0 and whole and table

    @property
    def block(self) -> int:
        """The inputs whose codes are decoded at once."""
        return self.lanes * (8 if self.bits == 4 else 4)

    @property
    def pieces(self) -> list[Piece]:
        """Cuts a block into its pieces."""
        if self.bits == 4:
            return [Piece(range(8), 0, max(1, self.block // self.group))]
        each = min(self.group, self.block) // self.lanes
        return [Piece(range(i, i + each), i // each, 1) for i in range(0, 4, each)]


ROUNDED_ROWS = Coding(8, False, True, 0, ALL, "float32", None, lanes=16, digits=1)
"""A matrix in int8 with a scale for each output, and rows that are rounded to int8, too."""
