"""Tells whether kernels can be made here, and the names under which XLA:CPU calls them."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import warnings
from collections.abc import Hashable

_SYSTEMS, _PROCESSORS = ("Linux", "Darwin"), ("x86_64", "amd64", "aarch64", "arm64")
_LLVMLITE = (0, 45)


def usable() -> bool:
    """Returns whether kernels can be made: llvmlite is installed, and the processor is known."""
    if platform.system() not in _SYSTEMS or platform.machine().lower() not in _PROCESSORS:
        return False
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= _LLVMLITE


@functools.cache
def lanes() -> int:
    """Returns the float32 numbers of a vector of this processor; 0 where that is not known."""
    if not usable():
        return 0
    try:
        from specjax.kernels import calling  # needs llvmlite

        return calling.machine().lanes
    except Exception:  # then no kernel can be made either, and `made` says why
        return 0


@functools.cache
def tiles() -> bool:
    """Returns whether this processor multiplies tiles of bytes (AMX)."""
    if not usable():
        return False
    try:
        from specjax.kernels import calling  # needs llvmlite

        return calling.tiles()
    except Exception:  # as for `lanes`
        return False


@functools.cache
def byte_lanes() -> tuple[int, ...]:
    """Returns the words of vectors whose bytes this processor multiplies, the longest first."""
    if not usable():
        return ()
    try:
        from specjax.kernels import calling  # needs llvmlite

        return calling.byte_lanes()
    except Exception:  # as for `lanes`
        return ()


@functools.cache
def made(kind: str, dtype: str, *others: Hashable) -> str | None:
    """Returns the name of a kernel that a function of `calling` makes, or None."""
    if not usable():
        return None
    try:
        from specjax.kernels import calling  # needs llvmlite

        return getattr(calling, kind)(dtype, *others)
    except Exception as error:  # LLVM or XLA may refuse, which only costs speed
        warnings.warn(
            f"no kernel for {kind} in {dtype} on this CPU, so XLA computes it, which takes "
            f"longer: {error}",
            stacklevel=2,
        )
        return None
