"""The tiny target of published drafters, and folders of drafters that are loaded for it."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published
import safetensors.numpy

from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.contract import Context
from specjax.drafters import load_drafter
from specjax.sampling import SharedDraw
from specjax.types import Block


@functools.cache
def target(hidden: int = published.HIDDEN, layers: int = published.LAYERS) -> LanguageModel:
    """A random target whose embedding and head are those of the references."""
    config = TransformerConfig(
        vocab_size=published.VOCAB,
        hidden_size=hidden,
        mlp_size=24,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=64,
        init_scale=0.35,
    )
    model = LinenModel(Transformer(config))
    params = model.init(jax.random.key(5))
    if hidden == published.HIDDEN:
        params["embedding"] = jnp.asarray(published.embedding())
        params["head"] = {"kernel": jnp.asarray(published.head().T)}
    return LanguageModel(model, params, name="toy target")


def write(
    folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    return folder


def write_fixture(folder: pathlib.Path, name: str, **changes: Any) -> pathlib.Path:
    """The folder that the reference package would write, with `changes` in its configuration."""
    made = published.fixture(name)
    config = {**made["config"], **changes}
    return write(folder, config, published.weights(made["tensors"]))


def load(folder: pathlib.Path, name: str, **changes: Any) -> Any:
    return load_drafter(write_fixture(folder, name, **changes), target())


def context(pending: Any, temperature: float = 1.0) -> Context:
    """Without noise and filters."""
    rows = len(pending)
    draw = SharedDraw(jnp.zeros((rows, 32, published.VOCAB)))
    return Context(jnp.asarray(pending), draw, lambda x, path=None: x, True, False, None)


def block(features: np.ndarray, width: int) -> Block:
    """A block of committed tokens [1, width] with these features [1, T, F]."""
    count = features.shape[1]
    padded = np.pad(features, ((0, 0), (0, width - count), (0, 0)), constant_values=9.0)
    return Block(
        jnp.zeros((1, width), jnp.int32),
        jnp.zeros((1, width, published.HIDDEN)),
        jnp.array([count]),
        jnp.asarray(padded),
    )
