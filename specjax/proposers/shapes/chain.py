"""`Chain`: proposes one draft after the other, from any source."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax._internal.checks import counts, real, within
from specjax._internal.prefix_sums import leading
from specjax.contract import Context, ParamsT, ReadingT, StateT
from specjax.proposers.shapes.base import Shape
from specjax.types import ABSENT, Proposal

_Carry: TypeAlias = tuple[Array, ReadingT, Array, Array, Array, Array, Array | None]
"""The number of the draft, the reading, the last token, all tokens, whether each is present,
whether each row goes on, and the logits that the tokens were drawn from."""


def check_num_drafts(num_drafts: int) -> None:
    """Raises ValueError unless `num_drafts` is a whole number of at least 1."""
    counts(num_drafts=num_drafts)
    within("num_drafts", num_drafts, 1)


@dataclasses.dataclass(frozen=True)
class Chain(Shape[ParamsT, StateT, ReadingT]):
    """Drafts a chain of `num_drafts` (gamma) tokens, each from one pass of the source.

    With a `confidence_threshold` in (0, 1], a chain ends after the first token whose probability
    under the source (before temperature and filters) is below the threshold.  That token itself is
    still drafted: whether a draft exists may depend on the drafts before it but not on its own
    outcome, or rejection sampling would be biased.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1.

    Example:
      >>> drafter = specjax.make_drafter(target, draft, Chain, num_drafts=4)
    """

    num_drafts: int = 4
    confidence_threshold: float = 0.0
    is_chain = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_drafts(self.num_drafts)
        note = ", and 0 switches it off"
        real("confidence_threshold", self.confidence_threshold, "[0, 1]", note)
        self.arrange(self.num_drafts + 1, self.num_drafts, self.num_drafts + 1)

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        if context.depth is not None:
            return self._up_to(context.depth, params, state, context)
        state, reading, logits = self.source.begin(params, state, context)
        tokens, drawn_from = [context.pending], []
        going = [jnp.ones_like(context.pending, bool)] * 2
        for index in range(self.num_drafts):
            warped = context.warp(logits[:, None], jnp.stack(tokens, axis=1)[:, None, 1:])[:, 0]
            node = jnp.array([index])
            tokens.append(sampling.argmax(warped + context.noise(node, node)[:, 0]))
            drawn_from.append(warped)
            if index + 1 == self.num_drafts:
                break
            if self.confidence_threshold == 0:
                reading, logits = self.source.extend(params, reading, tokens[-1])
                continue
            sure = jnp.take_along_axis(jax.nn.softmax(logits), tokens[-1][:, None], axis=1)[:, 0]
            going.append(going[-1] & (sure >= self.confidence_threshold))

            def stay(reading: ReadingT, token: Array, last: Array) -> tuple[ReadingT, Array]:
                return reading, last

            def extend(reading: ReadingT, token: Array, last: Array) -> tuple[ReadingT, Array]:
                return self.source.extend(params, reading, token)

            # Skip the source's pass once every row has stopped.
            reading, logits = jax.lax.cond(
                going[-1].any(), extend, stay, reading, tokens[-1], logits
            )
        parent = jnp.broadcast_to(
            tree.chain(self.num_nodes), (len(context.pending), self.num_nodes)
        )
        if self.confidence_threshold > 0:
            parent = jnp.where(jnp.stack(going, axis=1), parent, ABSENT)
        nodes = jnp.stack(tokens, axis=1)
        known = self.source.known(params, reading, nodes)
        if known is not None:
            parent = jnp.where(leading(known), parent, ABSENT)
        # The last node has no children, so its row of logits is never read.
        logits = jnp.stack([*drawn_from, drawn_from[-1]], axis=1) if context.wants_logits else None
        proposal = Proposal(nodes, parent, logits)
        return proposal, self.source.end(params, state, reading, proposal)

    def _up_to(
        self, depth: Array, params: ParamsT, state: StateT, context: Context
    ) -> tuple[Proposal, StateT]:
        """Runs `propose` with drafts of at most this depth, in a loop that takes no more passes."""
        state, reading, logits = self.source.begin(params, state, context)
        index = jnp.arange(self.num_nodes)

        def draw(logits: Array, tokens: Array, at: Array) -> tuple[Array, Array, Array]:
            """Returns the tokens with the child of node `at`, that child, and its logits."""
            path = jnp.where(index[1:] <= at, tokens[:, 1:], ABSENT)
            warped = context.warp(logits[:, None], path[:, None])[:, 0]
            token = sampling.argmax(warped + context.noise(at[None], at[None])[:, 0])
            return tokens.at[:, at + 1].set(token), token, warped

        def goes_on(going: Array, logits: Array, token: Array) -> Array:
            if self.confidence_threshold == 0:
                return going
            sure = jnp.take_along_axis(jax.nn.softmax(logits), token[:, None], axis=1)[:, 0]
            return going & (sure >= self.confidence_threshold)

        def turn(carry: _Carry[ReadingT]) -> _Carry[ReadingT]:
            at, reading, token, tokens, present, going, drawn = carry
            reading, logits = self.source.extend(params, reading, token)
            tokens, token, warped = draw(logits, tokens, at)
            present = present.at[:, at + 1].set(going)
            drawn = drawn if drawn is None else drawn.at[:, at].set(warped)
            return at + 1, reading, token, tokens, present, goes_on(going, logits, token), drawn

        first = jnp.zeros((), jnp.int32)
        tokens = jnp.zeros((len(context.pending), self.num_nodes), jnp.int32)
        tokens, token, warped = draw(logits, tokens.at[:, 0].set(context.pending), first)
        present = (jnp.zeros(tokens.shape, bool).at[:, 1].set(True)) & (index <= depth)
        drawn = None
        if context.wants_logits:
            drawn = jnp.zeros((*tokens.shape, logits.shape[-1]), jnp.float32).at[:, 0].set(warped)
        going = goes_on(jnp.ones(len(tokens), bool), logits, token)
        carry: _Carry[ReadingT] = (first + 1, reading, token, tokens, present, going, drawn)
        carry = jax.lax.while_loop(lambda carry: (carry[0] < depth) & carry[5].any(), turn, carry)
        _, reading, _, tokens, present, _, drawn = carry
        known = self.source.known(params, reading, tokens)
        if known is not None:
            present &= leading(known)
        parent = jnp.where(present, tree.chain(self.num_nodes), ABSENT)
        proposal = Proposal(tokens, parent, drawn)
        return proposal, self.source.end(params, state, reading, proposal)
