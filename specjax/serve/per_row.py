"""`PerRow`: a proposer in which each row of a batch drafts with a proposer of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.row_writes import write
from specjax.contract import ArrayTree, Context, Proposer, Rule
from specjax.proposers import Aligned
from specjax.tree import Tree
from specjax.types import ABSENT, Block, Proposal

PLAIN = -1
"""The value of `SeveralState.choice` without a proposer."""

_BY, _OFFERED = 8, 16
"""The bits of a code in `SeveralState.origin`; the depth is in the bits below them."""


@struct.dataclass
class SeveralState:
    """The states of all proposers, the choices of each row, and the proposer of each new token."""

    own: tuple[ArrayTree, ...]  # a state for each part
    choice: Array  # [B, C] int32; the part whose drafts a row takes, and those for steps in which
    # the ones before have none; PLAIN: none
    used: Array  # [B] int32; the choice, from 0 on, whose drafts the last step had
    offered: Array  # [B] int32; how many drafts the last step had
    origin: Array  # [B, L] int32; a code for each new token, see `unpack`
    written: Array  # [B] int32; new tokens so far
    # [B, C, sum E] the target's features at the last token of each whole chunk of the prompt, which
    # rows that take over this beginning need; None: no part has taps
    ends: Array | None = None


@struct.dataclass
class Limits:
    """The most drafts of a step by the length of the text: the last entry of the parameters."""

    contexts: Array  # [C] int32, ascending
    drafts: Array  # [C, P] int32 of each part, for texts up to the context; the last for all longer

    def at(self, length: Array) -> Array:
        """Returns [B, P], for texts of so many tokens [B]."""
        return self.drafts[(length[:, None] > self.contexts[:-1]).sum(1)]


@dataclasses.dataclass(frozen=True)
class PerRow(Proposer[tuple[ArrayTree, ...], SeveralState]):
    """Gives each row the drafts of the proposer that it chose, or of its next choice, or none.

    All proposers run on the whole batch, but one that no row chose is skipped with all its passes.
    Proposals always have as many nodes as the largest proposer makes, and the target always reads
    all of them.  So no row can change the shape of a pass over another row, and with it the
    rounding.

    Attributes:
      parts: the proposers, chains and trees; none of them drafts in the target's cache.
      width: only those of at most this many nodes draft, and what the others have read stays as it
        is; None: all draft.

    The parameters are those of the parts, and after them `Limits`, if there are any.

    If one of the parts is an `Aligned`, it is the last one, and it is the first choice of rows of
    which a text is expected; others leave that choice empty.
    """

    parts: tuple[Proposer, ...]
    width: int | None = None

    def __post_init__(self) -> None:
        drafting = [self.parts[index] for index in self.drafting]
        self.declare(
            num_nodes=max([1, *(part.num_nodes for part in drafting)]),
            max_depth=max([0, *(part.max_depth for part in drafting)]),
            is_chain=all(part.is_chain for part in drafting),
            taps=tuple(sorted({tap for part in drafting for tap in part.taps})),
        )

    @property
    def aligned(self) -> int | None:
        """The index of the part that drafts expected texts; None if there is none."""
        last = len(self.parts) - 1
        return last if self.parts and isinstance(self.parts[last], Aligned) else None

    @property
    def columns(self) -> int:
        """C, the number of choices of a row."""
        return 2 if self.aligned is None else 3

    def chosen(self, choice: tuple[int, int], expects: bool) -> tuple[int, ...]:
        """Returns the C choices of a row, from those among the drafters of an engine.

        Args:
          choice: as `Row.choice`.
          expects: a text is expected of the row.
        """
        if self.aligned is None:
            return choice
        return (self.aligned if expects else PLAIN, *choice)

    @property
    def drafting(self) -> tuple[int, ...]:
        """The indices of the parts that draft."""
        wide = [part.num_nodes for part in self.parts]
        return tuple(n for n, nodes in enumerate(wide) if nodes <= (self.width or nodes))

    def check(self, rule: Rule) -> None:
        for part in self.parts:
            part.check(rule)

    def init(self, params: tuple[ArrayTree, ...], prompt: Block, capacity: int) -> SeveralState:
        # Another part may commit more tokens in a step than a part drafts, so it gets more room.
        room = capacity + self.num_nodes
        own = [
            part.init(params[n], self.seen(n, prompt), room) for n, part in enumerate(self.parts)
        ]
        if self.aligned is not None:
            rows = len(prompt.tokens)
            nothing = jnp.full((rows, expected_width(capacity)), ABSENT, jnp.int32)
            own[self.aligned] = self.expecting(nothing, prompt.tokens, prompt.count)
        return self.state(tuple(own), len(prompt.tokens), capacity)

    def read(
        self, params: tuple[ArrayTree, ...], state: SeveralState, block: Block
    ) -> SeveralState:
        own = tuple(
            part.read(params[n], state.own[n], self.seen(n, block))
            for n, part in enumerate(self.parts)
        )
        return dataclasses.replace(state, own=own)

    def expecting(self, documents: Array, tokens: Array, count: Array) -> ArrayTree:
        """Returns the state of the part `aligned` for rows that have read their prompts.

        Args:
          documents: [B, X] int32 of `expected_document`.
          tokens: [B, P] int32, any.
          count: [B] int32, tokens of the prompts that were read.
        """
        assert self.aligned is not None
        block = Block(tokens, jnp.zeros((*tokens.shape, 1)), count, None, documents)
        return self.parts[self.aligned].start(None, block, 0)

    def state(self, own: tuple[ArrayTree, ...], rows: int, capacity: int) -> SeveralState:
        """Returns the state of rows that have not chosen yet, from the states of the proposers."""
        zero = jnp.zeros(rows, jnp.int32)
        return SeveralState(
            own=own,
            choice=jnp.full((rows, self.columns), PLAIN, jnp.int32),
            used=zero,
            offered=zero,
            origin=jnp.zeros((rows, capacity + self.max_depth + 1), jnp.int32),
            written=zero,
        )

    def seen(self, index: int, block: Block) -> Block:
        """Returns `block` with the features of the layers that a proposer taps."""
        return dataclasses.replace(block, features=self.features(index, block.features))

    def features(self, index: int, all_features: Array | None) -> Array | None:
        """Returns [..., F] of a proposer, from the features of all taps; None without taps."""
        taps = self.parts[index].taps
        if all_features is None or not taps:
            return None
        layers = jnp.split(all_features, len(self.taps), axis=-1)
        return jnp.concatenate([layers[self.taps.index(tap)] for tap in taps], axis=-1)

    def propose(
        self, params: tuple[ArrayTree, ...], state: SeveralState, context: Context
    ) -> tuple[Proposal, SeveralState]:
        rows = len(context.pending)
        limit = context.num_drafts
        assert limit is not None  # the decoder passes it
        blank = self._padded(
            context.pending[:, None], jnp.full((rows, 1), ABSENT, jnp.int32), context.pending
        )
        made, own = {}, list(state.own)
        limits = params[len(self.parts)] if len(params) > len(self.parts) else None
        for index in self.drafting:
            most = limit
            if isinstance(limits, Limits):
                assert context.length is not None  # the decoder passes it
                most = jnp.minimum(limit, limits.at(context.length)[:, index])
                context = dataclasses.replace(context, num_drafts=most)
            wanted = (state.choice == index).any(1) & (most > 0)
            drafts, own[index] = self._drafts(index, params, state, context, wanted, most, blank)
            made[index] = drafts if most is limit else self._cut(*drafts, most)
        (tokens, parent), used = blank, jnp.zeros(rows, jnp.int32)
        for column in reversed(range(self.columns)):
            for index, (drafted, below) in made.items():
                takes = (state.choice[:, column] == index) & (below != ABSENT).any(1)
                tokens = jnp.where(takes[:, None], drafted, tokens)
                parent = jnp.where(takes[:, None], below, parent)
                used = jnp.where(takes, column, used)
        depth = jax.vmap(lambda row: Tree.of(row, self.max_depth, self.is_chain).depth)(parent)
        offered = ((parent != ABSENT) & (depth <= limit[:, None])).sum(1, dtype=jnp.int32)
        state = dataclasses.replace(state, own=tuple(own), used=used, offered=offered)
        return Proposal(tokens, parent), state

    def observe(
        self, params: tuple[ArrayTree, ...], state: SeveralState, block: Block
    ) -> SeveralState:
        own = list(state.own)
        for index in self.drafting:
            # A row that did not choose a part may have committed more than the part can store.
            count = jnp.where((state.choice == index).any(1), block.count, 0)
            seen = dataclasses.replace(self.seen(index, block), count=count)
            own[index] = self.parts[index].observe(params[index], state.own[index], seen)
        place = jnp.arange(block.tokens.shape[1])
        depth = jnp.where(place < block.count[:, None] - 1, place + 1, 0)
        code = depth | (state.used << _BY)[:, None] | (state.offered << _OFFERED)[:, None]
        return dataclasses.replace(
            state,
            own=tuple(own),
            origin=write(state.origin, code.astype(jnp.int32), state.written),
            written=state.written + block.count,
        )

    def _drafts(
        self,
        index: int,
        params: tuple[ArrayTree, ...],
        state: SeveralState,
        context: Context,
        wanted: Array,
        limit: Array,
        blank: tuple[Array, Array],
    ) -> tuple[tuple[Array, Array], ArrayTree]:
        """Returns tokens and parents [B, N] of a proposer, and its state, if a row wants it."""
        part = self.parts[index]
        depth = jnp.minimum(jnp.max(jnp.where(wanted, limit, 1)), part.max_depth)
        narrowed = dataclasses.replace(context, depth=depth)

        def turn(
            carry: tuple[Array, tuple[Array, Array], ArrayTree],
        ) -> tuple[Array, tuple[Array, Array], ArrayTree]:
            proposal, own = part.propose(params[index], carry[2], narrowed)
            drafts = self._padded(proposal.tokens, proposal.parent, context.pending)
            return jnp.zeros_like(carry[0]), drafts, own

        # A loop of at most one iteration, because XLA copies the result of a `cond` but updates the
        # carry of a loop in place.
        begun = wanted.any(), blank, state.own[index]
        _, drafts, own = jax.lax.while_loop(lambda carry: carry[0], turn, begun)
        return drafts, own

    def _cut(self, tokens: Array, parent: Array, most: Array) -> tuple[Array, Array]:
        """Returns tokens and parents without the drafts deeper than `most` [B]."""
        depth = jax.vmap(lambda row: Tree.of(row, self.max_depth, self.is_chain).depth)(parent)
        return tokens, jnp.where(depth <= most[:, None], parent, ABSENT)

    def _padded(self, tokens: Array, parent: Array, pending: Array) -> tuple[Array, Array]:
        """Returns tokens and parents with `num_nodes` nodes: absent ones are added."""
        more = ((0, 0), (0, self.num_nodes - tokens.shape[1]))
        tokens = jnp.pad(tokens, more).at[:, 0].set(pending)
        return tokens.astype(jnp.int32), jnp.pad(parent, more, constant_values=ABSENT)


def expected_width(capacity: int) -> int:
    """Returns X, the width of the arrays in which a text of an engine is expected."""
    return capacity + 2


def expected_document(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the tokens that are expected of a row, at most `capacity`, as its document [1, X]."""
    made = np.full((1, expected_width(capacity)), ABSENT, np.int32)
    if len(tokens):
        made[0, -len(tokens) - 1 : -1] = tokens
    return made


def unpack(code: int) -> tuple[int, int, int]:
    """Decodes a code of `SeveralState.origin`.

    Returns:
      The depth of the token as a draft, 0 if the target drew it itself; the choice of the row that
      drafted in that step, from 0 on; and the number of drafts of the step.
    """
    return code & 255, code >> _BY & 255, code >> _OFFERED
