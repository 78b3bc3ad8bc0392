"""A model whose packed matrices multiply activations that are rounded to 8 bits."""

from __future__ import annotations

import dataclasses
import weakref

import jax

from specjax.models.language_model import LanguageModel
from specjax.models.packed import Packed, is_packed

_made: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()


def round_activations(model: LanguageModel) -> LanguageModel:
    """Returns `model` with activations in 8 bits where matrices are packed; see `load`.

    The same model gives the same object again.
    """

    def rounding(leaf: object) -> object:
        return dataclasses.replace(leaf, rounds=True) if isinstance(leaf, Packed) else leaf

    if model not in _made:
        params = jax.tree.map(rounding, model.params, is_leaf=is_packed)
        name = f"{model.name} with int8 activations"
        _made[model] = dataclasses.replace(model, params=params, name=name)
    return _made[model]
