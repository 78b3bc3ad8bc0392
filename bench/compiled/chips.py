"""Published figures of chips, and the topologies for which libtpu compiles.

Sources: for TPUs the pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" of Google Cloud's
documentation (cloud.google.com/tpu/docs), for GPUs NVIDIA's data sheets of the H100 SXM, H200 SXM,
A100 80GB SXM, L4 and T4.  All are peaks without sparsity.  A T4 has no products in bfloat16: its
figure is of float16.  A chip of v7x is two devices for JAX, which counts devices;
its figures here are of one device, half a chip.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, or what JAX takes for one.  Bandwidths are bytes per second."""

    name: str
    memory: float  # bytes
    bandwidth: float  # of main memory
    flops: float  # bfloat16, per second
    int8: float  # operations per second
    links: float  # to other chips, both directions and all links together
    topology: str | None = None  # libtpu's name of the chip; None cannot be compiled for
    three_axes: bool = False  # are its slices cuboids, rather than rectangles?


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16e9, 819e9, 197e12, 394e12, 200e9, "v5e"),
        Chip("v6e", 32e9, 1640e9, 918e12, 1836e12, 448e9, "v6e"),
        Chip("v5p", 95e9, 2765e9, 459e12, 918e12, 600e9, "v5p", three_axes=True),
        Chip("v7x", 96e9, 3690e9, 1153e12, 1153e12, 600e9, "tpu7x", three_axes=True),
        Chip("h100", 80e9, 3350e9, 989e12, 1979e12, 900e9),
        Chip("h200", 141e9, 4800e9, 989e12, 1979e12, 900e9),
        Chip("a100", 80e9, 2039e9, 312e12, 624e12, 600e9),
        Chip("l4", 24e9, 300e9, 121e12, 242e12, 64e9),
        Chip("t4", 16e9, 320e9, 65e12, 130e12, 32e9),
    )
}


def chip(name: str) -> Chip:
    """Raises ValueError for a name that is not in `CHIPS`."""
    if name not in CHIPS:
        raise ValueError(f"{name!r} is an unknown chip; it must be one of {', '.join(CHIPS)}")
    return CHIPS[name]
