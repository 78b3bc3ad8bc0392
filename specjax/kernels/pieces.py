"""Functions that several kernels call, each compiled once in a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from llvmlite import ir


@dataclasses.dataclass(frozen=True)
class Piece:
    """A function in a module of its own.

    Attributes:
      name: of the function, which other modules declare.
      arguments: their types; it returns nothing.
      pointers: how many of the first arguments are addresses of memory that does not overlap.
      write: writes the instructions into the function.
    """

    name: str
    arguments: tuple[ir.Type, ...]
    pointers: int
    write: Callable[[ir.Function], None]

    def declare(self, module: ir.Module) -> ir.Function:
        """Returns the function, for a module that calls it."""
        held = module.globals.get(self.name)
        return held or ir.Function(module, self._kind(), self.name)

    def define(self, module: ir.Module) -> None:
        """Writes the function into its module."""
        function = ir.Function(module, self._kind(), self.name)
        for pointer in function.args[: self.pointers]:
            pointer.add_attribute("noalias")
        self.write(function)

    def _kind(self) -> ir.FunctionType:
        return ir.FunctionType(ir.VoidType(), self.arguments)


@runtime_checkable
class Joined(Protocol):
    """A `sharing.Work` that calls pieces."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
