"""The contract: what a model, a cache, a proposer, a source and a rule must offer.

Every attribute is declared here, with its default where it has one.  A class that lacks a method or
an attribute fails when it is built, with the missing name, and never inside a trace.

    Decoder = target Model + Proposer + Rule
    Proposer = a shape (chain, static tree, dynamic tree) over a Source (a draft model, heads, ...)

The parts are frozen and hashable: they hold structure, and `Params` and `DecodeState` hold arrays.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import Any, ClassVar, Protocol, Self

import jax
from jax import Array

from specjax.tree import Tree
from specjax.types import Arrays, Block, ModelOutput, Proposal, Verdict


class _Declared(abc.ABCMeta):
    """Refuses an instance that lacks an attribute which its contract declares without a default."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
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
                f"{cls.__name__} lacks {', '.join(missing)}: give the class that attribute, or set it in "
                f"__post_init__ with self.declare({missing[0]}=...)"
            )
        return made


class Part(metaclass=_Declared):
    """What a decoder is made of: frozen, hashable, structure only."""

    def declare(self, **attributes: Any) -> None:
        """Set attributes that follow from the fields of a frozen dataclass, in its `__post_init__`."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)


class Cache(abc.ABC):
    """What a model remembers of the committed tokens of each row, and of those it has just staged.

    A cache is a pytree (`flax.struct.dataclass`) whose leaves all have the row as axis 0.
    """

    length: Array  # [B] int32; committed tokens

    commits_paths: ClassVar[bool] = False
    """Can it commit any path through a tree of staged tokens, or the first ones only?"""

    keeps_scratch: ClassVar[bool] = False
    """After `rewind`, may the next `commit` keep the first of the rewound tokens after all?"""

    @abc.abstractmethod
    def commit(self, count: Array, path: Array | None = None) -> Self:
        """Keep `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""

    @abc.abstractmethod
    def rewind(self, to: Self) -> Self:
        """This cache as it was at `to`, an earlier value of it; later tokens become scratch."""

    def narrow(self, ahead: int, widest: int) -> Self:
        """This empty cache with less memory, if the model needs less; the default changes nothing.

        Args:
          ahead: the most tokens that are written behind the length before it moves.
          widest: the most tokens of one pass over a prompt.
        """
        del ahead, widest
        return self


def refuse_path(path: Array | None) -> None:
    """For caches with `commits_paths = False`.  A decoder never gets there: it checks `reads_trees`."""
    if path is not None:
        raise ValueError(
            "this cache commits the first staged tokens only: use a proposer of chains"
        )


def refuse_taps(taps: tuple[int, ...]) -> None:
    """For models with `num_taps = 0`.  A decoder never gets there: it checks the proposer's `taps`."""
    if taps:
        raise ValueError(
            f"taps={taps}, and this model offers no layer to read: use a proposer without taps"
        )


class Model(Part):
    """A causal language model."""

    vocab_size: int
    max_positions: int
    reads_trees: bool  # does it heed `mask`, and does its cache commit paths?
    num_taps: int = 0  # `taps` may name 0 ... num_taps - 1; 0: the model has none

    @abc.abstractmethod
    def init_cache(self, batch: int, size: int) -> Any:
        """An empty `Cache` for `batch` rows with `size` slots each."""

    @abc.abstractmethod
    def apply(
        self,
        params: Arrays,
        tokens: Array,
        positions: Array,
        cache: Any = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Read `tokens` [B, N] at `positions` [B, N].

        Token n sees the committed tokens of its row, and of the N tokens those m with
        `mask[b, n, m]` (None: causal).  The N tokens are staged at slots length ... length + N - 1;
        the length does not move.

        With `taps`, `ModelOutput.features` [B, N, sum E] holds the residual stream after so many
        layers, side by side in the order of `taps`: 0 is the embedding, 1 the output of the first
        layer.
        """


class Loaded(Protocol):
    """A loaded model, as `specjax.load` returns it."""

    @property
    def model(self) -> Any: ...  # a Model

    @property
    def params(self) -> Arrays: ...

    @property
    def name(self) -> str: ...


class Draw(Protocol):
    """The randomness of one step, for ONE row.  A proposer meets it as `Context.noise`."""

    def noise(self, node: Array, depth: Array) -> Array:
        """[M, V] Gumbel noise to draw the children of the nodes `node` [M] at `depth` [M] with."""
        ...

    def acceptance(self, num_nodes: int) -> Array:
        """[N] uniform draws in [0, 1), of rules with noise of their own."""
        ...

    def residual(self) -> Array:
        """[V] Gumbel noise for the next token, of rules with noise of their own."""
        ...


class Warp(Protocol):
    """From a model's logits to the logits of the distribution that is sampled, for a batch."""

    def __call__(self, logits: Array, path: Array | None = None) -> Array:
        """[B, M, V] -> [B, M, V] float32, -inf for what the settings leave out.

        `path` [B, M, D] are the tokens from below the root to each of the M nodes, padded with
        ABSENT on the right: penalties and the like then meet a draft as they will meet its
        verification.  Without a path all nodes stand at the root.  That costs acceptance and never
        exactness: a rule asks what a draft was drawn from, not why.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Context:
    """What a proposer is told about one step.  It lives inside one trace."""

    pending: Array  # [B] int32; decided, and not yet read by the target: the root
    draw: Draw  # vmapped over rows
    warp: Warp
    shared_noise: bool  # do proposer and rule draw with the same noise, keyed by position?
    wants_logits: bool  # must sampled drafts come with `Proposal.logits`?
    cache: Any  # the target's cache, to look at

    def noise(self, node: Array, depth: Array) -> Array:
        """[B, M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""
        return jax.vmap(lambda draw: draw.noise(node, depth))(self.draw)


class Proposer(Part):
    """Drafts.  What evolves is its state, whose leaves all have the row as axis 0.

    Randomness comes from `context.noise` alone.  Whether a node is there may depend on the text and
    on nodes drawn before it, never on its own outcome: that would bias `Rejection`.
    """

    num_nodes: int  # N of its proposals, the root included
    max_depth: int  # D
    is_chain: bool
    taps: tuple[int, ...] = ()  # layers of the target whose output it reads, as `Block.features`
    may_abstain: bool = (
        False  # often drafts nothing at all, and spares the target the wide pass then
    )
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
          ValueError: it was made for other models, needs a draft, or has weights of its own.
        """
        del target, draft
        return None

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Any:
        """The state after the prompt but for its last token, which is pending."""

    @abc.abstractmethod
    def propose(self, params: Arrays, state: Any, context: Context) -> tuple[Proposal, Any]:
        """A tree below `context.pending`, and the new state.

        With `shares_cache` the state is the target's cache, in which the proposer may stage tokens
        behind the length; it returns that cache.
        """

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Any, block: Block) -> Any:
        """The state once `block` is committed.  It should be cheap: read in the next `propose`."""


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """What a shape asks of its source."""

    depth: int  # drafts are at most this deep, so a step commits at most depth + 1 tokens
    staged: int  # the most tokens that are staged at a time, the pending one included
    is_chain: bool  # `extend` alone is called; otherwise `read_tree` alone


class Source(Part):
    """What guesses the next token, one level after the other.  A shape arranges its guesses.

        propose = begin, then (extend or read_tree) for each level, then end

    A *reading* is what a source passes along within one `propose`: its cache, for the most part.
    """

    vocab_size: int  # the target's
    taps: tuple[int, ...] = ()
    shares_cache: bool = False
    asks_draft: bool = False

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """Its parameters, as `Proposer.bind`."""

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int, lookahead: Lookahead) -> Any:
        """The state after the prompt but for its last token."""

    @abc.abstractmethod
    def begin(self, params: Arrays, state: Any, context: Context) -> tuple[Any, Any, Array]:
        """Read what was committed since, and the pending token.

        Returns:
          The state with all but the pending token, the reading with it, and the logits [B, V] after
          it, on the target's vocabulary.
        """

    @abc.abstractmethod
    def extend(self, params: Arrays, reading: Any, tokens: Array) -> tuple[Any, Array]:
        """Read one more token [B] of each row's chain.  Returns the reading and logits [B, V]."""

    @abc.abstractmethod
    def read_tree(
        self, params: Arrays, reading: Any, tokens: Array, at: Array, depth: Array, mask: Array
    ) -> tuple[Any, Array]:
        """Read the nodes of a tree behind the pending token, all its levels so far in one pass.

        Args:
          params, reading: as above.
          tokens: [B, T], the root not among them.
          at: [B, M] the nodes of the newest level among the T.
          depth: [T] levels below the pending token, from 0.
          mask: [B or 1, T, T] bool; which nodes see each other.

        Returns:
          The reading, and the logits [B, M, V] after the nodes `at`.
        """

    @abc.abstractmethod
    def end(self, params: Arrays, state: Any, reading: Any, proposal: Proposal) -> Any:
        """Take the drafts back.  Returns the state that `begin` returned, in the reading's buffers."""

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Any, block: Block) -> Any:
        """The state once `block` is committed."""

    def known(self, params: Arrays, reading: Any, tokens: Array) -> Array | None:
        """[B, N] bool: can it read these nodes, the pending token the first?  None: all of them.

        What hangs below an unknown node is dropped with it.
        """
        del params, reading, tokens
        return None


class BlockSource(Part):
    """What guesses the next D tokens in one pass, each without knowing the others."""

    vocab_size: int  # the target's
    depth: int  # D
    taps: tuple[int, ...] = ()

    @abc.abstractmethod
    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        """Its parameters, as `Proposer.bind`."""

    @abc.abstractmethod
    def init(self, params: Arrays, prompt: Block, capacity: int) -> Any:
        """The state after the prompt but for its last token."""

    @abc.abstractmethod
    def marginals(self, params: Arrays, state: Any, context: Context) -> tuple[Array, Array, Any]:
        """Logits [B, D, V] of the D tokens behind the pending one, which rows [B] have any, state."""

    @abc.abstractmethod
    def observe(self, params: Arrays, state: Any, block: Block) -> Any:
        """The state once `block` is committed."""


class Rule(abc.ABC):
    """Decides which drafts are accepted, about ONE row; the decoder vmaps it.

    A rule with numbers is a `flax.struct.dataclass`: its numbers then are data, so that another
    threshold does not compile, and each row may have its own.
    """

    exact: ClassVar[bool]
    """Does the emitted text keep the target's distribution?"""

    shared_noise: ClassVar[bool]
    """Do proposer and rule draw with the same position-keyed noise?"""

    wants_logits: ClassVar[bool] = False
    """Does it read what the drafts were drawn from, `Proposal.logits`?"""

    chain_only: ClassVar[bool] = False
    """Does it judge chains alone?"""

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        missing = [name for name in ("exact", "shared_noise") if not hasattr(cls, name)]
        if missing:
            raise TypeError(
                f"{cls.__name__} must say {' and '.join(missing)}: each is True or False"
            )

    @abc.abstractmethod
    def __call__(self, draw: Any, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        """Judge one row.

        Args:
          draw: the randomness of this step, as `shared_noise` asks for it.
          proposal: tokens [N], parent [N], and logits [N, V] where `wants_logits`.
          tree: depth [N], ancestors [N, N] and paths [N, D + 1] of the proposal's nodes.
          logits: [N, V] float32, the target's after each node, warped.
        """
