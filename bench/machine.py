"""What this machine is, and the ceilings that no decoder can pass: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import functools
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
    names = [
        line.split(":")[1].strip()
        for line in cpu.read_text().splitlines()
        if line.startswith("model name")
    ]
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


@functools.cache
def ceilings(rounds: int = 7) -> dict[str, float]:
    """`bandwidth` in GB/s, `float32` and `bfloat16` matrix rates in GFLOP/s: medians of `rounds`."""
    found = {
        "bandwidth": max(bandwidths(rounds).values())
    }  # a ceiling is the best that anyone reaches
    size = 2048 if _on_cpu() else 8192
    for name in ("float32", "bfloat16"):
        a = jnp.ones((size, size), name)
        product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
        found[name] = 2 * size**3 / _median(lambda a=a, product=product: product(a), rounds) / 1e9
    return found


def bandwidths(rounds: int = 7) -> dict[str, float]:
    """GB/s of several ways to read 256 MiB, beyond a CPU's caches, or 4 GiB, beside which a call takes no time."""
    words = 1 << (26 if _on_cpu() else 30)
    found = {}
    for name, shape, read in (
        ("sums of long rows", (64, words // 64), lambda x: x.sum(axis=1)),
        ("sums of short rows", (words // 1024, 1024), lambda x: x.sum(axis=1)),
        ("greatest of short rows", (words // 1024, 1024), lambda x: x.max(axis=1)),
        ("vector times wide matrix", (4096, words // 4096), lambda x: jnp.ones(4096) @ x),
        ("five vectors times matrix", (8192, words // 8192), lambda x: jnp.ones((5, 8192)) @ x),
    ):
        array, compiled = jnp.ones(shape, jnp.float32), jax.jit(read)
        found[name] = (
            array.nbytes / _median(lambda array=array, call=compiled: call(array), rounds) / 1e9
        )
    return found


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _median(call: Callable[[], Any], rounds: int) -> float:
    jax.block_until_ready(call())
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
