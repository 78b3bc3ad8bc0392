"""`apply_if`: a branch that updates its arrays in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Carry = TypeVar("Carry")


def apply_if(wanted: Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`function(carry)` where `wanted` [] bool is True, else `carry`.

    This is a loop of at most one iteration: XLA copies the buffers that a branch of `cond` returns,
    such as a KV cache, but updates the carry of a loop in place.
    """

    def turn(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        return jnp.zeros_like(wanted), function(state[1])

    return jax.lax.while_loop(lambda state: state[0], turn, (wanted, carry))[1]
