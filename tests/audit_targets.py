"""Targets that read wrongly, and a proposer that reads an inner layer, for audits of toys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from table_model import PLACES, WIDTH

from specjax import Proposal
from specjax.caches import RecurrentCache
from specjax.contract import Model, Proposer
from specjax.types import ModelOutput


@dataclasses.dataclass(frozen=True)
class Wrapped(Model):
    """Reads as `inner` reads."""

    inner: Model

    def __post_init__(self):
        own = self.inner
        self.declare(
            vocab_size=own.vocab_size, max_positions=own.max_positions,
            reads_trees=own.reads_trees, num_taps=own.num_taps,
        )  # fmt: skip

    def init_cache(self, batch, size):
        return self.inner.init_cache(batch, size)

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        return self.inner.apply(params, tokens, positions, cache, mask, taps)


class FlatMask(Wrapped):
    """Reads a tree as if it were a chain: a node sees its siblings."""

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        return super().apply(params, tokens, positions, cache, None, taps)


class TapsBehind(Wrapped):
    """Returns the inner layers' outputs of the token before, where it has a cache."""

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        out = super().apply(params, tokens, positions, cache, mask, taps)
        if cache is None or not taps:
            return out
        return out.replace(features=jnp.roll(out.features, 1, axis=1))


class CoarsePasses(Wrapped):
    """Rounds its logits to bfloat16 in passes over several tokens."""

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        out = super().apply(params, tokens, positions, cache, mask, taps)
        if cache is None or tokens.shape[1] == 1:
            return out
        return out.replace(logits=out.logits.astype(jnp.bfloat16).astype(jnp.float32))


class OtherBits(Wrapped):
    """No fault: its logits differ in their last bits in passes over several tokens."""

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        out = super().apply(params, tokens, positions, cache, mask, taps)
        if cache is None or tokens.shape[1] == 1:
            return out
        return out.replace(logits=out.logits * (1 + 2.0**-22))


class UnscaledCache(Wrapped):
    """Reads what its cache holds without the scale of its codes: the terms of committed tokens are
    half of what they should be.  Logits of a table are sums of such terms."""

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        out = super().apply(params, tokens, positions, cache, mask, taps)
        if cache is None:
            return out
        fresh = super().apply(params, tokens, positions, None, mask, taps)
        return out.replace(logits=fresh.logits + 0.5 * (out.logits - fresh.logits))


@dataclasses.dataclass(frozen=True)
class Recurrent(Model):
    """A state of half the state before and the token's row of a table; it reads chains only."""

    vocab_size: int
    cache: type[RecurrentCache] = RecurrentCache
    max_positions: int = 64
    reads_trees = False

    def init_cache(self, batch, size):
        return self.cache.create(jnp.zeros((batch, WIDTH)))

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        before = self.init_cache(len(tokens), 1) if cache is None else cache

        def step(state, new):
            state = state / 2 + new
            return state, state

        hidden, after = before.scan(step, params["embedding"][tokens])
        hidden = hidden + params["place"][positions % PLACES]
        return ModelOutput(hidden @ params["head"]["kernel"], hidden, cache and after)


@struct.dataclass
class KeepsRejected(RecurrentCache):
    """Commits the state after all drafts of a pass, the rejected ones too."""

    @classmethod
    def create(cls, state):
        return cls(state, jnp.zeros(len(state), jnp.int32))

    def stage(self, states):
        return KeepsRejected(self.state, self.length, states)

    def commit(self, count, path=None):
        after = super().commit(jnp.where(count > 0, self.staged.shape[1], 0), path)
        return KeepsRejected(after.state, self.length + count)


@struct.dataclass
class LastFeatures:
    last: jax.Array  # [B, F] of the last committed token


@dataclasses.dataclass(frozen=True)
class TapDraft(Proposer):
    """Drafts one token from the sum of a tap's entries at the last committed token."""

    vocab_size: int
    width: int
    taps: tuple[int, ...] = (1,)
    num_nodes = 2
    max_depth = 1
    is_chain = True
    point_mass = True

    def init(self, params, prompt, capacity):
        del params, capacity
        return LastFeatures(jnp.zeros((len(prompt.count), self.width)))

    def propose(self, params, state, context):
        drafted = (jnp.abs(state.last).sum(-1) * 8).astype(jnp.int32) % self.vocab_size
        tokens = jnp.stack([context.pending, drafted], axis=1)
        parent = jnp.broadcast_to(jnp.array([-1, 0]), tokens.shape)
        return Proposal(tokens, parent, point_mass=True), state

    def observe(self, params, state, block):
        return self._seen(state, block)

    def _seen(self, state, block):
        at = jnp.maximum(block.count - 1, 0)[:, None, None]
        new = jnp.take_along_axis(block.features, at, axis=1)[:, 0]
        return LastFeatures(jnp.where((block.count > 0)[:, None], new, state.last))
