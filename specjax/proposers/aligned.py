"""`Aligned`: drafts the tokens of an expected text, position by position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax import tree
from specjax._internal.checks import flag
from specjax._internal.prefix_sums import leading
from specjax.contract import Context, Proposer
from specjax.proposers.shapes import check_num_drafts
from specjax.types import ABSENT, Block, Proposal

_WIDTHS = (1, 5, 9, 17, 33)
"""Numbers of tokens that the target may read of a row, up to the number of drafts and one."""


@struct.dataclass
class Expected:
    """What is expected after the prompt of each row, and how far the row is."""

    tokens: Array  # [B, X] int32; ABSENT behind the last token
    start: Array  # [B] int32; where the expected text starts in `tokens`
    prompt: Array  # [B] int32; tokens of the prompt that were read
    length: Array  # [B] int32; of all tokens that were read, the pending one is not


@dataclasses.dataclass(frozen=True)
class Aligned(Proposer[None, Expected]):
    """Drafts token i of an expected text as token i after the prompt.

    The expected text is the last document of a row (`Block.documents`), and
    `specjax.generate(..., expected=...)` puts it there.  It may be the text that other weights
    wrote with the same key, or the part of a text that was delivered before a server failed.  Under
    the rule `match` the noise of a token depends only on the row's key and the token's position, so
    after a small change of the weights most tokens are the same.

    With `agreed`, a row has drafts only while its last token is the expected one.  Then another
    proposer can draft for the rows that went another way:
    `FirstOf(Aligned(8, agreed=True), NGram(8))` looks up in the expected text, too.

    Example:
      >>> old = specjax.generate(target, prompt).tokens
      >>> new = specjax.generate(target, prompt, proposer=specjax.Aligned(8), expected=old)
      >>> new.tokens == old
      True
    """

    num_drafts: int = 8
    agreed: bool = False
    is_chain = True
    point_mass = True
    reads_documents = True

    def __post_init__(self) -> None:
        check_num_drafts(self.num_drafts)
        flag("agreed", self.agreed)
        nodes = self.num_drafts + 1
        narrower = tuple(width for width in _WIDTHS if width < nodes)
        self.declare(num_nodes=nodes, max_depth=self.num_drafts, narrower=narrower)

    def init(self, params: None, prompt: Block, capacity: int) -> Expected:
        zero = jnp.zeros_like(prompt.count)
        none = jnp.full((len(zero), 1), ABSENT, jnp.int32)
        tokens = none if prompt.documents is None else prompt.documents
        # The last document lies between the last two ABSENT.
        slot = jnp.arange(tokens.shape[1])
        before = (tokens == ABSENT) & (slot < tokens.shape[1] - 1)
        start = jnp.max(jnp.where(before, slot, -1), axis=1) + 1
        tokens = jnp.pad(tokens, ((0, 0), (0, self.num_drafts)), constant_values=ABSENT)
        return Expected(tokens, start, zero, zero)

    def read(self, params: None, state: Expected, block: Block) -> Expected:
        state = self.observe(params, state, block)
        return dataclasses.replace(state, prompt=state.length)

    def catch_up(self, params: None, state: Expected) -> Expected:
        return state

    def truncate(self, state: Expected, count: Array, last: Array | None) -> Expected:
        return dataclasses.replace(state, prompt=count, length=count)

    def propose(self, params: None, state: Expected, context: Context) -> tuple[Proposal, Expected]:
        tokens, parent = jax.vmap(self._next)(
            state.tokens, state.start, state.length - state.prompt, context.pending
        )
        return Proposal(tokens, parent, point_mass=True), state

    def observe(self, params: None, state: Expected, block: Block) -> Expected:
        return dataclasses.replace(state, length=state.length + block.count)

    def _next(self, text: Array, start: Array, done: Array, pending: Array) -> tuple[Array, Array]:
        """Returns tokens and parents [N] of one row, after `done` new tokens, the last pending."""
        at = jnp.minimum(start + done, len(text) - self.num_drafts)
        drafts = jax.lax.dynamic_slice(text, (at,), (self.num_drafts,))
        present = leading(drafts != ABSENT)
        if self.agreed:
            present &= (done == 0) | (text[at - 1] == pending)
        present = jnp.append(False, present)
        parent = jnp.where(present, tree.chain(self.num_nodes), ABSENT)
        return jnp.append(pending, jnp.maximum(drafts, 0)), parent
