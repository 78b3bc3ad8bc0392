"""A decoder in two halves: one drafts on its own devices, the other verifies on others.

    draft's half      propose ---- proposal --->  verify, commit      target's half
                      commit  <---- verdict ----

Both halves are decoders.  The target's half has a proposer that is a stub of the other half, and
the draft's half has a target that reads nothing.  The draft's half needs only the accepted node and
the next token to commit the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import ClassVar, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import sampling
from specjax._internal.checks import settle
from specjax.contract import Cache, Context, Model, ParamsT, Proposer, Rule, StateT
from specjax.decoding import Verification
from specjax.tree import Tree
from specjax.types import (
    ABSENT,
    Block,
    DecodeState,
    ModelOutput,
    Params,
    Proposal,
    StepInfo,
    Verdict,
)


@runtime_checkable
class DecoderLike(Protocol):
    """The fields and methods of `specjax.Decoder` that this package uses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    @property
    def target(self) -> Model: ...
    @property
    def proposer(self) -> Proposer: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_logprobs(self) -> int | None: ...
    @property
    def prefill(self) -> Callable[..., DecodeState]: ...
    @property
    def run(self) -> Callable[..., DecodeState]: ...
    @property
    def stream(self) -> Callable[..., Generator[DecodeState, Array | np.ndarray | None, None]]: ...
    @property
    def insert(self) -> Callable[..., DecodeState]: ...

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]: ...

    def verify(self, params: Params, state: DecodeState, proposal: Proposal) -> Verification: ...

    def commit(
        self, params: Params, state: DecodeState, proposal: Proposal, verification: Verification
    ) -> tuple[DecodeState, StepInfo]: ...


_D = TypeVar("_D", bound=DecoderLike)


def check_separable(proposer: Proposer) -> None:
    """Raises ValueError if a proposer cannot draft on other devices than the target's."""
    name, cure = type(proposer).__name__, "use a chain or a tree over a draft model"
    source = type(vars(proposer).get("source")).__name__
    name = name if source == "NoneType" else f"{name} over {source}"
    faults = (
        (
            proposer.shares_cache,
            "drafts with the target's own layers, in the target's cache, so it cannot be separated "
            "from the target",
        ),
        (
            proposer.taps,
            "reads the target's hidden states of the tokens that are being verified, so it cannot "
            "draft before the verification ends",
        ),
        (
            not proposer.separable,
            "has no draft model whose passes could run beside those of the target",
        ),
    )
    for is_wrong, why in faults:
        settle((is_wrong, f"{name} {why}: {cure}"))


def target_half(decoder: _D) -> _D:
    """Returns the decoder that verifies the proposals of the other half."""
    proposer = decoder.proposer
    remote = Remote(
        proposer.num_nodes, proposer.max_depth, proposer.is_chain, narrower=proposer.narrower
    )
    return dataclasses.replace(decoder, proposer=remote)


def draft_half(decoder: _D) -> _D:
    """Returns the decoder that drafts, without the target's cache and log-probabilities."""
    unread = Unread(decoder.target.vocab_size, decoder.target.max_positions)
    return dataclasses.replace(decoder, target=unread, num_logprobs=None)


def commit_by(
    decoder: DecoderLike, params: Params, state: DecodeState, proposal: Proposal, verdict: Verdict
) -> DecodeState:
    """Returns the draft's state after a proposal of which the target accepted `verdict` [B]."""
    rows, nodes = proposal.tokens.shape
    tree = tree_of(decoder, state, proposal)
    output = ModelOutput(jnp.zeros(()), jnp.zeros((rows, nodes, 0)), state.cache)
    verification = Verification(verdict, tree, output, jnp.zeros(()))
    return decoder.commit(params, state, proposal, verification)[0]


def tree_of(decoder: DecoderLike, state: DecodeState, proposal: Proposal) -> Tree:
    """Returns the trees of all rows, without drafts that are deeper than a row's `num_drafts`."""
    depth, is_chain = decoder.proposer.max_depth, decoder.proposer.is_chain
    tree = jax.vmap(lambda parent: Tree.of(parent, depth, is_chain))(proposal.parent)
    allowed = tree.depth <= state.num_drafts[:, None]
    return dataclasses.replace(tree, parent=jnp.where(allowed, tree.parent, ABSENT))


@struct.dataclass
class UnreadCache(Cache):
    """The cache of a target that reads nothing: the number of committed tokens."""

    length: Array  # [B] int32

    commits_paths = True
    keeps_scratch = True

    def commit(self, count: Array, path: Array | None = None) -> Self:
        del path
        return dataclasses.replace(self, length=self.length + count)

    def rewind(self, to: Cache) -> Self:
        return dataclasses.replace(self, length=to.length)


@dataclasses.dataclass(frozen=True)
class Unread(Model[None, UnreadCache]):
    """Replaces the target on the devices of the draft."""

    vocab_size: int
    max_positions: int
    reads_trees = True

    def init_cache(self, batch: int, size: int) -> UnreadCache:
        del size
        return UnreadCache(jnp.zeros(batch, jnp.int32))

    def apply(
        self,
        params: None,
        tokens: Array,
        positions: Array,
        cache: UnreadCache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput[UnreadCache]:
        del params, positions, mask, taps
        nothing = jnp.zeros((*tokens.shape, 0))
        return ModelOutput(nothing, nothing, cache)


@dataclasses.dataclass(frozen=True)
class Remote(Proposer[None, tuple[()]]):
    """Replaces the draft on the devices of the target."""

    num_nodes: int
    max_depth: int
    is_chain: bool
    narrower: tuple[int, ...] = ()

    def propose(
        self, params: None, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        raise TypeError("the proposals of this half come from the other one")


@dataclasses.dataclass(frozen=True)
class NextToken(Proposer[ParamsT, StateT]):
    """Proposes the `count` likeliest next tokens, by the first pass of another proposer.

    With `coupled`, the likeliest tokens have the greatest logit plus the noise with which the
    target will draw: under shared noise that of the position, and else that of the residual.  The
    state is the other proposer's.  The later passes of that proposer have no effect, so XLA leaves
    them out.
    """

    proposer: Proposer[ParamsT, StateT]
    count: int
    coupled: bool
    # Its proposals are never verified.  Said to be chains, they pass for rules of chains, too.
    is_chain = True

    def __post_init__(self) -> None:
        self.declare(num_nodes=self.count + 1, max_depth=self.count)

    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        return self.proposer.init(params, prompt, capacity)

    def read(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.proposer.read(params, state, block)

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        seen: list[tuple[Array, Array]] = []

        def warp(logits: Array, path: Array | None = None) -> Array:
            warped = context.warp(logits, path)
            seen.append((logits, warped))
            return warped

        self.proposer.propose(params, state, dataclasses.replace(context, warp=warp))
        # Every shape warps the logits after the pending token first.
        logits, warped = (x[:, 0].astype(jnp.float32) for x in seen[0])
        noise: Array | float = 0.0
        if self.coupled and context.shared_noise:
            root = jnp.zeros(1, jnp.int32)
            noise = context.noise(root, root)[:, 0]
        elif self.coupled:
            noise = jax.vmap(lambda draw: draw.residual())(context.draw)
        _, best = sampling.top_k(sampling.scores(logits, warped, noise), self.count)
        tokens = jnp.concatenate([context.pending[:, None], best.astype(jnp.int32)], axis=1)
        return Proposal(tokens, jnp.zeros_like(tokens).at[:, 0].set(ABSENT)), state

    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.proposer.observe(params, state, block)
