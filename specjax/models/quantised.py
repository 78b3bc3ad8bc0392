"""Models whose matrices are in int8.

Quantising the draft changes how many drafts are accepted, never the text.  A quantised target is a
different model from the original, and its texts differ.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.attention import attend
from specjax.models.base import LinenModel
from specjax.models.int8 import (
    INT8_FORMS,
    Int8,
    cpu_int8_dot_general,
    gpu_int8_dot_general,
    int8_dot_general,
    int8_form,
)
from specjax.models.language_model import LanguageModel
from specjax.models.packed import Packed
from specjax.models.products import cpu_dot_general, dot_general, gpu_dot_general
from specjax.models.transformer import Transformer
from specjax.types import Weights

_XLA: dict[Callable[..., Array], Callable[..., Array]] = {
    cpu_dot_general: dot_general,
    gpu_dot_general: dot_general,
    cpu_int8_dot_general: int8_dot_general,
    gpu_int8_dot_general: int8_dot_general,
}


_made: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()
_rounding: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()


def quantise(model: LanguageModel) -> LanguageModel:
    """Returns `model` with its matrices in int8, a quarter of their bytes in float32.

    The embedding stays as it is; a tied one gets an int8 copy as the output matrix.  Quantising the
    same model again returns the same object.

    Raises:
      ValueError: the model is not a specjax Transformer.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> specjax.quantise(draft) is specjax.quantise(draft)
      True
    """
    form = quantised_form(model)
    if form is model:
        return model
    if model not in _made:
        tied = "head" not in model.params
        params = (
            {**model.params, "head": {"kernel": model.params["embedding"].T}}
            if tied
            else model.params
        )
        _made[model] = dataclasses.replace(form, params=rounded_weights(params))
    return _made[model]


def quantised_form(model: LanguageModel) -> LanguageModel:
    """Returns the int8 model without converting the weights, which is enough for checks.

    Raises:
      ValueError: as `quantise`.
    """
    network = model.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        raise ValueError(
            f"{model.name} is a {type(network).__name__}; only a specjax Transformer, as "
            "specjax.load returns, can be quantised here: a model of your own must quantise its "
            "weights itself"
        )
    if network.module.dot_general in INT8_FORMS.values():
        return model
    separate = "head" not in model.params or network.module.separate_head
    module = network.module.clone(
        dot_general=int8_form(network.module.dot_general),
        separate_head=separate,
        transposed=False,
    )
    made = dataclasses.replace(network, module=module)
    return dataclasses.replace(model, model=made, name=f"{model.name} in int8")


def rounded_weights(params: Mapping[str, Any]) -> Weights:
    """Returns parameters whose kernels are `Int8`."""
    quantised = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            quantised[name] = rounded_weights(leaf)
        # A kernel [in, out], or a transposed one, which has the name "weight".  So has the weight
        # of a norm, but it is 1-D.
        elif name in ("kernel", "weight") and leaf.ndim == 2:
            # A packed matrix is widened, and rounded again.
            wide = leaf.dense(jnp.float32) if isinstance(leaf, Packed) else leaf
            quantised["kernel"] = jax.jit(Int8.quantise)(wide if name == "kernel" else wide.T)
        else:
            quantised[name] = leaf
    return quantised


def round_activations(model: LanguageModel) -> LanguageModel:
    """Returns `model` with activations in 8 bits where matrices are packed.

    Its output matrix is in int8, as `quantise` makes it.  The same model gives the same object
    again.

    Raises:
      ValueError: as `quantise`.
    """
    if model not in _rounding:
        tied = "head" not in model.params
        head = {"kernel": model.params["embedding"].T} if tied else model.params["head"]
        params = {**_rounded(model.params), "head": rounded_weights(head)}
        _rounding[model] = dataclasses.replace(rounding_form(model), params=params)
    return _rounding[model]


def rounding_form(model: LanguageModel) -> LanguageModel:
    """Returns the model of `round_activations` with the weights as they are.

    Raises:
      ValueError: as `quantise`.
    """
    name = f"{model.name} with int8 activations"
    return dataclasses.replace(quantised_form(model), name=name)


def _rounded(params: Mapping[str, Any]) -> Weights:
    """Returns the parameters with packed matrices that round, and no transposed ones."""
    made = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            made[name] = _rounded(leaf)
            continue
        matrix = name == "weight" and leaf.ndim == 2
        if isinstance(leaf, Packed):
            turned = leaf.turned or matrix
            made["kernel" if matrix else name] = dataclasses.replace(
                leaf, rounds=True, turned=turned
            )
        elif matrix:
            made["kernel"] = leaf.T
        else:
            made[name] = leaf
    return made


def for_several_devices(model: LanguageModel) -> LanguageModel:
    """Returns `model` without `specjax.kernels`, for which XLA would gather split arrays."""
    network = model.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        return model
    module = network.module
    product = _XLA.get(module.dot_general, module.dot_general)
    if product is module.dot_general and module.attend is attend:
        return model
    module = module.clone(dot_general=product, attend=attend)
    return dataclasses.replace(model, model=dataclasses.replace(network, module=module))
