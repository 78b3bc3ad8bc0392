"""Medusa heads: residual blocks on a target's hidden states, one stack for each token ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models import dot_general, named_param
from specjax.types import Weights


class MedusaHeads(nn.Module):
    """Medusa heads: head k (from 0) predicts token t + 2 + k from the hidden state of token t.

        block(x) = x + silu(W x + b),    prediction = softmax(H block(... block(x)))

    The target's own head predicts the token at t + 1.  A block of zeros is the identity.

    Reference: Cai et al. 2024, arXiv 2401.10774, "Medusa heads" (there with one block).

    Attributes:
      num_heads: K.
      hidden_size: E, of the target's hidden states after its final norm.
      vocab_size: V, the target's.
      num_layers: blocks a head.
      own_heads: every head has its own linear map H to the vocabulary (version 1) instead of the
        target's (version 2).
      logit_softcap: the target's, if it caps its logits; for version 2.
      dot_general: as in `Transformer`.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 1
    own_heads: bool = False
    logit_softcap: float | None = None
    dot_general: Callable[..., Array] = dot_general

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """[..., E] -> [..., K, E], before the linear map; with `own_heads` [..., K, V] after it."""
        shape = (self.num_layers, self.num_heads, self.hidden_size)

        def zeros(name: str, axes: tuple[str, ...], *shape: int) -> Array:
            return named_param(self, name, nn.initializers.zeros_init(), axes, shape)

        kernel = zeros(
            "kernel", ("layers", "medusa", "embed", "embed_out"), *shape, self.hidden_size
        )
        bias = zeros("bias", ("layers", "medusa", "embed_out"), *shape)
        x = jnp.broadcast_to(
            hidden[..., None, :], (*hidden.shape[:-1], self.num_heads, self.hidden_size)
        )
        for layer in range(self.num_layers):
            x = x + nn.silu(self._multiply(x, kernel[layer]) + bias[layer])
        if self.own_heads:
            head = zeros(
                "head",
                ("medusa", "embed", "vocab"),
                self.num_heads,
                self.hidden_size,
                self.vocab_size,
            )
            x = self._multiply(x, head)
        return x

    def _multiply(self, x: Array, kernel: Array) -> Array:
        """[..., K, E] times [K, E, F] -> [..., K, F]: each head has its own matrix."""

        def one(x: Array, kernel: Array) -> Array:
            return self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))

        return jax.vmap(one, (-2, 0), -2)(x, kernel)


def medusa_hidden(heads: MedusaHeads, params: Weights, hidden: Array) -> Array:
    """Applies the heads to hidden states [..., E].

    Returns:
      Their hidden states [..., K, E] before the target's head, or with `own_heads` their logits
      [..., K, V].
    """
    return cast(Array, heads.apply({"params": params}, hidden))


def medusa_logits(heads: MedusaHeads, outputs: Array, target_head: Array | None) -> Array:
    """Returns `medusa_hidden` as float32 logits [..., K, V]; `target_head` is [E, V].

    With `own_heads`, `target_head` is not used and may be None.
    """
    if heads.own_heads:
        return outputs.astype(jnp.float32)
    assert target_head is not None
    dimensions = (((outputs.ndim - 1,), (0,)), ((), ()))
    logits = heads.dot_general(outputs, target_head, dimensions).astype(jnp.float32)
    cap = heads.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def initial_medusa(heads: MedusaHeads, target_head: Array) -> dict[str, Array]:
    """Makes initial parameters: every head predicts what the target's head [E, V] predicts."""
    shape = (heads.num_layers, heads.num_heads, heads.hidden_size)
    params = {
        "kernel": jnp.zeros((*shape, heads.hidden_size), target_head.dtype),
        "bias": jnp.zeros(shape, target_head.dtype),
    }
    if heads.own_heads:
        params["head"] = jnp.tile(target_head, (heads.num_heads, 1, 1))
    return params
