"""The records that the stages of a decoding step pass to each other.

    DecodeState -> Proposal -> ModelOutput -> Verdict -> Block -> DecodeState

A **proposer** drafts a small tree of tokens (`Proposal`), the **target** reads the whole tree in
one pass (`ModelOutput`), a **rule** accepts a path from its root (`Verdict`), and the tokens of
that path are committed (`Block`).  Autoregressive decoding is the special case of a tree without
drafts.  `specjax.contract` declares the classes that make these records.

Dimension letters, used in every annotation of this package:

    B rows (requests)      N nodes of a proposal, root included     D greatest depth of a tree
    T tokens of a block    V vocabulary                             E width of hidden states
    S cache slots          L token buffer                           P prompt tokens, padded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from flax import struct
from jax import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ArrayTree: TypeAlias = (
    "Array | np.ndarray | DataclassInstance | Sequence[ArrayTree] | Mapping[str, ArrayTree] | None"
)
"""A pytree of arrays: parameters, or a state.  Its structure belongs to the class that made it."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value of JSON."""

Weights: TypeAlias = Mapping[str, ArrayTree]
"""The parameters of a network, by the names of its layers, as Flax makes them."""

Arrays = Any

_CacheT = TypeVar("_CacheT")
_MemoryT = TypeVar("_MemoryT")

ABSENT = -1
"""The parent of the root, and of an absent node, which holds no draft.  Also pads lists of ids."""


@struct.dataclass
class ModelOutput(Generic[_CacheT]):
    """The outputs of one pass of a model."""

    logits: Array  # [B, N, V]
    hidden: Array  # [B, N, E] hidden states of the last layer, after its final norm
    cache: _CacheT | None  # with the N tokens staged; None when the pass had no cache
    # [B, N, sum E] hidden states after the layers in `taps`, concatenated; None without taps.
    features: Array | None = None

    @property
    def staged(self) -> _CacheT:
        """The cache with the tokens of the pass, which had one."""
        assert self.cache is not None
        return self.cache


@struct.dataclass
class Proposal:
    """The drafts of one step: a tree in topological order.  In a chain, `parent[n] = n - 1`.

    Siblings are distinct tokens.  Sampled drafts were drawn without replacement, in index order,
    from the softmax of their parent's row of `logits`; siblings beyond the tokens of that softmax
    are a function of the text.  A proposer fills `logits` if the rule needs them
    (`Context.wants_logits`); otherwise it may leave them None.
    """

    tokens: Array  # [B, N] int32; tokens[:, 0] is the pending token, the last one of the text
    parent: Array  # [B, N] int32; parent[n] < n; ABSENT marks the root and absent nodes
    logits: Array | None = None  # [B, N, V] warped; the children of node n were drawn from row n
    # True if nothing was sampled: each draft is a function of the text, so its distribution is a
    # point mass.
    point_mass: bool = struct.field(pytree_node=False, default=False)
    # [B, N] the proposer's estimate of the probability that a node is accepted; at most that of its
    # parent, and of the siblings before it.
    chance: Array | None = None
    # [B, N] log of the probability of each node after its parent, by the source alone.
    given: Array | None = None


class Draw(Protocol):
    """The randomness of one step, for ONE row.  A proposer uses it by `Context.noise` only."""

    def noise(self, node: Array, depth: Array) -> Array:
        """Returns [M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""
        ...

    def acceptance(self, num_nodes: int) -> Array:
        """Returns [N] uniform draws in [0, 1), for rules without shared noise."""
        ...

    def residual(self) -> Array:
        """Returns [V] Gumbel noise for the next token, for rules without shared noise."""
        ...


class Warp(Protocol):
    """Warps a model's logits into the logits of the distribution that is sampled, for a batch."""

    def __call__(self, logits: Array, path: Array | None = None) -> Array:
        """[B, M, V] -> [B, M, V] float32, -inf for tokens that the settings exclude.

        `path` [B, M, D] are the tokens from below the root to each of the M nodes, padded on the
        right with ABSENT.  Penalties and similar settings then count the drafts, as they do when
        the target verifies.  Without `path` every node is treated as the root.  That lowers the
        acceptance rate but stays exact, because a rule uses the distribution that a draft was
        drawn from, whatever it is.
        """
        ...


