"""`Proposer`: makes the drafts of a step, from a `Context`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Generic, cast

import jax
import jax.numpy as jnp
from jax import Array

from specjax.contract.cache import Cache
from specjax.contract.declared import Part
from specjax.contract.model import Loaded
from specjax.contract.rule import Rule
from specjax.contract.variables import ParamsT, StateT
from specjax.types import Block, Draw, Proposal, Warp


@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs of `Proposer.propose` for one step.  It exists only while a step is traced."""

    pending: Array  # [B] int32; the last token of the text, not yet read by the target: the root
    draw: Draw  # vmapped over rows
    warp: Warp
    shared_noise: bool  # proposer and rule draw with the same noise, keyed by position
    wants_logits: bool  # sampled drafts must come with `Proposal.logits`
    cache: Cache  # the target's cache, which a proposer may use but not change
    # [B] int32: drafts of a row deeper than this are dropped; 0 for rows that are done; None: none
    num_drafts: Array | None = None
    # [] bool: False if every row is greedy, and then `noise` is 0; None if `draw` knows
    sampled: Array | None = None
    # The text is the same whatever is drafted: the rule is exact and shares its noise.
    text_is_fixed: bool = False
    # [B] int32: the most tokens that each row may still get; None: unknown
    remaining: Array | None = None
    # [] int32: a shape that can leaves out the passes for deeper drafts; None: it drafts max_depth
    depth: Array | None = None
    # log-probabilities [B, M, K] of the K children of M parents, best first -> the logarithms of
    # their chances to be accepted once the parent is; None: those probabilities themselves
    survival: Callable[[Array], Array] | None = None
    # [B] bool: rows whose trees are to be chains, where chances are learned; None: no row's
    chains: Array | None = None
    # D -> tokens [B, D] that the rows' constraints force next, and how many [B]; None: there are no
    # constraints
    forced: Callable[[int], tuple[Array, Array]] | None = None
    # [B] int32: the tokens of each row's text, the pending one included; None: unknown
    length: Array | None = None

    def noise(self, node: Array, depth: Array) -> Array:
        """[B, M, V] Gumbel noise for the children of the nodes `node` [M] at `depth` [M]."""

        def noise() -> Array:
            return jax.vmap(lambda draw: draw.noise(node, depth))(self.draw)

        if self.sampled is None:
            return noise()
        made = jax.eval_shape(noise)
        return jax.lax.cond(self.sampled, noise, lambda: jnp.zeros(made.shape, made.dtype))


def before(prompt: Block) -> Block:
    """Returns a block without tokens, with the shapes, dtypes and documents of `prompt`."""

    def first(x: Array | None) -> Array | None:
        return None if x is None else x[:, :1]

    return dataclasses.replace(
        prompt,
        tokens=prompt.tokens[:, :1],
        hidden=first(prompt.hidden),
        features=first(prompt.features),
        count=jnp.zeros_like(prompt.count),
        whole=False,
        cache=None,
    )


