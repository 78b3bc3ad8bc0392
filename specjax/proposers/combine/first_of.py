"""`FirstOf`: combines a proposer with a second one, for rows in which the first has no draft."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import settle, typed
from specjax.contract import Context, Loaded, Proposer, Rule
from specjax.proposers.shapes import Shape
from specjax.types import ABSENT, Block, Proposal

_FirstParamsT = TypeVar("_FirstParamsT")
_SecondParamsT = TypeVar("_SecondParamsT")
_FirstT = TypeVar("_FirstT")
_SecondT = TypeVar("_SecondT")


@dataclasses.dataclass(frozen=True)
class FirstOf(
    Proposer[tuple[_FirstParamsT, _SecondParamsT], tuple[_FirstT, _SecondT]],
    Generic[_FirstParamsT, _SecondParamsT, _FirstT, _SecondT],
):
    """Takes for each row the proposal of `first` if it has a draft, else that of `second`.

    An example is prompt lookup for rows that repeat themselves, and a draft model for the others.
    Both run on the whole batch, and each row takes one of the two proposals.  Parameters are a
    pair, and so is the state.

    If only one of the two returns logits, the drafts of the other are point masses.  They get
    logits that put all mass on one token.

    `widths` are the numbers of tokens that the target may read of a row, ascending and below
    `num_nodes`; by default those that both proposers have.
    """

    first: Proposer[_FirstParamsT, _FirstT]
    second: Proposer[_SecondParamsT, _SecondT]
    widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        cure = "a proposer; if it has weights, pass specjax.first_of(first, second) as drafter="
        typed(cure, Proposer, first=self.first, second=self.second)
        parts = (self.first, self.second)
        settle(
            (
                self.first.max_depth != self.second.max_depth,
                f"the first proposer drafts {self.first.max_depth} deep and the second "
                f"{self.second.max_depth}; give both the same depth (num_drafts, or the number of "
                "levels)",
            ),
            *(
                (
                    part.shares_cache,
                    f"{_called(part)} drafts in the target's cache and can only be used alone",
                )
                for part in parts
            ),
            (
                self.first.taps and self.second.taps and self.first.taps != self.second.taps,
                f"the proposers read the layers {self.first.taps} and {self.second.taps} of the "
                "target; give both the same taps",
            ),
        )
        shared = tuple(sorted(set(self.first.narrower) & set(self.second.narrower)))
        self.declare(
            num_nodes=max(part.num_nodes for part in parts),
            max_depth=self.first.max_depth,
            is_chain=all(part.is_chain for part in parts),
            taps=self.first.taps or self.second.taps,
            point_mass=all(part.point_mass for part in parts),
            asks_draft=any(part.asks_draft for part in parts),
            narrower=shared if self.widths is None else self.widths,
            reads_documents=any(part.reads_documents for part in parts),
        )

    def check(self, rule: Rule) -> None:
        for part, other in ((self.first, self.second), (self.second, self.first)):
            part.check(rule)
            if rule.wants_logits and part.point_mass and not other.point_mass and not part.is_chain:
                raise ValueError(
                    f"{_called(part)} proposes siblings as point masses, which cannot be combined "
                    "with sampled drafts; use the rule match, or two proposers that both sample"
                )

    def bind(self, target: Loaded, draft: Loaded | None) -> tuple[_FirstParamsT, _SecondParamsT]:
        return (
            self.first.bind(target, draft if self.first.asks_draft else None),
            self.second.bind(target, draft if self.second.asks_draft else None),
        )

    def init(
        self, params: tuple[_FirstParamsT, _SecondParamsT], prompt: Block, capacity: int
    ) -> tuple[_FirstT, _SecondT]:
        return self.first.init(params[0], prompt, capacity), self.second.init(
            params[1], prompt, capacity
        )

    def read(
        self,
        params: tuple[_FirstParamsT, _SecondParamsT],
        state: tuple[_FirstT, _SecondT],
        block: Block,
    ) -> tuple[_FirstT, _SecondT]:
        return self.first.read(params[0], state[0], block), self.second.read(
            params[1], state[1], block
        )

    def truncate(
        self, state: tuple[_FirstT, _SecondT], count: Array, last: Array | None
    ) -> tuple[_FirstT, _SecondT] | None:
        one = self.first.truncate(state[0], count, last if self.first.taps else None)
        two = self.second.truncate(state[1], count, last if self.second.taps else None)
        return None if one is None or two is None else (one, two)

    def catch_up(
        self, params: tuple[_FirstParamsT, _SecondParamsT], state: tuple[_FirstT, _SecondT]
    ) -> tuple[_FirstT, _SecondT] | None:
        one = self.first.catch_up(params[0], state[0])
        two = self.second.catch_up(params[1], state[1])
        return None if one is None or two is None else (one, two)

    def adapt(self, state: tuple[_FirstT, _SecondT], adapter: Array) -> tuple[_FirstT, _SecondT]:
        return self.first.adapt(state[0], adapter), self.second.adapt(state[1], adapter)

    def observe(
        self,
        params: tuple[_FirstParamsT, _SecondParamsT],
        state: tuple[_FirstT, _SecondT],
        block: Block,
    ) -> tuple[_FirstT, _SecondT]:
        return self.first.observe(params[0], state[0], block), self.second.observe(
            params[1], state[1], block
        )

    def propose(
        self,
        params: tuple[_FirstParamsT, _SecondParamsT],
        state: tuple[_FirstT, _SecondT],
        context: Context,
    ) -> tuple[Proposal, tuple[_FirstT, _SecondT]]:
        one, state_one = self.first.propose(params[0], state[0], context)
        two, state_two = self.second.propose(params[1], state[1], context)
        if one.point_mass and two.logits is not None:
            one = with_logits(one, two.logits.shape[-1])
        elif two.point_mass and one.logits is not None:
            two = with_logits(two, one.logits.shape[-1])
        one, two = self._padded(one), self._padded(two)
        takes_first = (one.parent != ABSENT).any(1)

        def choose(a: Array, b: Array) -> Array:
            return jnp.where(takes_first.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        logits = (
            None if one.logits is None or two.logits is None else choose(one.logits, two.logits)
        )
        tokens, parent = choose(one.tokens, two.tokens), choose(one.parent, two.parent)
        point_mass = one.point_mass and two.point_mass
        return Proposal(tokens, parent, logits, point_mass), (state_one, state_two)

    def _padded(self, proposal: Proposal) -> Proposal:
        """Returns `proposal` with `num_nodes` nodes: absent ones are added."""
        extra = self.num_nodes - proposal.tokens.shape[1]

        def pad(x: Array, value: float) -> Array:
            return jnp.pad(
                x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2), constant_values=value
            )

        logits = None if proposal.logits is None else pad(proposal.logits, 0.0)
        tokens, parent = pad(proposal.tokens, 0), pad(proposal.parent, ABSENT)
        return Proposal(tokens, parent, logits, proposal.point_mass)


def _called(part: Proposer) -> str:
    """Returns a short name for messages: the `repr` of a proposer contains the whole model."""
    kind = type(part).__name__
    return f"{kind} over {type(part.source).__name__}" if isinstance(part, Shape) else kind


def with_logits(proposal: Proposal, size: int) -> Proposal:
    """Returns the point masses of a chain as logits: each node's only child is the next token."""
    below = jnp.roll(proposal.tokens, -1, axis=1)[..., None] == jnp.arange(size)
    logits = jnp.where(below, 0.0, -jnp.inf).astype(jnp.float32)
    return dataclasses.replace(proposal, logits=logits, point_mass=False)
