"""Impose an acceptance on chains and fixed trees, for weights that no draft was trained for.

The proposer does all its work.  Then each draft is replaced: with the given probability by the
token that the target is known to write, and otherwise by another token.  So the costs are real, the
acceptance is the requested one, and the text is still the target's own, which is checked against
plain decoding.  Which drafts are right depends only on row and position, so it is the same for
every contestant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.contract import Context, Proposer
from specjax.decoding import expected_accepted_length
from specjax.proposers import StaticTree
from specjax.types import Arrays, Block, Proposal

State = tuple[Arrays, Array, Array]
"""The state of `Imposed`: the inner state, the length [B], and the inner drafts [B, N]."""

_TOSSES = 512


def coins(rows: int, new: int, rate: float, lookaheads: Sequence[int]) -> np.ndarray:
    """Draw which drafts are right, as bool [rows, new].

    In a short text the acceptance varies by chance.  So this draws many independent tosses, and
    takes the one in which chains of `lookaheads` drafts come closest to the acceptance rate and the
    mean accepted length that `rate` promises.
    """
    tosses = np.random.default_rng(0).random((_TOSSES // rows + 1, rows, new)) < rate

    def luck(toss: np.ndarray) -> float:
        total = 0.0
        for gamma in lookaheads:
            passes, accepted, tested = np.sum([walk(right, gamma) for right in toss], axis=0)
            tau = toss.size / passes
            total += (accepted / tested - rate) ** 2 + (
                tau / expected_accepted_length(rate, gamma) - 1
            ) ** 2
        return total

    return min(tosses, key=luck)


def walk(right: np.ndarray, gamma: int) -> tuple[int, int, int]:
    """Target passes, accepted drafts and judged drafts of a row; `right` [new] as in `coins`."""
    new, runs = len(right), [0] * (len(right) + 1)
    for position in reversed(range(new)):
        runs[position] = runs[position + 1] + 1 if right[position] else 0
    at = passes = accepted = tested = 0
    while at < new:
        run = min(runs[at], gamma)
        count = min(run + 1, new - at)
        at, passes = at + count, passes + 1
        accepted, tested = accepted + min(run, count), tested + min(run + 1, gamma, count)
    return passes, accepted, tested


@struct.dataclass
class Script:
    """Parameters of `Imposed`."""

    inner: Arrays
    text: Array  # [B, L]; the prompt, and what the target writes after it
    right: Array  # [B, L] bool; is the draft of this token right?


@dataclasses.dataclass(frozen=True)
class Imposed(Proposer):
    """The chain `inner` with its drafts replaced.

    The new drafts are a function of the text, so they are point masses.
    """

    inner: Proposer
    vocab_size: int
    is_chain = True
    point_mass = True

    def __post_init__(self) -> None:
        if not self.inner.is_chain or self.inner.shares_cache:
            raise ValueError(
                "acceptance is imposed on chains with a state of their own, and not on a "
                f"{type(self.inner).__name__}"
            )
        self.declare(
            num_nodes=self.inner.num_nodes,
            max_depth=self.inner.max_depth,
            taps=self.inner.taps,
            resumes=self.inner.resumes,
        )

    def init(self, params: Script, prompt: Block, capacity: int) -> State:
        drafted = jnp.zeros((len(prompt.count), self.num_nodes), jnp.int32)
        return self.inner.init(params.inner, prompt, capacity), prompt.count, drafted

    def read(self, params: Script, state: State, block: Block) -> State:
        inner, length, drafted = state
        return self.inner.read(params.inner, inner, block), length + block.count, drafted

    def propose(self, params: Script, state: State, context: Context) -> tuple[Proposal, State]:
        proposal, inner = self.inner.propose(params.inner, state[0], context)
        position = state[1][:, None] + jnp.arange(1, self.num_nodes)
        position = jnp.minimum(position, params.text.shape[1] - 1)
        text, right = (
            jnp.take_along_axis(x, position, axis=1) for x in (params.text, params.right)
        )
        drafts = jnp.where(right, text, (text + 1) % self.vocab_size)
        # The barrier keeps XLA from removing the inner proposer's work as dead code.
        drafts, drafted = jax.lax.optimization_barrier((drafts, proposal.tokens))
        tokens = jnp.concatenate([context.pending[:, None], drafts], axis=1)
        parent = jnp.broadcast_to(tree.chain(self.num_nodes), tokens.shape)
        return Proposal(tokens, parent, point_mass=True), (inner, state[1], drafted)

    def observe(self, params: Script, state: State, block: Block) -> State:
        """Tell the inner proposer that its own drafts were accepted.

        It then reads no token again, like a proposer whose drafts were right.
        """
        inner, length, drafted = state
        tokens = jnp.concatenate([block.tokens[:, :1], drafted[:, 1:]], axis=1)
        accepted = dataclasses.replace(block, tokens=tokens)
        return self.inner.observe(params.inner, inner, accepted), length + block.count, drafted

    def rest(self, state: State) -> State:
        return self.inner.rest(state[0]), *state[1:]

    def resume(
        self, params: Script, state: State, text: Array, length: Array, wanted: Array
    ) -> State:
        return self.inner.resume(params.inner, state[0], text, length, wanted), *state[1:]


@dataclasses.dataclass(frozen=True)
class ImposedTree(Imposed):
    """The tree `inner` with its drafts replaced.

    Of each node's children the first one is the draft that a chain would have, and its siblings are
    wrong.  So the acceptance is that of a chain as deep, and a tree costs what it costs.
    """

    inner: StaticTree
    is_chain = False

    def __post_init__(self) -> None:
        self.declare(
            num_nodes=self.inner.num_nodes, max_depth=self.inner.max_depth, taps=self.inner.taps
        )

    def propose(self, params: Script, state: State, context: Context) -> tuple[Proposal, State]:
        proposal, inner = self.inner.propose(params.inner, state[0], context)
        parent = self.inner.parent
        rank = np.array([sum(parent[:i] == parent[i]) for i in range(1, self.num_nodes)])
        depth = np.zeros(self.num_nodes, int)
        for node in range(1, self.num_nodes):  # parents come first
            depth[node] = depth[parent[node]] + 1
        position = jnp.minimum(state[1][:, None] + depth[1:], params.text.shape[1] - 1)
        text, right = (
            jnp.take_along_axis(x, position, axis=1) for x in (params.text, params.right)
        )
        wrong = (text + 1 + rank) % self.vocab_size
        drafts = jnp.where(right & (rank == 0), text, wrong)
        drafts, drafted = jax.lax.optimization_barrier((drafts, proposal.tokens))
        tokens = jnp.concatenate([context.pending[:, None], drafts], axis=1)
        parents = jnp.broadcast_to(jnp.asarray(parent), tokens.shape)
        return Proposal(tokens, parents, point_mass=True), (inner, state[1], drafted)

    def observe(self, params: Script, state: State, block: Block) -> State:
        inner, length, drafted = state
        inner = self.inner.observe(params.inner, inner, block)
        return inner, length + block.count, drafted
