"""The records that travel along the decoding line, and the protocols of the parts that make them.

    DecodeState -> Proposal -> ModelOutput -> Verdict -> Block -> DecodeState

A **proposer** guesses a small tree of tokens (`Proposal`), the **target** reads the whole tree in one pass
(`ModelOutput`), a **rule** keeps the part that the target itself would have said (`Verdict`), and what is kept becomes
part of the text (`Block`).  Autoregressive decoding is the empty tree.

Dimension letters, used in every annotation of this package:

    B rows (requests)      N nodes of a proposal, root included     D greatest depth of a tree
    T tokens of a block    V vocabulary                             E feature width
    S cache slots          L token buffer                           P prompt tokens, padded
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flax import struct
from jax import Array

ABSENT = -1
"""The parent of the root, and of a node that proposes nothing."""


@struct.dataclass
class ModelOutput:
    """What one pass of a model returns."""

    logits: Array  # [B, N, V]
    hidden: Array  # [B, N, E] features of the last layer, after its final norm
    cache: Any  # the cache with the N tokens staged, or None when none was given


@struct.dataclass
class Proposal:
    """A guess: a tree in topological order.  A chain is `parent[n] = n - 1`.

    Siblings are distinct tokens.  Where `logits` are given they were drawn without replacement, in index order, from
    the softmax of their parent's row; without `logits` every guess counts as a point mass.
    """

    tokens: Array  # [B, N] int32; tokens[:, 0] is the pending token, already decided
    parent: Array  # [B, N] int32; parent[n] < n; ABSENT marks the root and the nodes that are not there
    logits: Array | None  # [B, N, V] warped draft logits that the children of node n were drawn from


@struct.dataclass
class Verdict:
    """What a rule decided about a proposal, for one row (vmapped: a leading B)."""

    path: Array  # [D + 1] int32; the accepted nodes, root first, padded with the last of them
    num_accepted: Array  # [] int32; accepted drafts, the root not counted
    next_token: Array  # [] int32; the residual token after a rejection, the bonus token after full acceptance


@struct.dataclass
class Block:
    """Tokens that the target has just committed: `tokens[b, :count[b]]`."""

    tokens: Array  # [B, T] int32, right-padded
    hidden: Array  # [B, T, E] the target's features at those tokens
    count: Array  # [B] int32


@struct.dataclass
class Stats:
    """What happened so far, per row.  Rows that are done and tokens past an end do not count."""

    target_passes: Array  # [B] int32; speculative steps
    emitted: Array  # [B] int32; new tokens
    accepted: Array  # [B] int32; accepted drafts among them
    tested: Array  # [B] int32; drafts that the target judged: the accepted ones, and the first refused one of a step
    proposed: Array  # [B] int32; nodes proposed, whether judged or not


@struct.dataclass
class DecodeState:
    """Everything that a step needs.  Law: axis 0 of EVERY leaf is the row, so `insert` is one tree.map."""

    tokens: Array  # [B, L] int32; prompt, then output
    length: Array  # [B] int32; decided tokens; the last of them is pending (not yet read by the target)
    limit: Array  # [B] int32; a row stops at this length
    num_drafts: Array  # [B] int32; a row's guesses are at most this deep; 0 is plain decoding
    done: Array  # [B] bool
    cache: Any  # the target's; law: cache.length == length - 1
    proposer: Any  # the proposer's own state
    key: Array  # [B] PRNG keys, one a row; never consumed: noise is keyed by position
    sampling: Any  # sampling.Sampling
    eos: Array  # [B, ids] int32; tokens that end the row, padded with ABSENT
    processors: Any  # processors.Processors, or None where all are off
    logprobs: Any  # logprobs.Logprobs, or None where nobody asked
    stats: Stats


@struct.dataclass
class StepInfo:
    """What an observer may want to know of one step."""

    tokens: Array  # [B, D + 1] int32; emitted in this step, right-padded
    count: Array  # [B] int32; how many of them
    proposal: Proposal
    verdict: Verdict
    logits: Array  # [B, N, V] float32; the target's after each node, warped: what the rule judged by


@struct.dataclass
class Params:
    """Arrays of the target and of the proposer.  Structure is in `Decoder`; only numbers are here."""

    target: Any
    proposer: Any = None


class ChainCache(Protocol):
    """What a model remembers of the committed tokens of each row, and of those that its last pass staged."""

    length: Array  # [B] committed tokens

    @property
    def commits_paths(self) -> bool:
        """Static: is it a `Cache`?"""
        ...

    def commit(self, count: Array) -> Any:
        """Keep the first `count` [B] staged tokens."""
        ...

    def rewind(self, to: Any) -> Any:
        """This cache as it was at `to`, an earlier value of it: what was committed since is scratch.

        A cache that says `keeps_scratch = True` still has it: the next `commit` may keep the first of it after all.
        """
        ...


class Cache(ChainCache, Protocol):
    """One that can keep any path through a tree of staged tokens."""

    def commit(self, count: Array, path: Array | None = None) -> Any:
        """Keep `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""
        ...


class Model(Protocol):
    """A causal language model.  Frozen and hashable: structure only, no arrays."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def reads_trees(self) -> bool:
        """Does it heed `mask`, and does its cache commit paths?  A recurrent model reads chains only."""
        ...

    def init_cache(self, batch: int, size: int) -> Any: ...

    def apply(
        self, params: Any, tokens: Array, positions: Array, cache: Any = None, mask: Array | None = None
    ) -> ModelOutput:
        """Read `tokens` [B, N] at `positions` [B, N].

        Token n sees the committed tokens of its row, and of the N tokens those m with `mask[b, n, m]` (None: causal).
        The N tokens are staged at slots length ... length + N - 1; the length does not move.
        """
        ...


class Proposer(Protocol):
    """Guesses.  Frozen and hashable; what evolves is its state, whose leaves all have the row as axis 0.

    One with `may_abstain = True` often has no guess at all, and spares the target the wide pass then.

    `draws` tells `FirstOf` whether guesses have `Proposal.logits` where a rule asks for independent
    draws; what is chosen, and not drawn, has none.

    A proposer with `shares_cache = True` guesses in the target's cache, behind its length: `propose` is given that
    cache in place of a state, and returns it.
    """

    @property
    def num_nodes(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    @property
    def is_chain(self) -> bool: ...

    @property
    def draws(self) -> bool: ...

    def init(self, params: Any, prompt: Block, capacity: int) -> Any:
        """The state after the prompt but for its last token, which is pending."""
        ...

    def propose(self, params: Any, state: Any, pending: Array, draw: Any, warp: Any) -> tuple[Proposal, Any]:
        """A tree below `pending` [B].  Randomness comes from `draw` alone; `warp` maps logits to sampling logits.

        `warp(logits, path)` takes logits [B, M, V] of M nodes and the tokens [B, M, D] from below the root to each,
        padded with ABSENT on the right: penalties and the like then meet a guess as they will meet its check.  Without
        a path, all nodes stand at the root.  That costs acceptance, and never exactness: the rules ask what a guess
        was drawn from, not why.
        """
        ...

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        """Learn what was committed.  Cheap: a model reads the block in its next `propose`."""
        ...


@runtime_checkable
class ChoosesRules(Protocol):
    """A proposer that some rules cannot judge."""

    def check_rule(self, rule: Rule) -> None:
        """Raises ValueError for such a rule; `Decoder` asks before it reads a prompt."""
        ...


class Rule(Protocol):
    """Decides, about ONE row; the caller vmaps."""

    exact: bool  # does the emitted text keep the target's distribution?
    shared_noise: bool  # do proposer and rule draw with the same position-keyed noise?
    # A rule for chains alone says `chain_only = True`, and no decoder pairs it with a proposer of trees.

    def __call__(self, draw: Any, proposal: Proposal, logits: Array, max_depth: int) -> Verdict:
        """`logits` [N, V] are the target's, warped."""
        ...
