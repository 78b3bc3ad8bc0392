"""Slices of TPUs that are not there, as libtpu describes them."""

from __future__ import annotations

import os

import jax
import numpy as np

from bench.compiled.chips import Chip

INSTALL = 'pip install "jax[tpu]"'


def prepare_environment() -> None:
    """Let libtpu describe chips on a machine that has none.  Call it before JAX starts."""
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no process uses a chip
    )
    jax.config.update("jax_platforms", "cpu")


def devices_of(chip: Chip, chips: int) -> np.ndarray:
    """The first `chips` devices of a slice that is described by libtpu.

    Raises:
      ValueError: libtpu is missing or does not know the slice.
    """
    from jax.experimental import topologies

    name = slice_of(chip, chips)
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"compiling for TPUs needs libtpu: {INSTALL}, in an environment of its own"
        ) from None
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # the types differ between versions of JAX
        raise ValueError(f"libtpu does not describe {name}: {error}") from None
    # A chip of some generations is two devices.
    return np.array(described[:chips])


def slice_of(chip: Chip, chips: int) -> str:
    """The topology with at least 4 chips that holds `chips` of them: "v5e:2x4".

    Raises:
      ValueError: it cannot be compiled for, or there is no such slice.
    """
    if chip.topology is None:
        raise ValueError(
            f"{chip.name} is no TPU, so libtpu cannot compile for it; its speed is predicted from "
            "the bytes of a TPU's program"
        )
    sides = [2, 2, 1] if chip.three_axes else [2, 2]
    most = 64 if chip.three_axes else 256
    if not 1 <= chips <= most:
        raise ValueError(f"{chips} chips; a slice of {chip.name} has 1 to {most} here")
    while _product(sides) < chips:
        smallest = min(range(len(sides)), key=lambda axis: (sides[axis], -axis))
        sides[smallest] *= 2
    return f"{chip.topology}:{'x'.join(map(str, sides))}"


def _product(sides: list[int]) -> int:
    total = 1
    for side in sides:
        total *= side
    return total
