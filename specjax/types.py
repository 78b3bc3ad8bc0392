"""The records that travel along the decoding line.

    DecodeState -> Proposal -> ModelOutput -> Verdict -> Block -> DecodeState

A **proposer** drafts a small tree of tokens (`Proposal`), the **target** reads the whole tree in
one pass (`ModelOutput`), a **rule** accepts the part that the target itself would have said
(`Verdict`), and the accepted tokens are committed (`Block`).  Autoregressive decoding is the empty
tree.  `specjax.contract` has the classes of the parts that make these records.

Dimension letters, used in every annotation of this package:

    B rows (requests)      N nodes of a proposal, root included     D greatest depth of a tree
    T tokens of a block    V vocabulary                             E width of hidden states
    S cache slots          L token buffer                           P prompt tokens, padded
"""

from __future__ import annotations

from typing import Any

from flax import struct
from jax import Array

Arrays = Any
"""A pytree of arrays: parameters, or a state.  Its structure belongs to the class that made it."""

ABSENT = -1
"""The parent of the root, and of a node that proposes nothing; also pads lists of token ids."""


@struct.dataclass
class ModelOutput:
    """What one pass of a model returns."""

    logits: Array  # [B, N, V]
    hidden: Array  # [B, N, E] hidden states of the last layer, after its final norm
    cache: Arrays  # the cache with the N tokens staged, or None when the pass had no cache
    # [B, N, sum E] outputs of the layers in `taps`, side by side; None without taps.
    features: Array | None = None


@struct.dataclass
class Proposal:
    """A draft: a tree in topological order.  A chain is `parent[n] = n - 1`.

    Siblings are distinct tokens.  Sampled drafts were drawn without replacement, in index order,
    from the softmax of their parent's row of `logits`.  A proposer fills `logits` where the rule
    asks for them (`Context.wants_logits`), and may leave them None otherwise.
    """

    tokens: Array  # [B, N] int32; tokens[:, 0] is the pending token, already decided
    parent: Array  # [B, N] int32; parent[n] < n; ABSENT marks the root and absent nodes
    logits: Array | None = None  # [B, N, V] warped; the children of node n were drawn from row n
    # The drafts are a function of the text, with nothing drawn: each is a point mass.
    point_mass: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Verdict:
    """What a rule decided about one row's proposal (vmapped: a leading B)."""

    node: Array  # [] int32; the last accepted node; 0, the root, where every draft was rejected
    next_token: Array  # [] int32; residual token after a rejection, else the bonus token


@struct.dataclass
class Block:
    """Tokens that the target has just committed: `tokens[b, :count[b]]`."""

    tokens: Array  # [B, T] int32, right-padded
    hidden: Array  # [B, T, E] the target's last hidden states at those tokens
    count: Array  # [B] int32
    features: Array | None = None  # [B, T, sum E] outputs of the layers in the proposer's `taps`


@struct.dataclass
class Stats:
    """Counts per row.  Rows that are done, and tokens after an EOS, do not count."""

    target_passes: Array  # [B] int32; speculative steps
    emitted: Array  # [B] int32; new tokens
    accepted: Array  # [B] int32; accepted drafts among them
    tested: Array  # [B] int32; drafts that the target judged: the accepted and the first rejected
    proposed: Array  # [B] int32; nodes proposed, whether judged or not


@struct.dataclass
class DecodeState:
    """All that a step needs.  Axis 0 of EVERY leaf is the row, so `insert` is one tree.map."""

    tokens: Array  # [B, L] int32; prompt, then output
    length: Array  # [B] int32; decided tokens; the last is pending: the target has not read it
    limit: Array  # [B] int32; a row stops at this length
    num_drafts: Array  # [B] int32; a row's drafts are at most this deep; 0 decodes it plainly
    done: Array  # [B] bool
    cache: Arrays  # the target's `Cache`; cache.length == length - 1 always
    proposer: Arrays  # the proposer's own state
    rule: Arrays  # the rule, with its numbers as [B] arrays
    key: Array  # [B] PRNG keys, one a row; never consumed: noise is keyed by position
    sampling: Arrays  # sampling.Sampling
    eos: Array  # [B, ids] int32; tokens that end the row, padded with ABSENT
    processors: Arrays  # processors.Processors, or None where all are off
    logprobs: Arrays  # logprobs.Logprobs, or None where they are not recorded
    stats: Stats


@struct.dataclass
class StepInfo:
    """What an observer may want to know of one step."""

    tokens: Array  # [B, D + 1] int32; emitted in this step, right-padded
    count: Array  # [B] int32; how many of them
    num_accepted: Array  # [B] int32; accepted drafts, before an EOS or a limit cuts them
    path: Array  # [B, D + 1] int32; the accepted nodes, root first, padded with the last of them
    proposal: Proposal
    verdict: Verdict
    logits: Array  # [B, N, V] float32; the target's warped logits, by which the rule judged


@struct.dataclass
class Params:
    """Arrays of the target and of the proposer; their structure is in `Decoder`."""

    target: Arrays
    proposer: Arrays = None
