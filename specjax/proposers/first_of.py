"""`first_of`: a row asks one proposer, and another where that one has no guess."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.types import ABSENT, Block, Proposal, Proposer, Rule


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """`first` where it proposes anything, else `second`: prompt lookup where a text repeats itself, a model elsewhere.

    Both run on the whole batch, and each row chooses.  Parameters are a pair, and so is the state.

    Where only one of them says what its guesses were drawn from, the other's are point masses, written as distributions
    with all mass on the one guess.  A tree of point masses cannot be written so: beside drawn guesses
    it needs a rule that shares noise.

    `generate` takes Medusa heads with their weights, or a bank of them, for either part.
    """

    first: Any  # a Proposer
    second: Any  # another

    def __post_init__(self):
        if self.first.max_depth != self.second.max_depth:
            raise ValueError(
                f"the first proposer guesses {self.first.max_depth} deep and the second {self.second.max_depth}; "
                "give both the same depth (num_drafts, or the number of levels)"
            )
        for part in (self.first, self.second):
            if getattr(part, "shares_cache", False):
                raise ValueError(f"{type(part).__name__} guesses in the target's cache and can only be used alone")

    def check_rule(self, rule: Rule) -> None:
        """Raises ValueError for a rule of independent draws where the parts cannot be mixed."""
        for part, other in ((self.first, self.second), (self.second, self.first)):
            if isinstance(part, FirstOf):
                part.check_rule(rule)
            if not (rule.shared_noise or part.draws or part.is_chain) and other.draws:
                raise _not_drawn(part)

    @property
    def draws(self) -> bool:
        return self.first.draws or self.second.draws

    @property
    def num_nodes(self) -> int:
        return max(self.first.num_nodes, self.second.num_nodes)

    @property
    def max_depth(self) -> int:
        return self.first.max_depth

    @property
    def is_chain(self) -> bool:
        return self.first.is_chain and self.second.is_chain

    def init(self, params: Any, prompt: Block, capacity: int) -> tuple:
        return self.first.init(params[0], prompt, capacity), self.second.init(params[1], prompt, capacity)

    def observe(self, params: Any, state: tuple, block: Block) -> tuple:
        return self.first.observe(params[0], state[0], block), self.second.observe(params[1], state[1], block)

    def propose(self, params: Any, state: tuple, pending: Array, draw: Any, warp: Any) -> tuple[Proposal, tuple]:
        one, state_one = self.first.propose(params[0], state[0], pending, draw, warp)
        two, state_two = self.second.propose(params[1], state[1], pending, draw, warp)
        if one.logits is None and two.logits is not None:
            one = _with_logits(self.first, one, two.logits.shape[-1])
        elif two.logits is None and one.logits is not None:
            two = _with_logits(self.second, two, one.logits.shape[-1])
        one, two = self._padded(one), self._padded(two)
        found = (one.parent != ABSENT).any(1)

        def choose(a, b):
            return jnp.where(found.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        logits = None if one.logits is None else choose(one.logits, two.logits)
        proposal = Proposal(choose(one.tokens, two.tokens), choose(one.parent, two.parent), logits)
        return proposal, (state_one, state_two)

    def _padded(self, proposal: Proposal) -> Proposal:
        """To `num_nodes`, with nodes that are absent."""
        extra = self.num_nodes - proposal.tokens.shape[1]

        def pad(x, value):
            return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

        logits = None if proposal.logits is None else pad(proposal.logits, 0.0)
        return Proposal(pad(proposal.tokens, 0), pad(proposal.parent, ABSENT), logits)


def _with_logits(part: Proposer, proposal: Proposal, size: int) -> Proposal:
    """Point masses as distributions: below each node of a chain lies the next token and no other."""
    if not part.is_chain:
        raise _not_drawn(part)
    below = jnp.roll(proposal.tokens, -1, axis=1)[..., None] == jnp.arange(size)
    return dataclasses.replace(proposal, logits=jnp.where(below, 0.0, -jnp.inf).astype(jnp.float32))


def _not_drawn(part: Proposer) -> ValueError:
    return ValueError(
        f"{type(part).__name__} proposes siblings as point masses, which can stand beside guesses that were drawn "
        "only as a chain; use the rule match, or two proposers that both draw"
    )
