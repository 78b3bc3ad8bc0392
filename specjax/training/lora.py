"""Low-rank changes of a target's weights: W + (alpha / rank) A B, with A [in, rank] random and B [rank, out] zero.

The change is added to the weights before a pass, so that a model with it is a model like any other, and its folder is
the merged one; a dropout between A and the activations, which some recipes have, has no place there.

Reference: Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax.parallel import mesh_of

_KERNEL, _ROUTER = "kernel", "router"


def adapted(params: Any, tied: bool) -> dict[tuple[str, ...], Array]:
    """The matrices [in, out] that change: of every linear map in a layer, and of the output.

    A tied output is the embedding, which stays; so do the experts of a mixture, and what chooses among them.
    """
    found: Any = flatten_dict(params)
    return {
        path: leaf
        for path, leaf in found.items()
        if path[-1] == _KERNEL
        and leaf.ndim == 2
        and _ROUTER not in path
        and not (tied and path[0] == "head")
    }


def initial_lora(params: Any, rank: int, tied: bool, key: Array) -> dict[str, dict[str, Array]]:
    """Changes of nothing yet: {"layer_0/attention/q": {"a": [in, rank], "b": [rank, out]}, ...}.

    On a mesh, A is split as the rows of the matrix that it changes, and B as its columns.
    """
    matrices = adapted(params, tied)

    def make(key: Array) -> dict[str, dict[str, Array]]:
        made = {}
        for path, one in zip(sorted(matrices), jax.random.split(key, len(matrices)), strict=True):
            rows, columns = matrices[path].shape
            a = jax.random.uniform(one, (rows, rank), minval=-1, maxval=1) * rows**-0.5
            made["/".join(path[:-1])] = {"a": a, "b": jnp.zeros((rank, columns))}
        return made

    at = None
    if mesh_of(matrices) is not None:
        at = {"/".join(path[:-1]): _split_as(matrix.sharding) for path, matrix in matrices.items()}
    return jax.jit(make, out_shardings=at)(key)


def _split_as(at: Any) -> dict[str, NamedSharding]:
    rows, columns = (*at.spec, None, None)[:2]
    return {
        "a": NamedSharding(at.mesh, PartitionSpec(rows, None)),
        "b": NamedSharding(at.mesh, PartitionSpec(None, columns)),
    }


def merge(params: Any, lora: dict[str, dict[str, Array]], scale: float) -> Any:
    """The parameters with their changes, in the types that they have."""
    found: Any = flatten_dict(params)
    for name, change in lora.items():
        path = (*name.split("/"), _KERNEL)
        found[path] = found[path] + (scale * (change["a"] @ change["b"])).astype(found[path].dtype)
    return unflatten_dict(found)
