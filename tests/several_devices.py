"""The environment of processes with several devices of the CPU, or that work together."""

from __future__ import annotations

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def environment(devices: int, processes: int = 1) -> dict[str, str]:
    """The variables of a process with so many devices, which finds the modules of the tests.

    With several devices it keeps no compiled programs, like a command that makes a mesh: XLA:CPU
    may run collectives of a program that it reads from a cache in another order on each device, and
    then they wait for one another.

    Args:
      devices: of each process.
      processes: that share their devices.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    flags += " --xla_backend_optimization_level=0"  # compiles in half the time
    made = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    if devices * processes > 1:
        made["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return made
