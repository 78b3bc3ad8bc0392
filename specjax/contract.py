"""The contract: the base classes of models, caches, proposers, sources and rules.

Every attribute is declared here, with its default if it has one.  If a class lacks a method or an
attribute, building an object of it fails with the missing name, before anything is traced.

    Decoder = target Model + Proposer + Rule
    Proposer = a shape (chain, static tree, dynamic tree) over a Source (a draft model, heads, ...)

The parts are frozen, hashable and hold no arrays; those are in `Params` and `DecodeState`.

To *read* tokens means to run a forward pass over them.  A pass *stages* the keys and values of its
tokens in the cache, after the committed ones; `Cache.commit` then keeps some of them.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import ClassVar, Protocol, Self, TypeVar

import jax
from jax import Array

from specjax.tree import Tree
from specjax.types import Arrays, Block, Corrected, Draw, ModelOutput, Proposal, Verdict, Warp

_T = TypeVar("_T")


class _Declared(abc.ABCMeta):
    """Refuses an instance that lacks an attribute declared by its base class without a default."""

    def __call__(cls: type[_T], *arguments: object, **named: object) -> _T:
        made = super().__call__(*arguments, **named)
        declared = [
            name
            for base in cls.__mro__
            if isinstance(base, _Declared)
            for name in inspect.get_annotations(base)
        ]
        missing = sorted({name for name in declared if not hasattr(made, name)})
        if missing:
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(missing)}: give the class that attribute, or set "
                f"it in __post_init__ with self.declare({missing[0]}=...)"
            )
        return made


class Part(metaclass=_Declared):
    """A part of a decoder: frozen, hashable, without arrays."""

    def declare(self, **attributes: object) -> None:
        """For `__post_init__` of a frozen dataclass: set attributes that follow from its fields."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)


class Cache(abc.ABC):
    """What a model keeps of the committed tokens of each row, and of those that are staged.

    A cache is a pytree (`flax.struct.dataclass`) whose leaves all have the row as axis 0.  Slots
    after the staged tokens may hold *scratch*: tokens that were rejected or rewound.
    """

    length: Array  # [B] int32; committed tokens

    commits_paths: ClassVar[bool] = False
    """True if `commit` accepts a path through a tree of staged tokens, False if only a prefix."""

    keeps_scratch: ClassVar[bool] = False
    """True if a `commit` after `rewind` can commit the first of the rewound tokens again."""

    @abc.abstractmethod
    def commit(self, count: Array, path: Array | None = None) -> Self:
        """Keep `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""

    @abc.abstractmethod
    def rewind(self, to: Cache) -> Self:
        """This cache with the committed tokens of `to`, an earlier value of this cache.

        Tokens that were committed since become scratch.
        """

    def narrow(self, ahead: int, widest: int) -> Self:
        """This empty cache with less memory, if the model can do with less (by default: itself).

        Args:
          ahead: the most tokens that are written after `length` before a `commit` or `rewind`.
          widest: the most tokens of one pass over a prompt.
        """
        del ahead, widest
        return self


def refuse_path(path: Array | None) -> None:
    """Raises ValueError for a path; for caches with `commits_paths = False`."""
    if path is not None:
        raise ValueError(
            "this cache commits the first staged tokens only: use a proposer of chains"
        )


def refuse_taps(taps: tuple[int, ...]) -> None:
    """Raises ValueError for any taps; for models with `num_taps = 0`."""
    if taps:
        raise ValueError(
            f"taps={taps}, and this model offers no layer to read: use a proposer without taps"
        )


class Model(Part):
    """A causal language model."""

    vocab_size: int
    max_positions: int
    reads_trees: bool  # True if `apply` applies `mask`, and the cache commits paths
    num_taps: int = 0  # `taps` may hold 0 ... num_taps - 1; 0: the model offers no inner layers

    @abc.abstractmethod
    def init_cache(self, batch: int, size: int) -> Cache:
        """An empty `Cache` for `batch` rows with `size` slots each."""

    @abc.abstractmethod
    def apply(
        self,
        params: Arrays,
        tokens: Array,
        positions: Array,
        cache: Cache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Run one forward pass over `tokens` [B, N] at `positions` [B, N].

        Token n attends to the committed tokens of its row, and to each of the N tokens m for which
        `mask[b, n, m]` is True (None: causal).  The N tokens are staged in slots length ...
        length + N - 1 of the cache, whose length does not change.

        With `taps`, `ModelOutput.features` [B, N, sum E] holds the hidden states (the residual
        stream) after those layers, concatenated in the order of `taps`: 0 is the embedding, 1 the
        output of the first layer.
        """


