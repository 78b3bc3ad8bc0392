"""The decoder layers of a new drafter, shaped like those of its target."""

from __future__ import annotations

import dataclasses

from specjax.models import Rope, TransformerConfig


def layers_like(
    target: TransformerConfig, num_layers: int, mlp_size: int | None, family: str
) -> TransformerConfig:
    """Returns layers of the sizes of the target's, in the form of Llama or Qwen3.

    These are the forms that published drafters have, whatever the family of their target.

    Args:
      target: the target's configuration.
      num_layers: of the drafter.
      mlp_size: None: the target's.
      family: "llama", or "qwen3", which normalises queries and keys.
    """
    rope = target.rope_of(0)
    return TransformerConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.embedding_size or target.hidden_size,
        mlp_size=mlp_size or target.mlp_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        # Published layouts have no partial rotations, and no queries that grow.
        rope=dataclasses.replace(rope, growth=0.0) if rope and rope.fraction == 1 else Rope(),
        norm_eps=target.norm_eps,
        qk_norm="head" if family == "qwen3" else None,
        family=family,
    )


def taps_of(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns taps of layers from low to high, the last one included, each at most once."""
    count = min(count, num_layers)
    if count == 1:
        return (num_layers,)
    first = min(2, num_layers - count + 1)
    return tuple(first + round(i * (num_layers - first) / (count - 1)) for i in range(count))
