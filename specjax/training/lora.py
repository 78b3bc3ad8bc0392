"""Low-rank changes of a target's weights: W + (alpha / rank) A B.

A [in, rank] starts random and B [rank, out] starts at zero.  The change is added to the weights
before a pass, so the changed model is an ordinary model, and it is saved with merged weights.  So
there is no dropout between activations and A, as in some recipes.

Reference: Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax.parallel import mesh_of
from specjax.training.trees import Tree

Lora = dict[str, dict[str, Array]]
"""{"layer_0/attention/q": {"a": [in, rank], "b": [rank, out]}, ...}"""

_KERNEL, _ROUTER = "kernel", "router"


def adapted(params: Tree, tied: bool) -> dict[tuple[str, ...], Array]:
    """Returns the matrices [in, out] that change: all linear maps in the layers, and the output.

    A tied output is not changed, since it is the embedding.  Neither are the experts and routers of
    a mixture of experts.
    """
    leaves = cast(dict[tuple[str, ...], Array], flatten_dict(params))
    return {
        path: leaf
        for path, leaf in leaves.items()
        if path[-1] == _KERNEL
        and leaf.ndim == 2
        and _ROUTER not in path
        and not (tied and path[0] == "head")
    }


def initial_lora(params: Tree, rank: int, tied: bool, key: Array) -> Lora:
    """Returns initial changes, whose products are zero.

    On a mesh, A is split like the rows of the matrix that it changes, and B like its columns.
    """
    matrices = adapted(params, tied)

    def make(key: Array) -> Lora:
        made = {}
        for path, one in zip(sorted(matrices), jax.random.split(key, len(matrices)), strict=True):
            rows, columns = matrices[path].shape
            a = jax.random.uniform(one, (rows, rank), minval=-1, maxval=1) * rows**-0.5
            made["/".join(path[:-1])] = {"a": a, "b": jnp.zeros((rank, columns))}
        return made

    at = None
    if mesh_of(matrices) is not None:
        at = {"/".join(path[:-1]): _split_as(matrix) for path, matrix in matrices.items()}
    return jax.jit(make, out_shardings=at)(key)


def _split_as(matrix: Array) -> dict[str, NamedSharding]:
    at = matrix.sharding
    assert isinstance(at, NamedSharding)
    rows, columns = (*at.spec, None, None)[:2]
    return {
        "a": NamedSharding(at.mesh, PartitionSpec(rows, None)),
        "b": NamedSharding(at.mesh, PartitionSpec(None, columns)),
    }


def merge(params: Tree, lora: Lora, scale: float) -> Tree:
    """Returns the parameters with the changes added, in the types of the parameters."""
    leaves = cast(dict[tuple[str, ...], Array], flatten_dict(params))
    for name, change in lora.items():
        path = (*name.split("/"), _KERNEL)
        matrix = leaves[path]
        leaves[path] = matrix + (scale * (change["a"] @ change["b"])).astype(matrix.dtype)
    return unflatten_dict(leaves)
