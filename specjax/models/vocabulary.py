"""Maps logits of a draft's vocabulary to logits of the target's."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def on_target(logits: Array, vocab_size: int, to_draft: Array | None = None) -> Array:
    """Maps [..., U] to [..., V], -inf for tokens that the draft never proposes.

    Args:
      logits: on the draft's vocabulary.
      vocab_size: V of the target.
      to_draft: [V] the draft's token for each of the target's, or a negative number where there is
        none; None: equal ids mean equal tokens, and the padded sizes may differ.
    """
    if to_draft is not None:
        # Each row is gathered by itself.  If one gather takes all rows, XLA:TPU stores the logits
        # as [V, rows] and pads the rows to 128.
        index = jnp.broadcast_to(to_draft, (*logits.shape[:-1], len(to_draft)))
        taken = jnp.take_along_axis(logits, index, axis=-1, mode="clip")
        return jnp.where(to_draft >= 0, taken, -jnp.inf)
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        pad = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
        logits = jnp.pad(logits, pad, constant_values=-jnp.inf)
    return logits[..., :vocab_size]
