"""The one place where a choice depends on the platform, "cpu", "gpu" or "tpu".

What XLA:CPU needs in order to be fast can cost an accelerator time, so both forms exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import jax
import numpy as np

from specjax.types import Arrays

_T = TypeVar("_T")


class Device(Protocol):
    """The attributes of a `jax.Device` that are used here.

    Type checkers take `jax.Device` for a variable, so it cannot be an annotation.
    """

    @property
    def platform(self) -> str: ...

    @property
    def process_index(self) -> int: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def by_platform(
    forms: Mapping[str, Callable[..., _T]], other: Callable[..., _T], *operands: Arrays
) -> _T:
    """`forms[name](*operands)` in a program for the platform `name`, `other(*operands)` elsewhere.

    Every form is traced, and the choice is made where the program is lowered.  So it is right in a
    process with several platforms, and for a program that is compiled for absent chips.
    """
    return jax.lax.platform_dependent(*operands, default=other, **forms)


def on_cpu(cpu: Callable[..., _T], other: Callable[..., _T], *operands: Arrays) -> _T:
    """`cpu(*operands)` in a program for a CPU, `other(*operands)` in any other program."""
    return by_platform({"cpu": cpu}, other, *operands)


def on_tpu(tpu: Callable[..., _T], other: Callable[..., _T], *operands: Arrays) -> _T:
    """As `on_cpu`, for a TPU."""
    return by_platform({"tpu": tpu}, other, *operands)


def default_devices() -> set[Device]:
    """The device on which JAX puts an array that names none (`jax.default_device`)."""
    return jax.device_put(np.zeros(())).devices()  # jnp.zeros would compile a program


def default_platform() -> str:
    """The platform of `default_devices`."""
    return next(iter(default_devices())).platform
