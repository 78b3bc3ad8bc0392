"""Checks that a model of your own keeps the contract of `specjax.contract.Model`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.contract import CacheT, Model, ParamsT
from specjax.sampling import make_key
from specjax.types import ModelOutput

_ROWS, _TOKENS = 2, 8


def check_model(model: Model[ParamsT, CacheT], params: ParamsT, tolerance: float = 1e-3) -> None:
    """Reads a few random tokens in one pass, in several, and as a tree; compares the logits.

    Args:
      model: for example from `from_function`.
      params: its arrays.
      tolerance: the largest difference that is allowed, relative to the largest logit; float32
        needs 1e-3 at most.

    Raises:
      ValueError: naming the broken rule of the contract, by how much it is broken, and where to
        look.

    Example:
      >>> model = from_function(read, vocab_size=256, max_positions=1024)
      >>> check_model(model, params)
    """
    if min(model.max_positions, model.vocab_size) < _TOKENS:
        raise ValueError(
            f"the check reads {_TOKENS} different tokens; the model must have room for them"
        )
    apply = jax.jit(model.apply)  # each shape of the check is one program
    keys = jax.random.split(make_key(0), _ROWS)
    order = jax.vmap(lambda key: jax.random.permutation(key, model.vocab_size))(keys)
    tokens = order[:, :_TOKENS].astype(jnp.int32)

    def read(
        tokens: Array,
        cache: CacheT | None = None,
        depth: Array | None = None,
        mask: Array | None = None,
    ) -> ModelOutput[CacheT]:
        start = 0 if cache is None else cache.length[:, None]
        depth = jnp.arange(tokens.shape[1]) if depth is None else depth
        return apply(params, tokens, jnp.broadcast_to(start + depth, tokens.shape), cache, mask)

    plain = read(tokens).logits
    scale = float(jnp.abs(plain).max())

    def compare(logits: Array, wanted: Array, law: str) -> None:
        apart = float(jnp.abs(logits.astype(jnp.float32) - wanted.astype(jnp.float32)).max())
        if not apart <= tolerance * scale:
            raise ValueError(f"{law} (logits up to {scale:.3g} differ by {apart:.3g})")

    changed = read(tokens.at[:, -2:].set(tokens[:, :2])).logits
    compare(
        changed[:, :-2],
        plain[:, :-2],
        "the model is not causal: a token changes the logits of tokens before it",
    )

    # The rows commit 1 and 3 of 4 tokens, stage tokens that are all rejected, and continue.
    cache, count = model.init_cache(_ROWS, 3 * _TOKENS), jnp.array([1, 3])
    out = read(tokens[:, :4], cache)
    compare(
        out.logits, plain[:, :4], "a pass with an empty cache differs from a pass without a cache"
    )
    out = read(tokens[:, 4:], out.staged.commit(count))
    if not np.array_equal(out.staged.length, count):
        raise ValueError("apply must leave cache.length as it is: commit moves it")
    cache = out.staged.commit(jnp.zeros_like(count))
    index = count[:, None] + jnp.arange(4)
    ahead = jnp.take_along_axis(tokens, index, axis=1)
    wanted = jnp.take_along_axis(plain, index[..., None], axis=1)
    out = read(ahead, cache)
    law = (
        "the logits after a commit differ from those of one pass: are tokens staged at "
        "cache.length of their own row, do they attend to exactly the committed tokens before "
        "them, and do positions come from `positions`?"
    )
    compare(out.logits, wanted, law)
    if not model.reads_trees:
        return

    # A tree: the root has two children, a wrong token and the right one, which has a child.
    other = tokens[:, ::-1][:, :1]
    nodes = jnp.concatenate([ahead[:, :1], other, ahead[:, 1:3]], axis=1)
    mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)[None]
    out = read(nodes, cache, jnp.array([0, 1, 1, 2]), mask)
    law = (
        "a branch of a tree gives other logits than the same tokens as a chain: is `mask` applied, "
        "and do siblings have the same position?"
    )
    compare(out.logits[:, [0, 2, 3]], wanted[:, :3], law)
    cache = out.staged.commit(
        jnp.full_like(count, 3), jnp.broadcast_to(jnp.array([0, 2, 3]), (_ROWS, 3))
    )
    compare(
        read(ahead[:, 3:], cache).logits,
        wanted[:, 3:],
        "the logits after cache.commit with a path differ from those after the same tokens",
    )
