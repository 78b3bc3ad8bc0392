"""What this machine is, and the ceilings that no decoder can pass: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def describe() -> dict[str, Any]:
    """Names and versions for the head of a report."""
    cpu = pathlib.Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
    found = {
        "device": jax.devices()[0].device_kind,
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        import torch
        import transformers

        found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    except ImportError:
        pass
    return found


def ceilings(rounds: int = 7) -> dict[str, float]:
    """`bandwidth` in GB/s, `float32` and `bfloat16` matrix rates in GFLOP/s: medians of `rounds`."""
    words = jnp.ones((64, 1 << 20), jnp.float32)  # 256 MiB: beyond any cache
    read = jax.jit(lambda x: x.sum(axis=1))
    found = {"bandwidth": words.nbytes / _median(lambda: read(words), rounds) / 1e9}
    size = 2048
    for name in ("float32", "bfloat16"):
        a = jnp.ones((size, size), name)
        product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
        found[name] = 2 * size**3 / _median(lambda a=a, product=product: product(a), rounds) / 1e9
    return found


def _median(call: Callable[[], Any], rounds: int) -> float:
    jax.block_until_ready(call())
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
