"""Pairs of models to measure: the shipped one, any two folders, or random weights of a given size."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

import specjax
from specjax import LinenModel, Transformer, TransformerConfig

# hidden, MLP, layers, heads, key heads; the target, then its draft.
SIZES = {
    "15m": ((256, 704, 12, 4, 4), (128, 352, 2, 2, 2)),
    "110m": ((768, 2048, 12, 12, 12), (256, 704, 4, 4, 4)),
    "850m": ((1536, 4096, 26, 16, 16), (512, 1408, 6, 8, 8)),
    "1b": ((2048, 8192, 16, 32, 8), (768, 2048, 8, 12, 4)),
    "8b": ((4096, 14336, 32, 32, 8), (2048, 8192, 16, 32, 8)),
}


def random_pair(size: str, vocab_size: int, folder: pathlib.Path, dtype: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Folders of a random target and draft of Llama's kind, made where they are not there yet."""
    found = []
    for role, (hidden, mlp, layers, heads, kv_heads) in zip(("target", "draft"), SIZES[size], strict=True):
        place = folder / f"{size}-{vocab_size}-{dtype}-{role}"
        found.append(place)
        if (place / "model.safetensors").exists():
            continue
        config = TransformerConfig(
            vocab_size=vocab_size, hidden_size=hidden, mlp_size=mlp, num_layers=layers, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=hidden // heads, max_positions=8192, tied_embeddings=True,
            init_scale=hidden**-0.5,
        )  # fmt: skip
        model = LinenModel(Transformer(config), jnp.dtype(dtype))
        params = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(len(found))))
        specjax.save(specjax.LanguageModel(model, params, None, (), place.name), place)
    return found[0], found[1]
