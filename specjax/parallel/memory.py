"""The memory of each device: how much a state takes, and whether it is free."""

from __future__ import annotations

import gc
import math
import pathlib
from collections.abc import Iterable

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from specjax._internal.platforms import Device, default_devices
from specjax.caches import KVCache, LayerState
from specjax.parallel.meshes import make_mesh
from specjax.parallel.sharding import by_row, is_memory, mesh_of

_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")


def device_bytes(state: object, mesh: Mesh | None) -> int:
    """Returns the bytes of a state (arrays or shapes) on each device of `mesh`."""

    def held(leaf: KVCache | LayerState | Array) -> int:
        if isinstance(leaf, KVCache):
            return bytes_of((leaf.keys, leaf.values), leaf.sharding) + held(leaf.length)
        if isinstance(leaf, LayerState):
            columns, whole = (None, None) if leaf.sharding is None else leaf.shardings
            return bytes_of(leaf.columns, columns) + bytes_of(leaf.state, whole)
        return bytes_of(leaf, None if mesh is None else by_row(mesh))

    def bytes_of(leaves: object, at: NamedSharding | None) -> int:
        return sum(
            math.prod(x.shape if at is None else at.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(leaves)
        )

    return sum(map(held, jax.tree.leaves(state, is_leaf=is_memory)))


def devices_of(params: object) -> set[Device]:
    """Returns the devices that hold `params`; if `params` has no arrays, the default device."""
    arrays = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    first = next(arrays, None)
    return default_devices() if first is None else first.devices()


def mesh_holding(params: object) -> Mesh:
    """Returns the mesh that arrays are on, or else one of the devices that hold them."""
    mesh = mesh_of(params)
    return make_mesh(devices=list(devices_of(params))) if mesh is None else mesh


def free_bytes(device: Device) -> int | None:
    """Returns the free bytes of a device, or None if it does not report them.

    All CPU devices share the memory of the machine.
    """
    if device.platform == "cpu":
        return _free_on_the_machine()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def fits(needed: int, devices: Iterable[Device]) -> bool:
    """Returns whether each of these devices has so many bytes free, as `require` counts them."""
    return needed <= _least_free(devices)


def require(needed: int, devices: Iterable[Device], what: str, cure: str) -> None:
    """Raises ValueError if an allocation cannot fit; devices that do not report memory pass.

    Args:
      needed: bytes on each device.
      devices: all of them; each process checks its own.
      what: the name of the allocation in the message.
      cure: the advice in the message.

    Raises:
      ValueError: with the bytes needed, the bytes free, and the advice.
    """
    own = _own(devices)
    if needed <= _least_free(own):
        return
    gc.collect()  # an earlier call may have left arrays in a reference cycle
    if needed <= (free := _least_free(own)):
        return
    where = f"each of {len(own)} devices" if len(own) > 1 else str(own[0])
    raise ValueError(
        f"{what} would take {_written(needed)} on {where}, of which {_written(free)} are free: "
        f"{cure}"
    )


def _own(devices: Iterable[Device]) -> list[Device]:
    return [device for device in devices if device.process_index == jax.process_index()]


def _least_free(devices: Iterable[Device]) -> float:
    """The fewest bytes that are free on a device of this process."""
    own = _own(devices)
    sharing = [device for device in own if device.platform == "cpu"]
    asked = own[:1] if sharing else own
    known = [free for free in map(free_bytes, asked) if free is not None]
    return min(known, default=math.inf) / max(len(sharing), 1)


def _written(size: float) -> str:
    """Formats 1_234_567 as 1.23 MB."""
    power = min(max(int(math.log10(max(size, 1)) // 3), 0), 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{size / 1000**power:.{0 if power == 0 else 2}f} {unit}"


def _free_on_the_machine() -> int | None:
    """Returns Linux's available memory with swap, or the free bytes of the container, if fewer."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        kilobytes = {line[0]: int(line[1]) for line in lines if len(line) > 1}
        free = [1024 * (kilobytes["MemAvailable:"] + kilobytes.get("SwapFree:", 0))]
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (
            int((_CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        stat = dict(
            line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        )
        free.append(limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    except (OSError, KeyError, ValueError):
        pass  # there is no control group, or it has no limit ("max")
    return int(np.min(free))
