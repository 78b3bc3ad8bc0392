"""Chooses by platform, "cpu", "gpu" or "tpu"; no other module does.

A form that is fast with XLA:CPU can be slow on an accelerator, so both forms exist.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

import jax
import numpy as np

from specjax._internal.checks import shown

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
"""The platforms for which programs can be lowered; "gpu" is "cuda", or "rocm" with such a GPU."""

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
    forms: Mapping[str, Callable[..., _T]], other: Callable[..., _T], *operands: object
) -> _T:
    """Runs `forms[name](*operands)` on the platform `name`, and `other(*operands)` elsewhere.

    Every form is traced, and the choice is made where the program is lowered.  So it is right in a
    process with several platforms, and for a program that is compiled for absent chips.
    """
    return jax.lax.platform_dependent(*operands, default=other, **forms)


def lowering_platforms(platform: str | None) -> tuple[str, ...] | None:
    """Returns JAX's name of a platform to lower a program for, which need not be present.

    Args:
      platform: "cpu", "tpu", "cuda", "rocm", or "gpu" for the kind of GPU in this process, which is
        "cuda" if there is none; None: the platform of the arrays.

    Raises:
      ValueError: another name.  JAX would lower a program for it as well.
    """
    if platform is None:
        return None
    if not isinstance(platform, str) or platform not in PLATFORMS:
        raise ValueError(f"platform={shown(platform)}; pass one of {', '.join(PLATFORMS)}")
    if platform == "gpu":
        platform = "rocm" if _has_rocm() else "cuda"
    return (platform,)


def _has_rocm() -> bool:
    try:
        return bool(jax.devices("rocm"))
    except RuntimeError:  # it is not present
        return False


def on_cpu(cpu: Callable[..., _T], other: Callable[..., _T], *operands: object) -> _T:
    """Runs `cpu(*operands)` in a program for a CPU, `other(*operands)` in any other program."""
    return by_platform({"cpu": cpu}, other, *operands)


def on_tpu(tpu: Callable[..., _T], other: Callable[..., _T], *operands: object) -> _T:
    """Runs `tpu(*operands)` in a program for a TPU, `other(*operands)` in any other program."""
    return by_platform({"tpu": tpu}, other, *operands)


def on_gpu(gpu: Callable[..., _T], other: Callable[..., _T], *operands: object) -> _T:
    """Runs `gpu(*operands)` in a program for a GPU, `other(*operands)` in any other program."""
    return by_platform({"cuda": gpu, "rocm": gpu}, other, *operands)


def on_cuda(cuda: Callable[..., _T], other: Callable[..., _T], *operands: object) -> _T:
    """Runs `cuda(*operands)` in a program for an NVIDIA GPU, `other(*operands)` elsewhere."""
    return by_platform({"cuda": cuda}, other, *operands)


def runs_triton(device: Device) -> bool:
    """Returns whether XLA compiles Triton for a device: an NVIDIA GPU from compute capability 8."""
    return _cuda_generation(device) >= 8


def widens_bfloat16(device: Device) -> bool:
    """Returns whether a device is an NVIDIA GPU that cannot multiply bfloat16, such as a T4.

    XLA converts all weights to float32 there in every step.
    """
    return 0 < _cuda_generation(device) < 8


def _cuda_generation(device: Device) -> int:
    """Returns the major compute capability of an NVIDIA GPU; 0 for another device."""
    capability = str(getattr(device, "compute_capability", ""))  # "gfx942" of an AMD GPU
    major = capability.partition(".")[0]
    return int(major) if device.platform in ("gpu", "cuda") and major.isdigit() else 0


_shaped_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("shaped_for", default=None)


@contextlib.contextmanager
def shapes_for(platform: str) -> Iterator[None]:
    """Shapes that are traced inside are those of `platform`, "cpu", "gpu" or "tpu"."""
    token = _shaped_for.set(platform)
    try:
        yield
    finally:
        _shaped_for.reset(token)


def platform_of_shapes() -> str:
    """Returns the platform whose shapes are traced: by default that of JAX.

    A shape cannot depend on the platform that a program is lowered for later.
    """
    return _shaped_for.get() or jax.default_backend()


def prefers_one_pass() -> bool:
    """Returns whether one pass over more tokens is better than a loop that may leave tokens out.

    On a GPU the host waits for each test of a loop whose number of turns depends on data.
    """
    return platform_of_shapes() == "gpu"


def default_devices() -> set[Device]:
    """Returns the device on which JAX puts an array that names none (`jax.default_device`)."""
    return jax.device_put(np.zeros(())).devices()  # jnp.zeros would compile a program


def default_platform() -> str:
    """Returns the platform of `default_devices`."""
    return next(iter(default_devices())).platform
