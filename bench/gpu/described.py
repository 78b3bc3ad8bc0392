"""NVIDIA GPUs that are not there, as XLA's compiler wants them described."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np

from bench.compiled.chips import Chip

INSTALL = "pip install -r .ci/gpu.txt"

CUDA, DRIVER, CUDNN = "12.8.0", "13.0.0", "9.10.0"
"""Versions that are assumed.  Before CUDA 12.3 XLA puts no branches in CUDA graphs."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Of XLA's `GpuTargetConfigProto`, the figures that differ between chips (NVIDIA's own)."""

    name: str
    capability: str
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: int  # bytes per second
    l2: int
    shared_per_core: int
    shared_per_block: int  # with opt-in
    threads_per_core: int = 2048


GPUS = {
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", "major: 9 feature_extension: ACCELERATED_FEATURES", 132, 128, 1.98,
        84942979072, 3352320000000, 52428800, 233472, 232448,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", "major: 8 feature_extension: NONE", 108, 64, 1.41,
        85100068864, 2039040000000, 41943040, 167936, 166912,
    ),
    "l4": Gpu(
        "NVIDIA L4", "major: 8 minor: 9 feature_extension: NONE", 58, 128, 2.04,
        23609475072, 300096000000, 50331648, 102400, 101376, 1536,
    ),
    "t4": Gpu(
        "Tesla T4", "major: 7 minor: 5 feature_extension: NONE", 40, 64, 1.59,
        15655829504, 320064000000, 4194304, 65536, 65536, 1024,
    ),
}  # fmt: skip


def prepare_environment() -> None:
    """Keep JAX from looking for a GPU.  Call it before JAX starts."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_platforms", "cpu")


def devices_of(chip: Chip, chips: int) -> np.ndarray:
    """The `chips` GPUs of one host that XLA compiles for.

    Raises:
      ValueError: JAX's plugin for CUDA is missing, or `chip` is not in `GPUS`.
    """
    from jax.experimental import topologies

    if chip.name not in GPUS:
        raise ValueError(f"{chip.name} is not described here; pass one of {', '.join(GPUS)}")
    if chips > 8:
        raise ValueError(f"{chips} chips; a host has at most 8 GPUs")
    try:
        import jax_cuda12_plugin  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"compiling for GPUs needs JAX's plugin for CUDA: {INSTALL}, in an environment of its "
            "own; no GPU and no driver is needed"
        ) from None
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=_text_proto(GPUS[chip.name]),
            topology=f"1x1x{chips}",  # slices x hosts x GPUs
        )
    except Exception as error:  # the types differ between versions of JAX
        raise ValueError(f"JAX's plugin for CUDA does not take {chip.name}: {error}") from None
    return np.array(described.devices)


def _text_proto(gpu: Gpu) -> str:
    major, minor, patch = CUDNN.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads_per_core}
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_per_block}
  shared_memory_per_core: {gpu.shared_per_core}
  core_count: {gpu.cores}  fpus_per_core: {gpu.fpus_per_core}  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}  memory_bandwidth: {gpu.bandwidth}  l2_cache_size: {gpu.l2}
  cuda_compute_capability {{ {gpu.capability} }}
  name: "{gpu.name}"  device_vendor: "NVIDIA Corporation"
  driver_version: "{DRIVER}"  runtime_version: "{CUDA}"  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{CUDNN}"
}}
platform_name: "CUDA"
device_description_str: "{gpu.name}"
dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}
"""
