"""Whether a driver can run loops inside of CUDA graphs, which XLA's option `+WHILE` asks for."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable

from specjax._internal.platforms import Device

_LEAST = 12030
"""CUDA 12.3, as `cuDriverGetVersion` writes it: the first version with loops in graphs."""


def driver_version() -> int | None:
    """Returns the CUDA version of the driver, 12040 for 12.4, or None where there is no driver."""
    try:
        version = ctypes.c_int(0)
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def check_graphs(devices: Iterable[Device]) -> None:
    """Raises ValueError if `XLA_FLAGS` puts loops in CUDA graphs, and the driver cannot run them.

    XLA would leave loops out of its graphs silently, and the host would wait in every step.
    """
    wanted = re.search(r"xla_gpu_enable_command_buffer=\S*WHILE", os.environ.get("XLA_FLAGS", ""))
    if wanted is None or not any(device.platform == "gpu" for device in devices):
        return
    version = driver_version()
    if version is not None and version < _LEAST:
        raise ValueError(
            f"XLA_FLAGS has {wanted[0]}, and the driver is of CUDA {version // 1000}."
            f"{version % 1000 // 10}, which runs no loop in a graph: install a driver of CUDA 12.3 "
            "or newer, or take the flag out"
        )
