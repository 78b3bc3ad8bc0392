"""Check published drafters on 2, 4 and 8 devices against one device:

    python tests/drafters_on_meshes.py           five drafters on a mesh each
    python tests/drafters_on_meshes.py --all     each drafter on every mesh

As in `tests/on_meshes.py` tokens and figures must be equal, and a step may move no cache and no
matrix.  Each device must hold its share of the drafter's own parameters, and of its KV cache.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import jax
import mesh_cases
from mesh_cases import Case
from on_meshes import check, decode, held

MESHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "eagle3 chain": ((1, 8),),
    "eagle3 tree": ((1, 2),),
    "p-eagle": ((1, 4),),
    "dflash tree": ((2, 4),),
    "dspark": ((1, 2, 2),),
}
"""Devices along `data`, `model` and `kv_copies`."""

NAMES = (*MESHES, "domino", "dflash-2 tree")
EVERY = ((1, 2), (1, 4), (1, 8), (2, 4), (1, 2, 2), (2, 2, 2))

SPLIT = ("q", "o", "gate", "up", "down", "fc", "embedding", "head", "after", "output")
KV_HEADS = 2


def share(path: tuple[Any, ...], leaf: jax.Array, model: int, copies: int) -> int:
    """The bytes of a parameter that a device should hold, by its name alone."""
    names = [entry.key for entry in path]
    matrix = names[-2] if names[-1] == "kernel" else names[-1]
    parts = model * copies if matrix in SPLIT and leaf.ndim == 2 else 1
    if matrix in ("k", "v") and KV_HEADS % model == 0:
        parts = model
    # A gate of a Markov head and the input of a GRU have names like matrices of a layer.
    return leaf.nbytes // (1 if "correction" in names and matrix == "gate" else parts)


def check_shares(name: str, case: Case, sizes: tuple[int, ...], outcome: Any, params: Any) -> None:
    """Raises AssertionError unless each device holds its share, and not more."""
    _, model, copies = (*sizes, 1)[:3]
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: share(path, leaf, model, copies), case.params.proposer.own
    )
    found = jax.tree.map(held, params.proposer.own)
    assert found == wanted, f"{name} on {sizes}: {found} instead of {wanted}"
    total, whole = (sum(jax.tree.leaves(tree)) for tree in (found, jax.tree.map(
        lambda x: x.nbytes, case.params.proposer.own)))  # fmt: skip
    assert total < whole
    devices = {shard.device for x in jax.tree.leaves(params.proposer.own)
               for shard in x.addressable_shards}  # fmt: skip
    assert len(devices) == math.prod(sizes)
    keys = outcome.before.proposer.cache.keys[0]
    rows, heads = keys.sharding.shard_shape(keys.shape)[:2]
    assert rows == len(mesh_cases.LENGTHS) // sizes[0]
    assert heads == (KV_HEADS // model if KV_HEADS % model == 0 else KV_HEADS)


def main() -> None:
    flags = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    assert jax.device_count() == 8
    asked = dict.fromkeys(NAMES, EVERY) if sys.argv[1:] == ["--all"] else MESHES
    for name, case in mesh_cases.published(asked, KV_HEADS).items():
        wanted = decode(case, case.params)
        assert wanted.figures.accepted.sum() > 0, f"{name}: no draft was accepted"
        for sizes in case.meshes:
            params = case.on(mesh_cases.mesh_of(*sizes))
            outcome = check(f"{name} on {sizes}", case, params, wanted)
            check_shares(name, case, sizes, outcome, params)
        jax.clear_caches()
    print("done")


if __name__ == "__main__":
    main()
