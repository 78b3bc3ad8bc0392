"""A loaded model with its matrices in 4 bits, as `load(dtype="int4")` reads it from a folder."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from specjax.files import check_rounded_shards, refuse_shards, rounded_leaf, rounded_rows
from specjax.models import (
    FAMILIES,
    Int8,
    LanguageModel,
    LinenModel,
    Transformer,
    is_packed,
)
from specjax.parallel import to_host

_made: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()


def int4_form(model: LanguageModel) -> LanguageModel:
    """Returns the model of `in_int4` with the weights as they are, which is enough for checks.

    Raises:
      ValueError: the model is not a specjax Transformer, or is in int8.
    """
    network = model.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        raise ValueError(
            f"{model.name} is a {type(network).__name__}; only a specjax Transformer, as "
            "specjax.load returns, can be rounded to int4 here"
        )
    leaves = jax.tree.leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, Int8))
    if any(isinstance(leaf, Int8) for leaf in leaves):
        raise ValueError(
            f"{model.name} is in int8 already, and is not rounded again: pass the model that "
            'specjax.load returns, or proposer="self-int8"'
        )
    return dataclasses.replace(model, name=f"{model.name} in int4")


def in_int4(model: LanguageModel) -> LanguageModel:
    """Returns `model` with the matrices of its linear maps in 4 bits, where its parameters are.

    Matrices that are packed stay as they are, and so do the embedding, the output matrix and
    routers.  The same model gives the same object again.

    Raises:
      ValueError: the model is not a specjax Transformer, is in int8, or is split between devices
        within a group of inputs.
    """
    form = int4_form(model)
    if model not in _made:
        config = model.model.module.config
        leaves = cast(
            dict[tuple[str, ...], Any],
            flatten_dict(model.params, is_leaf=lambda _, leaf: is_packed(leaf)),
        )
        rows = rounded_rows(FAMILIES[config.family], config, model.params)
        to_round = [path for path in rows if not is_packed(leaves[path])]
        cuts = []
        for path in to_round:
            leaf = leaves[path]
            if isinstance(leaf.sharding, NamedSharding):
                turned = path[-1] != "weight"
                name = rows[path][0].name
                cuts.append(check_rounded_shards(name, leaf.shape, turned, leaf.sharding))
        faults = [fault for fault in cuts if fault is not None]
        refuse_shards(faults, 'draft in int8 (proposer="self-int8", or draft_dtype="int8")')
        for path in to_round:
            leaf = leaves[path]
            at = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
            platform = next(iter(leaf.devices())).platform
            wide = np.asarray(to_host(leaf)).astype(jnp.float32)
            leaves[path] = rounded_leaf(wide, path[-1] != "weight", at, platform)
        params = cast(dict, unflatten_dict(leaves))
        _made[model] = dataclasses.replace(form, params=params)
    return _made[model]
