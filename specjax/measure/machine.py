"""Describes the machine and the versions of a measurement, for the head of the report."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import time

import jax


def describe() -> dict[str, str | int | None]:
    """Returns device, processor, cores, versions and date."""
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    facts: dict[str, str | int | None] = {
        "device": jax.devices()[0].device_kind,
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    # The versions come from the packages' metadata: importing torch takes seconds.
    for package in ("torch", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
