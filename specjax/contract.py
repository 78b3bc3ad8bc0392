"""The contract: what a model, a cache, a proposer, a source and a rule must offer.

Every attribute is declared here, with its default if it has one.  Building an object whose class
lacks a method or an attribute fails with the missing name, before anything is traced.

    Decoder = target Model + Proposer + Rule
    Proposer = a shape (chain, static tree, dynamic tree) over a Source (a draft model, heads, ...)

The parts are frozen and hashable: they hold structure, and `Params` and `DecodeState` hold arrays.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import ClassVar, Protocol, Self, TypeVar

import jax
from jax import Array

from specjax.tree import Tree
from specjax.types import Arrays, Block, ModelOutput, Proposal, Verdict

_T = TypeVar("_T")


class _Declared(abc.ABCMeta):
    """Refuses an instance that lacks an attribute which its contract declares without a default."""

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
    """A part of a decoder: frozen, hashable, structure only."""

    def declare(self, **attributes: object) -> None:
        """Set attributes that follow from the fields of a frozen dataclass in `__post_init__`."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)


class Cache(abc.ABC):
    """The memory of a model: the committed tokens of each row, and those just staged.

    A cache is a pytree (`flax.struct.dataclass`) whose leaves all have the row as axis 0.
    """

    length: Array  # [B] int32; committed tokens

    commits_paths: ClassVar[bool] = False
    """Can it commit any path through a tree of staged tokens, or only the first ones?"""

    keeps_scratch: ClassVar[bool] = False
    """After `rewind`, may the next `commit` commit the first of the rewound tokens again?"""

    @abc.abstractmethod
    def commit(self, count: Array, path: Array | None = None) -> Self:
        """Keep `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""

    @abc.abstractmethod
    def rewind(self, to: Cache) -> Self:
        """This cache as it was at `to`, an earlier value of it; later tokens become scratch."""

    def narrow(self, ahead: int, widest: int) -> Self:
        """This empty cache with less memory, if the model needs less; the default changes nothing.

        Args:
          ahead: the most tokens that are written after the length before it moves.
          widest: the most tokens of one pass over a prompt.
        """
        del ahead, widest
        return self


def refuse_path(path: Array | None) -> None:
    """For caches with `commits_paths = False`; a decoder has checked `reads_trees` before."""
    if path is not None:
        raise ValueError(
            "this cache commits the first staged tokens only: use a proposer of chains"
        )


def refuse_taps(taps: tuple[int, ...]) -> None:
    """For models with `num_taps = 0`; a decoder has checked the proposer's `taps` before."""
    if taps:
        raise ValueError(
            f"taps={taps}, and this model offers no layer to read: use a proposer without taps"
        )


class Model(Part):
    """A causal language model."""

    vocab_size: int
    max_positions: int
    reads_trees: bool  # does it apply `mask`, and does its cache commit paths?
    num_taps: int = 0  # `taps` may name 0 ... num_taps - 1; 0: the model has none

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
        """Read `tokens` [B, N] at `positions` [B, N].

        Token n sees the committed tokens of its row, and each of the N tokens m with
        `mask[b, n, m]` (None: causal).  The N tokens are staged at slots length ... length + N - 1;
        the length does not move.

        With `taps`, `ModelOutput.features` [B, N, sum E] holds the residual stream after those
        layers, side by side in the order of `taps`: 0 is the embedding, 1 the output of the first
        layer.
        """


class Loaded(Protocol):
    """A loaded model, as `specjax.load` returns it."""

    @property
    def model(self) -> Model: ...

    @property
    def params(self) -> Arrays: ...

    @property
    def name(self) -> str: ...