@struct.dataclass
class Corrected(Generic[_MemoryT]):
    """The result of `BlockSource.correct`: the logits of one depth after M paths of each row."""

    logits: Array  # [B, M, V]
    memory: _MemoryT | None = (
        None  # what the next depth has to know of each path; leaves [B, M, ...]
    )
    # [B, M] bool: is a token drafted after the path?  It may not depend on that token.  None: yes.
    goes_on: Array | None = None


@struct.dataclass
class Verdict:
    """The decision of a rule about one row's proposal (vmapped: a leading B)."""

    node: Array  # [] int32; the last accepted node; 0, the root, if every draft was rejected
    next_token: Array  # [] int32; residual token after a rejection, else the bonus token


@struct.dataclass
class Block:
    """Tokens that the target has just committed: `tokens[b, :count[b]]`."""

    tokens: Array  # [B, T] int32, right-padded
    hidden: Array  # [B, T, E] the target's last hidden states at those tokens
    count: Array  # [B] int32
    features: Array | None = None  # [B, T, sum E] hidden states after the proposer's `taps`
    # Of a prompt: [B, X] int32 texts to look up in, which the target does not read.  Each of them
    # has ABSENT before and after it; padded with ABSENT on the left.
    documents: Array | None = None
    # It is a whole prompt, and not one of several blocks of it.
    whole: bool = struct.field(pytree_node=False, default=False)
    # In `read`: the target's cache, in which these tokens of the prompt are committed.
    cache: Any = None


@struct.dataclass
class Stats:
    """Counts per row.  Rows that are done, and tokens after an EOS, are not counted."""

    target_passes: Array  # [B] int32; one per step
    emitted: Array  # [B] int32; new tokens
    accepted: Array  # [B] int32; new tokens that were drafts
    tested: Array  # [B] int32; judged drafts: the accepted ones, and 1 per step with a rejection
    proposed: Array  # [B] int32; all drafts, whether judged or not
    drafting: Array  # [B] int32; passes with at least one draft


@struct.dataclass
class DecodeState:
    """The state of all rows between two steps.  Axis 0 of EVERY leaf is the row."""

    tokens: Array  # [B, L] int32; prompt, then output
    length: Array  # [B] int32; of the text; its last token is pending: the target has not read it
    limit: Array  # [B] int32; a row stops at this length
    num_drafts: Array  # [B] int32; a row's drafts are at most this deep; 0 is plain decoding
    done: Array  # [B] bool
    cache: Any  # the target's `Cache`; cache.length == length - 1 always
    proposer: Any  # the proposer's own state
    rule: Any  # the rule, with its numbers as [B] arrays
    key: Array  # [B] PRNG keys; they never change, because each step folds in its position
    sampling: Any  # sampling.Sampling
    eos: Array  # [B, ids] int32; tokens that end the row, padded with ABSENT
    processors: Any  # processors.Processors, or None where all are off
    logprobs: Any  # logprobs.Logprobs, or None where they are not recorded
    stats: Stats


@struct.dataclass
class StepInfo:
    """The results of one step, for logging, for learning from verification, or for tests."""

    tokens: Array  # [B, D + 1] int32; emitted in this step, right-padded
    count: Array  # [B] int32; the number of emitted tokens
    num_accepted: Array  # [B] int32; accepted drafts, before an EOS or a limit cuts them
    path: Array  # [B, D + 1] int32; the accepted nodes, root first, padded with the last of them
    proposal: Proposal
    verdict: Verdict
    logits: Array  # [B, N, V] float32; the target's warped logits, which the rule received


@struct.dataclass
class Params:
    """Arrays of the target and of the proposer.  The `Decoder` holds the models without arrays."""

    target: ArrayTree
    proposer: Any = None
