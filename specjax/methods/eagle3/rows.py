"""The table of an EAGLE-3 head's tensors, by which they are read and written."""

from __future__ import annotations

import functools
from typing import cast

import jax
from flax.traverse_util import flatten_dict

from specjax.methods.eagle3.network import Eagle3Config, eagle3_shapes
from specjax.methods.published import dense_rows, layer_rows
from specjax.models import Tensor


def network_rows(c: Eagle3Config, prefixes: list[str]) -> list[Tensor]:
    """Returns the table of the network's tensors, whose layers have names with these prefixes."""
    rows = [
        *(dense_rows("fc", ("network", "fc")) if c.fuses else []),
        Tensor("norm.weight", ("network", "norm", "weight")),
    ]
    if c.norm_before_fc:
        rows.append(Tensor("input_norm.weight", ("network", "input_norm", "weight")))
    for k in range(c.num_taps if c.fc_norm else 0):
        rows.append(Tensor(f"fc_norm.{k}.weight", ("network", f"fc_norms_{k}", "weight")))
    for i, prefix in enumerate(prefixes):
        path = ("network", f"layers_{i}")
        rows += layer_rows(c.layers, prefix, path)
        norm = "embedding_norm" if i == 0 else "attention_norm"
        rows.append(Tensor(f"{prefix}input_layernorm.weight", (*path, norm, "weight")))
        if i == 0:
            name = f"{prefix}hidden_norm.weight"
            rows.append(Tensor(name, (*path, "feature_norm", "weight")))
    return rows


def network_shapes(c: Eagle3Config) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of each parameter of the network."""
    return dict(_traced(c))


@functools.lru_cache(maxsize=8)
def _traced(c: Eagle3Config) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """Traces the shapes, which takes a fraction of a second."""
    flat = cast(dict[tuple[str, ...], jax.Array], flatten_dict(eagle3_shapes(c)))
    return tuple((("network", *path), leaf.shape) for path, leaf in flat.items())


def mask_row(c: Eagle3Config) -> Tensor:
    """Returns P-EAGLE's learned hidden states [1, 1, n E] for a token that is not known yet."""
    return Tensor("mask_hidden", ("mask_hidden",), shape=(1, 1, c.num_taps * c.target_size))
