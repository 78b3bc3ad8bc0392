"""`Source` and `BlockSource`: the predictors of the drafts that a shape arranges."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Generic, cast

from jax import Array

from specjax.contract.declared import Part
from specjax.contract.model import Loaded
from specjax.contract.proposer import Context
from specjax.contract.variables import MemoryT, ParamsT, ReadingT, StateT
from specjax.types import Block, Corrected, Proposal


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """The sizes of a shape that its source needs to allocate its state."""

    depth: int  # drafts are at most this deep, so a step commits at most depth + 1 tokens
    staged: int  # the most tokens that are staged at a time, the pending one included
    is_chain: bool  # True if the shape calls only `extend`, False if only `read_tree`


class _Reads(Part, Generic[ParamsT, StateT]):
    """What both kinds of sources do with the tokens of a text."""

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> ParamsT:
        """Returns the source's parameters, as `Proposer.bind`."""

    def read(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        """Returns the state after more of a prompt, as `Proposer.read`."""
        return self.observe(params, state, block)

    def truncate(self, state: StateT, count: Array, last: Array | None) -> StateT | None:
        """Returns the state after the first tokens of a prompt, as `Proposer.truncate`."""
        del state, count, last
        return None

    def catch_up(self, params: ParamsT, state: StateT) -> StateT | None:
        """Returns the state after steps as `read` leaves it, as `Proposer.catch_up`."""
        del params
        return state if type(self).read is _Reads.read else None

    def adapt(self, state: StateT, adapter: Array) -> StateT:
        """Returns the state of rows with these adapters, as `Proposer.adapt`."""
        del adapter
        return state

    @abc.abstractmethod
    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        """Returns the state after `block` is committed."""


class Source(_Reads[ParamsT, StateT], Generic[ParamsT, StateT, ReadingT]):
    """Predicts the next token, one level after another.  A shape turns predictions into drafts.

        propose = begin, then (extend or read_tree) for each level, then end

    A *reading* is the value that these calls pass on within one `propose`: usually the source's
    cache with the drafts of this step.
    """

    vocab_size: int  # the target's
    taps: tuple[int, ...] = ()
    shares_cache: bool = False
    asks_draft: bool = False
    may_abstain: bool = False  # `known` often leaves out all drafts
    reads_documents: bool = False
    resumes: bool = False  # `Proposer.rest` and `Proposer.resume` are `rest` and `resume` here
    waits: bool = False  # as `Proposer.waits`

    PROMISED: ClassVar = {"resumes": ("rest", "resume")}

    @abc.abstractmethod
    def init(self, params: ParamsT, prompt: Block, capacity: int, lookahead: Lookahead) -> StateT:
        """Returns the state before any token, as `Proposer.init`."""

    @abc.abstractmethod
    def begin(
        self, params: ParamsT, state: StateT, context: Context
    ) -> tuple[StateT, ReadingT, Array]:
        """Reads the tokens committed since the last step, and the pending token.

        Returns:
          The state without the pending token, the reading with it, and the logits [B, V] after it,
          on the target's vocabulary.
        """

    @abc.abstractmethod
    def extend(self, params: ParamsT, reading: ReadingT, tokens: Array) -> tuple[ReadingT, Array]:
        """Reads one more token [B] of each row's chain.  Returns the reading and logits [B, V]."""

    @abc.abstractmethod
    def read_tree(
        self,
        params: ParamsT,
        reading: ReadingT,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[ReadingT, Array]:
        """Reads the nodes of a tree below the pending token: all levels so far, in one pass.

        Args:
          params, reading: as above.
          tokens: [B, T] of all nodes but the root.
          at: [B, M] indices among the T of the nodes of the newest level.
          depth: [T] of each node, 0 for the children of the pending token.
          mask: [B or 1, T, T] bool; node n attends to node m where mask[b, n, m] is True.

        Returns:
          The reading, and the logits [B, M, V] after the nodes `at`.
        """

    @abc.abstractmethod
    def end(self, params: ParamsT, state: StateT, reading: ReadingT, proposal: Proposal) -> StateT:
        """Removes the drafts: returns the state of `begin`, in the buffers of the reading."""

    def known(self, params: ParamsT, reading: ReadingT, tokens: Array) -> Array | None:
        """Returns [B, N] bool: the nodes that the source can read; None: all.  Node 0 is pending.

        The shape drops the other nodes with their descendants.
        """
        return None

    def rest(self, state: StateT) -> StateT:
        """Returns the state after a step without drafts, as `Proposer.rest`."""
        raise NotImplementedError  # building an object with resumes=True checks that it exists

    def resume(
        self, params: ParamsT, state: StateT, text: Array, length: Array, wanted: Array
    ) -> StateT:
        """Reads the tokens that were committed without the source, as `Proposer.resume`."""
        raise NotImplementedError  # building an object with resumes=True checks that it exists


class BlockSource(_Reads[ParamsT, StateT], Generic[ParamsT, StateT, ReadingT, MemoryT]):
    """Predicts the next D tokens in one pass.

    Without `corrects`, the prediction of a depth is the same whatever is drafted before it.  With
    it, `correct` changes the logits of a depth for the drafts of a path: a network that is small
    enough to run once a depth.

        propose = marginals, then correct for each depth where the source corrects, then end
    """

    vocab_size: int  # the target's
    depth: int  # D
    taps: tuple[int, ...] = ()
    waits: bool = False  # as `Proposer.waits`
    corrects: bool = False

    PROMISED: ClassVar = {"corrects": ("correct",)}

    @abc.abstractmethod
    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        """Returns the state before any token, as `Proposer.init`."""

    @abc.abstractmethod
    def marginals(
        self, params: ParamsT, state: StateT, context: Context
    ) -> tuple[Array, Array, ReadingT]:
        """Reads the tokens committed since the last step, and the pending token.

        Returns:
          Logits [B, D, V] of the D tokens after the pending one, [B] bool whether the row has any
          (its logits are not used otherwise), and the reading: the value that `correct` and `end`
          get, by default the state.
        """

    def correct(
        self,
        params: ParamsT,
        reading: ReadingT,
        depth: int,
        previous: Array,
        memory: MemoryT | None,
    ) -> Corrected[MemoryT]:
        """Returns the logits of the token at `depth`, from 0, after M paths of each row.

        Args:
          params, reading: as above.
          depth: how many drafts each path has.
          previous: [B, M] the last token of each path; at depth 0 the pending one.
          memory: the memory of each path, which the call for the depth before returned; None at
            depth 0.
        """
        raise NotImplementedError  # building an object with corrects=True checks that it exists

    def end(self, reading: ReadingT) -> StateT:
        """Returns the state after a reading."""
        return cast(StateT, reading)
