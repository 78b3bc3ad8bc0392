"""`PrefixGRU`: a recurrent network over the drafts so far corrects the logits (Domino).

    m <- GRU(m, embedding of the token before),    logits + W2 silu(W1 [h; m])

h is the slot's hidden state; m is 0 before the anchor.  The GRU has no biases:

    r = sigmoid(Wr x + Ur m),  z = sigmoid(Wz x + Uz m),  n = tanh(Wn x + r * (Un m))
    m <- (1 - z) n + z m

Reference: package `specforge` 0.2.0, Domino; Cho et al. 2014, arXiv 1406.1078, equations 5 to 8.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import within
from specjax.methods.block.correction import Axes, Correction, Shapes, Slot, along_paths, multiply
from specjax.types import Arrays


@dataclasses.dataclass(frozen=True)
class PrefixGRU(Correction):
    """A GRU over drafts.  Attributes: sizes, and the number of uncorrected first drafts."""

    state_size: int
    inner_size: int
    uncorrected: int = 0

    def __post_init__(self) -> None:
        for name, size in (("gru_hidden_dim", self.state_size), ("emb_dim", self.inner_size)):
            within(name, size, 1)

    def shapes(self) -> Shapes:
        h, g, e = self.hidden_size, self.state_size, self.inner_size
        return {
            ("input",): (h, 3 * g),
            ("state",): (g, 3 * g),
            ("inner",): (h + g, e),
            ("output",): (e, self.draft_vocab_size),
        }

    def axes(self) -> Axes:
        return {("output",): (None, "vocab")}

    def correct(self, params: Arrays, slot: Slot, memory: Arrays) -> tuple[Array, Arrays]:
        x = multiply(slot.embed(), params["input"])
        if memory is None:
            memory = jnp.zeros((*slot.previous.shape, self.state_size), x.dtype)
        reset, update, new = jnp.split(x, 3, axis=-1)
        own_reset, own_update, own_new = jnp.split(multiply(memory, params["state"]), 3, axis=-1)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
        update = jax.nn.sigmoid(update + own_update)
        memory = (1 - update) * new + update * memory
        logits = slot.logits[:, None]
        if slot.number < self.uncorrected:
            return jnp.broadcast_to(logits, (*slot.previous.shape, logits.shape[-1])), memory
        inner = jnp.concatenate([along_paths(slot.hidden, slot.previous), memory], axis=-1)
        inner = jax.nn.silu(multiply(inner, params["inner"]))
        return logits + multiply(inner, params["output"]).astype(jnp.float32), memory
