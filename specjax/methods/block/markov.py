"""`MarkovHead`: a low-rank bias of the logits that depends on the token before (DSpark).

    e = W1[previous]        (r numbers a token)
    vanilla  logits + W2 e
    gated    logits + W2 (sigmoid(G [h; e] + b) * e)
    rnn      [g, c, o] = J [m; e; h] + b,   m <- sigmoid(g) m + (1 - sigmoid(g)) tanh(c)
             logits + W2 tanh(o)

h is the slot's hidden state and m the memory of the path, 0 at first.  The confidence of a slot is
sigmoid(C [h; e] + b), or sigmoid(C h + b).

Reference: DeepSeek's DeepSpec, packages `specforge` 0.2.0 and `speculators` 0.9.0.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import chosen, within
from specjax.methods.block.correction import Axes, Correction, Shapes, Slot, along_paths, multiply
from specjax.models import look_up
from specjax.types import Arrays

KINDS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class MarkovHead(Correction):
    """A low-rank bias.  Attributes: kind, one of `KINDS`; rank r, where 0 means no bias.

    `confidence_head` is None, or the names of its inputs: "hidden", or "both" with e.
    """

    rank: int
    kind: str = "vanilla"
    confidence_head: str | None = None

    def __post_init__(self) -> None:
        chosen("markov_head_type", self.kind, KINDS)
        within("markov_rank", self.rank, 0, note=", where 0 means no bias")
        if self.confidence_head == "both" and self.rank == 0:
            raise ValueError(
                "the confidence head reads the Markov embedding of the token before, and "
                "markov_rank=0 leaves it out: set confidence_head_with_markov to false"
            )

    def shapes(self) -> Shapes:
        h, r = self.hidden_size, self.rank
        shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
        if r:
            shapes |= {("before",): (self.vocab_size, r), ("after",): (r, self.draft_vocab_size)}
        if r and self.kind == "gated":
            shapes |= {("gate", "kernel"): (h + r, r), ("gate", "bias"): (r,)}
        if r and self.kind == "rnn":
            shapes |= {("joint", "kernel"): (2 * r + h, 3 * r), ("joint", "bias"): (3 * r,)}
        if self.confidence_head is not None:
            size = h + (r if self.confidence_head == "both" else 0)
            shapes |= {("confidence", "kernel"): (size, 1), ("confidence", "bias"): (1,)}
        return shapes

    def axes(self) -> Axes:
        return {("after",): (None, "vocab")} if self.rank else {}

    def correct(self, params: Arrays, slot: Slot, memory: Arrays) -> tuple[Array, Arrays]:
        logits = jnp.broadcast_to(
            slot.logits[:, None], (*slot.previous.shape, slot.logits.shape[-1])
        )
        if self.rank == 0:
            return logits, None
        inner, memory = self.inner(params, slot, memory)
        return logits + multiply(inner, params["after"]).astype(jnp.float32), memory

    def inner(self, params: Arrays, slot: Slot, memory: Arrays) -> tuple[Array, Arrays]:
        """Returns [B, M, r], the factor of W2, and the next slot's memory; the rank is above 0."""
        inner = look_up(params["before"], slot.previous)
        hidden = along_paths(slot.hidden, slot.previous)
        if self.kind == "gated":
            inner = jax.nn.sigmoid(_linear(params["gate"], hidden, inner)) * inner
        elif self.kind == "rnn":
            memory = jnp.zeros_like(inner) if memory is None else memory
            joint = _linear(params["joint"], memory, inner, hidden)
            gate, new, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            memory, inner = gate * memory + (1 - gate) * jnp.tanh(new), jnp.tanh(out)
        return inner, memory

    @property
    def estimates(self) -> bool:
        return self.confidence_head is not None

    def confidence(self, params: Arrays, slot: Slot) -> Array:
        inputs = [along_paths(slot.hidden, slot.previous)]
        if self.confidence_head == "both":
            inputs.append(look_up(params["before"], slot.previous))
        raw = _linear(params["confidence"], *inputs)
        return jax.nn.sigmoid(raw[..., 0].astype(jnp.float32))


def _linear(params: Arrays, *inputs: Array) -> Array:
    return multiply(jnp.concatenate(inputs, axis=-1), params["kernel"]) + params["bias"]
