"""Solves small unit-triangular systems by products alone.

LAPACK's solver for triangles, which XLA calls on a CPU, shares a system of 8 nodes among threads of
its own, and these spin beside the threads of the products that follow.  Here the inverse is built
from the inverses of its halves,

    (A 0)^-1   (  A^-1          0   )
    (C B)    = ( -B^-1 C A^-1  B^-1 )

for all parts of a size at once.

Reference: Golub and Van Loan, Matrix Computations, 4th edition, section 3.1 (blocks of triangular
systems).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

_WHOLE = 16  # up to this size, parts are selected by masks: fewer products than slices would need

_product = functools.partial(
    jnp.einsum, "...ij,...jk->...ik", precision="highest", preferred_element_type=jnp.float32
)


def solve(lower: Array, right: Array) -> Array:
    """Returns X of (I + L) X = R.

    Args:
      lower: L, [..., N, N] float32, zero on the diagonal and above.
      right: R, [..., N, C] float32.

    Returns:
      X, [..., N, C] float32.
    """
    size = lower.shape[-1]
    # Products of odd sizes cost more than those of the next power of two.
    whole = 1 << (size - 1).bit_length()
    pad = (*((0, 0) for _ in lower.shape[:-2]), (0, whole - size), (0, whole - size))
    return _product(_inverse(jnp.pad(lower, pad))[..., :size, :size], right)


def _inverse(lower: Array) -> Array:
    """Returns the inverse of I + L, for L [..., N, N] where N is a power of two."""
    size = lower.shape[-1]
    if size <= _WHOLE:
        return _inverse_by_masks(lower)
    half = size // 2
    first, second = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_product(_product(second, lower[..., half:, :half]), first)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _inverse_by_masks(lower: Array) -> Array:
    """Computes `_inverse`; D holds the inverses of the diagonal blocks, so D - D C D does next."""
    at = np.arange(lower.shape[-1])
    blocks = 1
    inverse = jnp.broadcast_to(jnp.eye(len(at), dtype=jnp.float32), lower.shape)
    while blocks < len(at):
        pairs, own = at // (2 * blocks), at // blocks
        corners = (pairs[:, None] == pairs) & (own[:, None] != own)
        corner = jnp.where(corners, lower, 0.0)
        if blocks == 1:  # the inverse of a block of one is one
            inverse = inverse - corner
        else:
            inverse = inverse - _product(_product(inverse, corner), inverse)
        blocks *= 2
    return inverse