class Loaded(Protocol):
    """A loaded model, as `specjax.load` returns it."""

    @property
    def model(self) -> Model: ...

    @property
    def params(self) -> Arrays: ...

    @property
    def name(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs of `Proposer.propose` for one step.  It exists only while a step is traced."""

    pending: Array  # [B] int32; the last token of the text, not yet read by the target: the root
    draw: Draw  # vmapped over rows
    warp: Warp
    shared_noise: bool  # proposer and rule draw with the same noise, keyed by position
    wants_logits: bool  # sampled drafts must come with `Proposal.logits`
    cache: Cache  # the target's cache, which a proposer may use but not change

    def noise(self, node: Array, depth: Array) -> Array:
        """[B, M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""
        return jax.vmap(lambda draw: draw.noise(node, depth))(self.draw)


class Proposer(Part):
    """Makes drafts.  Everything that changes is in its state, whose leaves have the row as axis 0.

    Its only randomness is `context.noise`.  Whether a node is present may depend on the text and on
    nodes drawn before it, but not on its own token: that would bias `Rejection`.
    If all drafts of a step are among the first w nodes, for a w in `narrower`, the target reads w
    tokens of each row instead of `num_nodes`.
    """

    num_nodes: int  # N of its proposals, the root included
    max_depth: int  # D
    is_chain: bool
    taps: tuple[int, ...] = ()  # layers of the target whose hidden states it gets, `Block.features`
    narrower: tuple[int, ...] = ()  # ascending, below num_nodes; (1,) if it often has no draft
    estimates: bool = False  # its proposals have a `chance`
    shares_cache: bool = False  # it drafts in the target's cache: see `propose`
    scratch: int = 0  # slots of the target's cache that `propose` writes, if more than num_nodes
    point_mass: bool = False  # for a rule that wants logits, every draft is a function of the text
    asks_draft: bool = False  # its parameters are those of a draft model
    reads_documents: bool = False  # `init` uses `Block.documents`

    def check(self, rule: Rule) -> None:
        """Raises ValueError if it does not work with `rule`.  Building a decoder calls this."""
        del rule

    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """The proposer's parameters, from the models that it was made for; by default None.

        Raises:
          ValueError: it was made for other models, needs a draft model, or has its own weights.
        """
        return None

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        """The state after the prompt without its last token, which is pending."""

    @abc.abstractmethod
    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        """A tree of drafts below `context.pending`, and the new state.

        With `shares_cache`, the state is the target's cache.  The proposer may stage tokens in it
        after the length, and returns it.
        """

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed.  Only store tokens here; read them in `propose`."""


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """The sizes of a shape that its source needs to allocate its state."""

    depth: int  # drafts are at most this deep, so a step commits at most depth + 1 tokens
    staged: int  # the most tokens that are staged at a time, the pending one included
    is_chain: bool  # True if the shape calls only `extend`, False if only `read_tree`


class Source(Part):
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

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """The source's parameters, as in `Proposer.bind`."""

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int, lookahead: Lookahead) -> Arrays:
        """The state after the prompt without its last token."""

    @abc.abstractmethod
    def begin(
        self, params: Arrays, state: Arrays, context: Context
    ) -> tuple[Arrays, Arrays, Array]:
        """Read the tokens committed since the last step, and the pending token.

        Returns:
          The state without the pending token, the reading with it, and the logits [B, V] after it,
          on the target's vocabulary.
        """

    @abc.abstractmethod
    def extend(self, params: Arrays, reading: Arrays, tokens: Array) -> tuple[Arrays, Array]:
        """Read one more token [B] of each row's chain.  Returns the reading and logits [B, V]."""

    @abc.abstractmethod
    def read_tree(
        self, params: Arrays, reading: Arrays, tokens: Array, at: Array, depth: Array, mask: Array
    ) -> tuple[Arrays, Array]:
        """Read the nodes of a tree below the pending token: all levels so far, in one pass.

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
    def end(self, params: Arrays, state: Arrays, reading: Arrays, proposal: Proposal) -> Arrays:
        """Remove the drafts: the state that `begin` returned, in the buffers of the reading."""

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed."""

    def known(self, params: Arrays, reading: Arrays, tokens: Array) -> Array | None:
        """[B, N] bool: which nodes the source can read (node 0 is the pending token); None: all.

        The shape drops the other nodes with their descendants.
        """
        return None


class BlockSource(Part):
    """Predicts the next D tokens in one pass.

    Without `corrects`, the prediction of a depth is the same whatever is drafted before it.  With
    it, `correct` changes the logits of a depth for the drafts of a path: a network that is small
    enough to run once a depth.

        propose = marginals, then correct for each depth where the source corrects, then end
    """

    vocab_size: int  # the target's
    depth: int  # D
    taps: tuple[int, ...] = ()
    corrects: bool = False

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """The source's parameters, as in `Proposer.bind`."""

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        """The state after the prompt without its last token."""

    @abc.abstractmethod
    def marginals(
        self, params: Arrays, state: Arrays, context: Context
    ) -> tuple[Array, Array, Arrays]:
        """Read the tokens committed since the last step, and the pending token.

        Returns:
          Logits [B, D, V] of the D tokens after the pending one, [B] bool whether the row has any
          (its logits are not used otherwise), and the reading: the value that `correct` and `end`
          get, by default the state.
        """

    def correct(
        self, params: Arrays, reading: Arrays, depth: int, previous: Array, memory: Arrays
    ) -> Corrected:
        """The logits of the token at `depth`, from 0, after M paths of each row.

        Args:
          params, reading: as above.
          depth: how many drafts each path has.
          previous: [B, M] the last token of each path; at depth 0 the pending one.
          memory: what the call for the depth before returned for each path; None at depth 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has corrects=True and no method correct")

    def end(self, reading: Arrays) -> Arrays:
        """The state after a reading."""
        return reading

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed."""


class Rule(abc.ABC):
    """Decides which drafts of ONE row are accepted; the decoder vmaps it.

    A rule with numbers is a `flax.struct.dataclass`: its numbers are data, so another threshold
    does not recompile, and each row may have its own.
    """

    exact: ClassVar[bool]
    """True if the emitted text has the target's distribution."""

    shared_noise: ClassVar[bool]
    """True if proposer and rule draw with the same position-keyed noise."""

    wants_logits: ClassVar[bool] = False
    """True if it needs `Proposal.logits`, the distributions that drafts were drawn from."""

    chain_only: ClassVar[bool] = False
    """True if it judges chains only."""

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        missing = [name for name in ("exact", "shared_noise") if not hasattr(cls, name)]
        if missing:
            raise TypeError(
                f"{cls.__name__} must set {' and '.join(missing)}, each to True or False"
            )

    @abc.abstractmethod
    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        """Judge one row.

        Args:
          draw: the randomness of this step, shared with the proposer if `shared_noise`.
          proposal: tokens [N], parent [N], and logits [N, V] where `wants_logits`.
          tree: depth [N], ancestors [N, N] and paths [N, D + 1] of the proposal's nodes.
          logits: [N, V] float32, the target's warped logits after each node.
        """
