"""Will it fit?  What a decode state takes on each device, against what the device has left, before anything is made."""

from __future__ import annotations

import functools
import gc
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from specjax.caches import KVCache
from specjax.parallel.sharding import by_row, row_parts

_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")


def check_memory(
    prefill: Callable[..., Any], decoder: Any, placed: Any, params: Any, prompt: Any, *given: Any
) -> None:
    """Refuse a state that cannot fit: `prefill` is the decoder's, and not called, and the others are its arguments.

    Counted is what it would leave, and the logits of a step, the least of its scratch; parameters are there already.

    Raises:
      ValueError: what it takes on a device and what is free there, and the cure; where arguments are concrete.
    """
    leaves, structure = jax.tree.flatten((params, prompt, *given))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on_a_mesh(x)) for x in leaves)
    needed = _needed(prefill, decoder, placed, structure, shapes)
    what = f"{len(prompt)} rows with a capacity of {decoder.capacity} tokens"
    cure = (
        "decode fewer rows at once, pass a smaller max_new_tokens (below generate: capacity), load the models in "
        "bfloat16, or split them over several devices with mesh="
    )
    require(needed, devices_of(params.target), what, cure)


def _on_a_mesh(x: Any) -> NamedSharding | None:
    """How it lies there; on a single device an array and a number of the host are one and the same to a trace."""
    at = getattr(x, "sharding", None)
    return at if isinstance(at, NamedSharding) else None


@functools.lru_cache(maxsize=256)
def _needed(
    prefill: Any,
    decoder: Any,
    placed: Any,
    structure: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
) -> int:
    params, prompt, *given = jax.tree.unflatten(structure, shapes)
    # A trace that the call finds again.
    state = jax.eval_shape(functools.partial(prefill, decoder, placed), params, prompt, *given)
    mesh, split_target, _ = placed
    logits = prompt.shape[0] * decoder.proposer.num_nodes * decoder.target.vocab_size * 4
    return device_bytes(state, mesh) + logits // (
        1 if mesh is None else mesh.size if split_target else row_parts(mesh)
    )


def device_bytes(state: Any, mesh: Mesh | None) -> int:
    """Bytes of a state, arrays or their shapes, on each device of the mesh along which `sharding.spread` laid it."""

    def held(leaf: Any) -> int:
        if isinstance(leaf, KVCache):
            return bytes_of((leaf.keys, leaf.values), leaf.sharding) + held(leaf.length)
        return bytes_of(leaf, None if mesh is None else by_row(mesh))

    def bytes_of(leaves: Any, at: Any) -> int:
        return sum(
            math.prod(x.shape if at is None else at.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(leaves)
        )

    return sum(map(held, jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KVCache))))


def devices_of(params: Any) -> set[Any]:
    """On which what is computed from `params` will lie."""
    arrays = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return next(arrays, jnp.zeros(())).devices()  # those of a fresh array are the default


def free_bytes(device: Any) -> int | None:
    """What can still be allocated on it; None where it does not say.  Devices of a CPU share the machine's memory."""
    if device.platform == "cpu":
        return _free_on_the_machine()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def require(needed: int, devices: Iterable[Any], what: str, cure: str) -> None:
    """Refuse what cannot fit.  Where a device does not say what it has, nothing is refused.

    Args:
      needed: bytes on each device.
      devices: those of other processes are left to these.
      what: takes them, for the message.
      cure: likewise.

    Raises:
      ValueError: with both figures, and the cure.
    """
    own = [device for device in devices if device.process_index == jax.process_index()]
    sharing = [device for device in own if device.platform == "cpu"]

    def least() -> float:
        found = [free for free in map(free_bytes, own[:1] if sharing else own) if free is not None]
        return min(found, default=math.inf) / max(len(sharing), 1)

    if needed <= least():
        return
    gc.collect()  # what an earlier call left in a cycle is no reason
    if needed <= (free := least()):
        return
    where = f"each of {len(own)} devices" if len(own) > 1 else str(own[0])
    raise ValueError(
        f"{what} would take {_written(needed)} on {where}, of which {_written(free)} are free: {cure}"
    )


def _written(size: float) -> str:
    """1_234_567 -> 1.23 MB."""
    power = min(max(int(math.log10(max(size, 1)) // 3), 0), 4)
    return f"{size / 1000**power:.{0 if power == 0 else 2}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _free_on_the_machine() -> int | None:
    """What Linux says is available, swap included, and no more than is left to this control group (a container)."""
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
        pass  # no such group, or one without a limit ("max")
    return int(np.min(free))