class Draw(Protocol):
    """The randomness of one step, for ONE row.  A proposer uses it through `Context.noise`."""

    def noise(self, node: Array, depth: Array) -> Array:
        """[M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""
        ...

    def acceptance(self, num_nodes: int) -> Array:
        """[N] uniform draws in [0, 1), for rules without shared noise."""
        ...

    def residual(self) -> Array:
        """[V] Gumbel noise for the next token, for rules without shared noise."""
        ...


class Warp(Protocol):
    """From a model's logits to the logits of the distribution that is sampled, for a batch."""

    def __call__(self, logits: Array, path: Array | None = None) -> Array:
        """[B, M, V] -> [B, M, V] float32, -inf for tokens that the settings exclude.

        `path` [B, M, D] are the tokens from below the root to each of the M nodes, padded on the
        right with ABSENT.  With it penalties and the like treat drafts as in the verification.
        Without it every node counts as the root.  That lowers acceptance but stays exact: a rule
        uses the distribution that a draft was drawn from, whatever it is.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Context:
    """What a proposer is told about one step.  It exists only inside one trace."""

    pending: Array  # [B] int32; decided, and not yet read by the target: the root
    draw: Draw  # vmapped over rows
    warp: Warp
    shared_noise: bool  # do proposer and rule draw with the same noise, keyed by position?
    wants_logits: bool  # must sampled drafts come with `Proposal.logits`?
    cache: Cache  # the target's cache, to read

    def noise(self, node: Array, depth: Array) -> Array:
        """[B, M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""
        return jax.vmap(lambda draw: draw.noise(node, depth))(self.draw)


class Proposer(Part):
    """Makes drafts.  All that evolves is in its state, whose leaves have the row as axis 0.

    Its only randomness is `context.noise`.  Whether a node is present may depend on the text and on
    nodes drawn before it, but not on its own token: that would bias `Rejection`.
    """

    num_nodes: int  # N of its proposals, the root included
    max_depth: int  # D
    is_chain: bool
    taps: tuple[int, ...] = ()  # layers of the target that it reads, as `Block.features`
    may_abstain: bool = False  # often drafts nothing: the target then reads the roots only
    shares_cache: bool = False  # drafts in the target's cache: see `propose`
    scratch: int = 0  # slots of the target's cache that `propose` writes, if more than num_nodes
    point_mass: bool = False  # for a rule that wants logits, every draft is a function of the text
    asks_draft: bool = False  # are its parameters those of a draft model?

    def check(self, rule: Rule) -> None:
        """Raises ValueError if it cannot serve `rule`.  A decoder asks when it is built."""
        del rule

    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """Its parameters, from the models that it was made for; by default it has none.

        Raises:
          ValueError: it was made for other models, needs a draft model, or has its own weights.
        """
        del target, draft
        return None

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        """The state after the prompt without its last token, which is pending."""

    @abc.abstractmethod
    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        """A tree below `context.pending`, and the new state.

        With `shares_cache` the state is the target's cache, in which the proposer may stage tokens
        after the length; it returns that cache.
        """

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed.  Keep it cheap: read tokens in `propose`."""


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """What a source needs to know of its shape."""

    depth: int  # drafts are at most this deep, so a step commits at most depth + 1 tokens
    staged: int  # the most tokens that are staged at a time, the pending one included
    is_chain: bool  # only `extend` is called; otherwise only `read_tree`


class Source(Part):
    """Predicts the next token, one level after another.  A shape arranges these drafts.

        propose = begin, then (extend or read_tree) for each level, then end

    A *reading* is what a source passes along within one `propose`: mostly its cache.
    """

    vocab_size: int  # the target's
    taps: tuple[int, ...] = ()
    shares_cache: bool = False
    asks_draft: bool = False

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """Its parameters, as `Proposer.bind`."""

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
        """Read the nodes of a tree below the pending token, all its levels so far in one pass.

        Args:
          params, reading: as above.
          tokens: [B, T] of all nodes but the root.
          at: [B, M] the nodes of the newest level among the T.
          depth: [T] levels below the pending token, from 0.
          mask: [B or 1, T, T] bool; which nodes see each other.

        Returns:
          The reading, and the logits [B, M, V] after the nodes `at`.
        """

    @abc.abstractmethod
    def end(self, params: Arrays, state: Arrays, reading: Arrays, proposal: Proposal) -> Arrays:
        """Remove the drafts.  Returns the state that `begin` returned, in the reading's buffers."""

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed."""

    def known(self, params: Arrays, reading: Arrays, tokens: Array) -> Array | None:
        """[B, N] bool: can it read these nodes, of which the first is pending?  None: all of them.

        The descendants of an unknown node are dropped with it.
        """
        del params, reading, tokens
        return None


class BlockSource(Part):
    """Predicts the next D tokens in one pass, each independently of the others."""

    vocab_size: int  # the target's
    depth: int  # D
    taps: tuple[int, ...] = ()

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """Its parameters, as `Proposer.bind`."""

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        """The state after the prompt without its last token."""

    @abc.abstractmethod
    def marginals(
        self, params: Arrays, state: Arrays, context: Context
    ) -> tuple[Array, Array, Arrays]:
        """Logits [B, D, V] of the D tokens after the pending one, rows [B] that have any, state."""

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        """The state after `block` is committed."""


class Rule(abc.ABC):
    """Decides which drafts of ONE row are accepted; the decoder vmaps it.

    A rule with numbers is a `flax.struct.dataclass`: its numbers are data, so another threshold
    does not recompile, and each row may have its own.
    """

    exact: ClassVar[bool]
    """Does the emitted text keep the target's distribution?"""

    shared_noise: ClassVar[bool]
    """Do proposer and rule draw with the same position-keyed noise?"""

    wants_logits: ClassVar[bool] = False
    """Does it need the distributions that drafts were drawn from, `Proposal.logits`?"""

    chain_only: ClassVar[bool] = False
    """Does it judge only chains?"""

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        missing = [name for name in ("exact", "shared_noise") if not hasattr(cls, name)]
        if missing:
            raise TypeError(
                f"{cls.__name__} must say {' and '.join(missing)}: each is True or False"
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
