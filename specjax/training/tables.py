"""Stores a target's weights in a recording: the matrices that its drafters use."""

from __future__ import annotations

import pathlib

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh

from specjax.models import LanguageModel, LinenModel
from specjax.parallel import TRAINING_RULES, put, shardings, to_host
from specjax.training.trees import Tree

FILE = "shared.safetensors"
_NAMES = ("embedding", "norm", "head")


def packed(target: LanguageModel) -> bytes:
    """Returns a safetensors file with a target's embedding, final norm and output matrix.

    An output matrix that is the embedding is not written twice.
    """
    params, tied = target.params, target.model.module.config.tied_embeddings
    names = (name for name in _NAMES if name in params and not (tied and name == "head"))
    flat = flax.traverse_util.flatten_dict({name: params[name] for name in names}, sep=".")
    return safetensors.numpy.save({name: _bits(to_host(leaf)) for name, leaf in flat.items()})


def unpacked(folder: pathlib.Path, model: LinenModel, mesh: Mesh | None) -> Tree:
    """Returns the parameters in a recording's `FILE`, on a mesh as those of the whole target."""
    flat = safetensors.numpy.load_file(folder / FILE)
    params = flax.traverse_util.unflatten_dict(
        {name: jnp.asarray(_numbers(leaf)) for name, leaf in flat.items()}, sep="."
    )
    if mesh is None:
        return params
    places = shardings(model, mesh, TRAINING_RULES)
    return {name: jax.tree.map(put, part, places[name]) for name, part in params.items()}


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns bfloat16 as whole numbers, since some versions of safetensors cannot write it."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def _numbers(array: np.ndarray) -> np.ndarray:
    return array.view(jnp.bfloat16) if array.dtype == np.uint16 else array
