"""Sources of one lookup in a table, by the last token of a path or by the pending token.

Shapes see a source through the contract alone, so the laws of a shape are held over these, which
cost next to nothing to trace and compile.  They agree with a `TableModel` now and then.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from toy_models import ToyModels

from specjax.contract import BlockSource, Context, Loaded, Lookahead, Source
from specjax.types import Block, Proposal


@dataclasses.dataclass(frozen=True)
class TableSource(Source):
    """The logits after a token are a row of the parameters [V, V]; it has no state."""

    vocab_size: int
    resumes = True

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        raise ValueError("made for tests, with parameters of its own")

    def init(self, params: Any, prompt: Block, capacity: int, lookahead: Lookahead) -> Any:
        return ()

    def begin(self, params: Any, state: Any, context: Context) -> tuple[Any, Any, Array]:
        return (), (), params[context.pending]

    def extend(self, params: Any, reading: Any, tokens: Array) -> tuple[Any, Array]:
        return (), params[tokens]

    def read_tree(
        self, params: Any, reading: Any, tokens: Array, at: Array, depth: Array, mask: Array
    ) -> tuple[Any, Array]:
        return (), params[jnp.take_along_axis(tokens, at, axis=1)]

    def end(self, params: Any, state: Any, reading: Any, proposal: Proposal) -> Any:
        return ()

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        return ()

    def rest(self, state: Any) -> Any:
        return ()

    def resume(self, params: Any, state: Any, text: Array, length: Array, wanted: Array) -> Any:
        return ()


@dataclasses.dataclass(frozen=True)
class TableBlockSource(BlockSource):
    """The logits at depth d are a row of the parameters [D, V, V], at the pending token."""

    vocab_size: int
    depth: int

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        raise ValueError("made for tests, with parameters of its own")

    def init(self, params: Any, prompt: Block, capacity: int) -> Any:
        return ()

    def marginals(self, params: Any, state: Any, context: Context) -> tuple[Array, Array, Any]:
        pending = context.pending
        return params[:, pending].swapaxes(0, 1), jnp.ones(len(pending), bool), ()

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        return ()


@functools.cache
def rows_of(toys: ToyModels) -> Array:
    """[V, V]: the target's logits after a text of one token, whatever stands before it."""
    return jnp.asarray(toys.plain_logits(np.arange(toys.VOCAB)[:, None])[:, 0])


@functools.cache
def following(toys: ToyModels) -> Array:
    """[3, V, V]: how often a token follows another at distance 1, 2, 3 in texts of the target."""
    counts = np.full((3, toys.VOCAB, toys.VOCAB), 0.1)
    for text in toys.greedy_texts():
        for depth in range(3):
            np.add.at(counts[depth], (text[: -1 - depth], text[1 + depth :]), 1.0)
    return jnp.asarray(np.log(counts / counts.sum(-1, keepdims=True)), jnp.float32)
