"""Decoding of texts with imposed acceptance, in time by a model of costs: for `bench.adaptive`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import Block, Proposal
from specjax.contract import Context, Proposer
from specjax.drafters import widths_of
from specjax.proposers import AT_ONCE, MEASURED, Adaptive, AdaptiveParams
from specjax.types import ABSENT, Arrays

DEPTH = 8
CHUNK = AT_ONCE * (DEPTH + 1)
WIDTHS = widths_of(DEPTH)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a text: acceptance rates, and how often the lookup finds a match."""

    length: int
    drafter: float
    lookup: float = 0.0
    found: float = 0.0


@dataclasses.dataclass(frozen=True)
class Offers(Proposer):
    """As many drafts as it is asked for; what they are does not matter."""

    num_nodes: int = DEPTH + 1
    max_depth: int = DEPTH
    is_chain = True
    point_mass = True
    resumes = True

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return ()

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        tokens = jnp.broadcast_to(context.pending[:, None], (len(context.pending), self.num_nodes))
        index = jnp.arange(self.num_nodes)
        depth = self.max_depth if context.depth is None else context.depth
        parent = jnp.where((index > 0) & (index <= depth), index - 1, ABSENT)
        parent = jnp.broadcast_to(parent, tokens.shape).astype(jnp.int32)
        return Proposal(tokens, parent, point_mass=True), state

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return state

    def rest(self, state: Arrays) -> Arrays:
        return state

    def resume(
        self, params: Arrays, state: Arrays, text: Arrays, length: Arrays, wanted: Arrays
    ) -> Arrays:
        return state


@dataclasses.dataclass(frozen=True)
class Finds(Offers):
    """Drafts where there is a match: its parameters are [B, L] bool, its state the position [B]."""

    resumes = False

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return jnp.zeros(len(prompt.count), jnp.int32)

    def read(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return state

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        made, _ = super().propose(None, (), context)
        found = jnp.take_along_axis(params, state[:, None], axis=1)
        return dataclasses.replace(made, parent=jnp.where(found, made.parent, ABSENT)), state

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return state + block.count


ALONE = Adaptive(None, Offers(), WIDTHS)
BOTH = Adaptive(Finds(), Offers(), WIDTHS)


@struct.dataclass
class Coins:
    """What decides about the drafts of B texts, the same for every way to decode them."""

    right: Any  # [2, B, L] bool: would the draft of lookup, drafter for this position be right?
    found: Any  # [B, L] bool: does the lookup find a match here?

    @classmethod
    def toss(cls, rng: np.random.Generator, batch: int, sections: Sequence[Section]) -> Coins:
        """Those of texts of these sections, with DEPTH positions behind their end."""
        lengths = [each.length for each in sections]
        lengths[-1] += DEPTH

        def rate(name: str) -> np.ndarray:
            return np.repeat([getattr(each, name) for each in sections], lengths)

        right = [rng.random((batch, sum(lengths))) < rate(name) for name in ("drafter", "lookup")]
        found = rng.random((batch, sum(lengths))) < rate("found")
        return cls(np.stack(right[::-1]), found)


@struct.dataclass
class Costs:
    """What a step costs, in any unit."""

    options: Any  # [O] as the proposer expects it; inf for options that are forbidden
    reading: Any  # [W] of a pass of the target, for each of `WIDTHS`
    draft: Any  # [] of a pass of the draft model

    @classmethod
    def of(cls, proposer: Adaptive, batch: int, token: float, draft: float) -> Costs:
        """By the model of costs."""
        reading = np.array([1 + width * batch * token for width in WIDTHS], np.float32)
        options = [
            reading[WIDTHS.index(depth + 1)] + (name == "drafter") * depth * draft
            for name, depth in proposer.options
        ]
        return cls(np.array(options, np.float32), reading, np.float32(draft))


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode(
    proposer: Adaptive, new: int, coins: Coins, costs: Costs, prior: jax.Array, pause: jax.Array
) -> tuple[Any, Any, Any]:
    """Decode B rows of `new` tokens.

    Args:
      proposer: `ALONE` or `BOTH`.
      new: tokens of each row.
      coins, costs: of the texts and of a step.
      prior, pause: [2], as in `AdaptiveParams`.

    Returns:
      The seconds of all steps, the steps with drafts as a share of all, and the last state.
    """
    rows = coins.found.shape[0]
    params = AdaptiveParams(
        coins.found, None, costs.options, jnp.array(MEASURED, jnp.int32), prior, pause
    )
    prompt = Block(jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1, 1)), jnp.ones(rows, int))
    state = proposer.start(params, prompt, new + 2)

    def step(carry: Any) -> Any:
        state, written, spent, missed, steps, drafting = carry
        live = written < new
        context = Context(
            pending=jnp.zeros(rows, jnp.int32),
            draw=None,  # type: ignore[arg-type]
            warp=None,  # type: ignore[arg-type]
            shared_noise=True,
            wants_logits=False,
            cache=None,  # type: ignore[arg-type]
            num_drafts=jnp.where(live, DEPTH, 0),
            remaining=new - written,
            text_is_fixed=True,
        )
        _, state = proposer.propose(params, state, context)
        offered = state.offered
        window = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (DEPTH,)))
        right = jnp.where(state.drafted[:, None], coins.right[1], coins.right[0])
        hits = jnp.cumprod(window(right, written), axis=1).sum(1)
        count = jnp.where(live, jnp.minimum(jnp.minimum(hits, offered) + 1, new - written), 0)
        tokens = jnp.zeros((rows, DEPTH + 1), jnp.int32)
        block = Block(tokens, tokens[..., None].astype(jnp.float32), count)
        state = proposer.observe(params, state, block)
        passes = jnp.where(state.drafted, offered, 0).max()
        width = jnp.searchsorted(jnp.array(WIDTHS), offered.max() + 1)
        late = jnp.where(passes > 0, jnp.ceil(missed / CHUNK), 0.0)
        spent += costs.reading[width] + (passes + late) * costs.draft
        missed = jnp.where(passes > 0, 0, missed + count.max())
        return state, written + count, spent, missed, steps + 1, drafting + (offered.max() > 0)

    zero = jnp.zeros((), jnp.int32)
    carry = (state, jnp.zeros(rows, jnp.int32), jnp.float32(0), zero, zero, zero)
    state, _, spent, _, steps, drafting = jax.lax.while_loop(
        lambda carry: (carry[1] < new).any(), step, carry
    )
    return spent, drafting / steps, state


def fixed(option: tuple[str, int], coins: Coins, costs: Costs, start: int, end: int) -> float:
    """Seconds of decoding the positions from start to end with one option, by a loop over steps."""
    name, depth = option
    right = coins.right[1 if name == "drafter" else 0]
    runs = np.zeros((len(right), right.shape[1] + 1), int)  # right drafts in a row from a position
    for at in range(right.shape[1] - 1, -1, -1):
        runs[:, at] = np.where(right[:, at], runs[:, at + 1] + 1, 0)
    written, rows, spent = np.full(len(right), start), np.arange(len(right)), 0.0
    while (written < end).any():
        offered = np.where(written < end, depth, 0)
        if name == "lookup":
            offered = offered * coins.found[rows, written]
        spent += costs.reading[WIDTHS.index(offered.max() + 1)]
        spent += (name == "drafter") * depth * costs.draft
        written = np.minimum(written + np.minimum(runs[rows, written], offered) + 1, end)
    return spent