class Proposer(Part, Generic[ParamsT, StateT]):
    """Makes drafts.  Everything that changes is in the state, whose leaves have the row as axis 0.

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
    resumes: bool = False  # it can be left out of steps: see `rest` and `resume`
    # It can be left out of steps: their tokens wait, and `catch_up` and then `read` take them.
    waits: bool = False
    # It can rest for some steps, in which `propose` is not called: see `resting` and `lapse`.
    rests: bool = False
    # It can draft for some steps all that it has, without a choice: see `settled` and `draft`.
    settles: bool = False
    # It drafts with a model of its own from only committed tokens, and the first call of
    # `context.warp` is for the logits after the pending token.
    separable: bool = False
    # A small program matters more than fast steps: one judgement serves all widths.
    brief: bool = False

    PROMISED: ClassVar = {
        "resumes": ("rest", "resume"),
        "rests": ("resting", "lapse"),
        "settles": ("settled", "draft"),
    }

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.init is not Proposer.init and cls.observe is Proposer.observe:
            raise TypeError(
                f"{cls.__name__} has the method init, so it has a state, and lacks observe: "
                "define it, also if it only returns the state"
            )

    def check(self, rule: Rule) -> None:
        """Raises ValueError if the proposer does not work with `rule`; a new decoder calls it."""
        del rule

    def bind(self, target: Loaded, draft: Loaded | None) -> ParamsT:
        """Returns the proposer's parameters, from the models that it was made for; by default None.

        Raises:
          ValueError: the proposer was made for other models, needs a draft model, or has its own
            weights.
        """
        return cast(ParamsT, None)

    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        """Returns the state before any token, by default an empty one.

        Args:
          params: the proposer's parameters.
          prompt: gives the number of rows, and the shapes and dtypes of the blocks that `read`
            gets; it has the documents, and `count` is 0.
          capacity: the most tokens of a text.
        """
        del params, prompt, capacity
        return cast(StateT, ())

    def read(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        """Returns the state after more of a prompt, whose last token is pending, never in a block.

        A prompt comes in one block or in several.  By default `observe` gets the block, which is
        right where `observe` takes any number of tokens.
        """
        return self.observe(params, state, block)

    def truncate(self, state: StateT, count: Array, last: Array | None) -> StateT | None:
        """Returns the state after the first `count` [B] tokens, of a state that has read more.

        A server reuses the prefix of a prompt from a row that had the same one.

        Args:
          state: of rows whose prompts began with these tokens.
          count: [B] int32, at most the length of those prompts.
          last: [B, sum E] the target's features at the last of these tokens; None without taps.

        Returns:
          The state, or None (the default) if it cannot be truncated: such rows read their whole
            prompt.
        """
        del state, count, last
        return None

    def catch_up(self, params: ParamsT, state: StateT) -> StateT | None:
        """Returns the state after steps as `read` leaves it, so that `read` can go on from it.

        A proposer that leaves committed tokens unread until `propose` reads them here.

        Returns:
          The state, by default unchanged; None if `read` cannot go on after steps, the default
            where a class has a `read` of its own.  Then a later turn reads its whole prompt.
        """
        del params
        return state if type(self).read is Proposer.read else None

    def adapt(self, state: StateT, adapter: Array) -> StateT:
        """Returns the state of rows that draft with these adapters [B] of a bank, -1 for none.

        By default there are no adapters, and the state stays as it is.
        """
        del adapter
        return state

    def start(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        """Returns the state after a whole prompt without its last token: `init`, then `read`."""
        whole = dataclasses.replace(prompt, whole=True)
        return self.read(params, self.init(params, before(prompt), capacity), whole)

    @abc.abstractmethod
    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        """Returns a tree of drafts below `context.pending`, and the new state.

        With `shares_cache`, the state is the target's cache.  The proposer may stage tokens in it
        after the length, and returns it.
        """

    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        """Returns the state after `block` is committed, by default the same.

        It only stores tokens; `propose` reads them.
        """
        del params, block
        return state

    def rest(self, state: StateT) -> StateT:
        """Returns the state after a step in which `propose` is not called; `observe` is."""
        raise NotImplementedError  # building an object with resumes=True checks that it exists

    def resume(
        self, params: ParamsT, state: StateT, text: Array, length: Array, wanted: Array
    ) -> StateT:
        """Reads the tokens that were committed while the proposer was left out; `propose` follows.

        Args:
          params, state: as in `propose`.
          text: [B, L] int32, all committed tokens, without the pending one.
          length: [B] int32, how many there are.
          wanted: [B] bool, the rows that will have drafts.
        """
        raise NotImplementedError  # building an object with resumes=True checks that it exists

    def resting(self, params: ParamsT, state: StateT, alive: Array) -> Array | None:
        """Returns [] int32: for how many steps it rests now; None: with these it never does.

        `alive` [B] are the rows that are not done.
        """
        raise NotImplementedError  # building an object with rests=True checks that it exists

    def lapse(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        """Returns the state after a step at rest, which committed `block`, as `observe`.

        A decoder lets a proposer rest only where the text is the same whatever is drafted.
        """
        raise NotImplementedError  # building an object with rests=True checks that it exists

    def settled(self, params: ParamsT, state: StateT, alive: Array) -> Array:
        """Returns [] bool: whether `draft` drafts in the next step, and not `propose`.

        `alive` [B] are the rows that are not done.
        """
        raise NotImplementedError  # building an object with settles=True checks that it exists

    def draft(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        """Drafts all nodes, as the step before, without a choice; otherwise as `propose`.

        A decoder lets a proposer settle only where the text is the same whatever is drafted.
        """
        raise NotImplementedError  # building an object with settles=True checks that it exists
