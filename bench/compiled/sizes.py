"""Shapes of models without weights, by name and in a dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from bench.compiled.families import NAMES, published
from bench.compiled.formats import FORMATS
from bench.weights import SIZES as PAIRS
from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.files import rounded_leaf, rounded_rows
from specjax.models import FAMILIES, attend_on, dot_general_on, quantise
from specjax.types import Arrays

VOCABULARY = 128256
DTYPES = ("bfloat16", "float32", "int8", *FORMATS)

# Hidden size, MLP size, layers, heads, key heads, and whether the embedding is the output matrix.
_SHAPES = {
    "tiny": (512, 1024, 2, 8, 4, False),
    "150m": (768, 2048, 8, 12, 4, True),
    "1b": (2048, 8192, 16, 32, 8, True),
    "8b": (4096, 14336, 32, 32, 8, False),
    "70b": (8192, 28672, 80, 64, 8, False),
    "405b": (16384, 53248, 126, 128, 8, False),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
}
"""The shapes of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, table 3), smaller ones, and
Qwen3 8B (Qwen team 2025, arXiv 2505.09388, table 1), whose vocabulary has 151 936 tokens."""

_BENCH = {
    f"{size}{suffix}": (*shape, True)
    for size in ("110m", "850m")
    for suffix, shape in zip(("", "-draft"), PAIRS[size], strict=True)
}
"""The pairs that `python -m bench` measures."""

SIZES = {**_SHAPES, **_BENCH}
TARGETS = (*SIZES, *NAMES)

DRAFT_OF = {
    "tiny": "tiny", "150m": "150m", "1b": "150m", "8b": "1b", "70b": "1b", "405b": "8b",
    "110m": "110m-draft", "850m": "850m-draft",
}  # fmt: skip
"""Target -> its draft model; of any other target it is the 150m."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model and the shapes of its parameters."""

    config: TransformerConfig
    model: LinenModel
    params: Arrays


def config_of(size: str, vocab_size: int | None = None) -> TransformerConfig:
    """Returns the configuration of one of `TARGETS`.

    Args:
      size: its name.
      vocab_size: by default the published one of a family's target, and otherwise `VOCABULARY`.
    """
    if size in NAMES:
        config = published(size)
        return dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size)
    hidden, mlp, layers, heads, kv_heads, tied = SIZES[size]
    return TransformerConfig(
        vocab_size=vocab_size or VOCABULARY,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=131072,
        tied_embeddings=tied,
    )


def shapes_of(
    config: TransformerConfig, dtype: str = "bfloat16", devices: np.ndarray | None = None
) -> Shapes:
    """The model that `specjax.load` makes of a folder on an accelerator.

    Args:
      config: of the model.
      dtype: of `DTYPES`; with int8 and packed matrices the cache and the activations are bfloat16.
      devices: that the model is for, by default several.
    """
    kept = jnp.dtype("bfloat16" if dtype in ("int8", *FORMATS) else dtype)
    device = devices.flat[0] if devices is not None and devices.size == 1 else None
    module = Transformer(config, dot_general_on(device), attend=attend_on(device))
    model = LinenModel(module, kept)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kept), shapes)
    if dtype in FORMATS:
        return Shapes(config, model, _packed(config, shapes, dtype))
    if dtype != "int8":
        return Shapes(config, model, shapes)
    network = [model]

    def rounded(params: Arrays) -> Arrays:
        made = quantise(LanguageModel(model, params))
        network[0] = made.model
        return made.params

    params = jax.eval_shape(rounded, shapes)
    return Shapes(config, network[0], params)


def _packed(config: TransformerConfig, shapes: Arrays, dtype: str) -> Arrays:
    """The shapes of what `specjax.load` makes of a packed folder on an accelerator."""
    leaves: dict[tuple[str, ...], Any] = {**flatten_dict(shapes)}
    for path in rounded_rows(FAMILIES[config.family], config, shapes):
        *stack, rows, columns = leaves[path].shape
        turned = path[-1] != "weight"
        outputs = columns if turned else rows
        # A matrix of one output has the layout, and the outputs are the last axis of its arrays.
        one = np.zeros((rows, 1) if turned else (1, columns), np.float32)
        leaf = rounded_leaf(one, turned, None, "tpu", FORMATS[dtype])
        order = leaf.order  # of the inputs

        def shape(part: Any, stack: list = stack, outputs: int = outputs, order: Any = order):
            inner = part.shape if part is order else (*part.shape[:-1], outputs)
            return jax.ShapeDtypeStruct((*stack, *inner), part.dtype)

        leaves[path] = jax.tree.map(shape, leaf)
    return unflatten_dict(leaves)
