"""`DatastoreSource`: predicts continuations from a datastore, or from the row's own text."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.checks import counts, real
from specjax.contract import Context, Loaded, Lookahead, Source
from specjax.methods.datastore.lookup import DEPTH, NONE, DatastoreParams, look_up
from specjax.proposers import OwnText
from specjax.types import Block, Proposal


@struct.dataclass
class Reading:
    """The own text with the pending token, and the last tokens of each row with its drafts."""

    text: OwnText
    context: Array  # [B, DEPTH] int32; the last token first, padded with NONE
    is_sure: Array  # [B] bool; does the row draft at all?


@dataclasses.dataclass(frozen=True)
class DatastoreSource(Source[DatastoreParams, OwnText, Reading]):
    """Predicts tokens from continuations in a datastore and in the row's own text.

    A shape draws drafts from it with the rule's own noise.  Under `match` that is the noise of the
    target's draw, so that drafts are often right at temperature 1, too: the most frequent
    continuation would seldom be.  Other rules get the distribution that the drafts were drawn from,
    and are exact as for a draft model.

    The datastore is in the parameters.  With another one of equal capacity the same program runs.

    A row has no drafts in a step in which the most probable token has a probability of less than
    `min_share`.  If no row has drafts, the target reads only the pending tokens.

    Reference: He et al. 2023, "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252, for
    drafts from a datastore.

    Attributes:
      vocab_size: the target's.
      min_share: a probability in [0, 1); 0 always drafts.
    """

    vocab_size: int
    min_share: float = 0.0
    reads_documents = True

    def __post_init__(self) -> None:
        counts(vocab_size=self.vocab_size)
        note = ", a probability, and 0 always drafts"
        share = real("min_share", self.min_share, "[0, 1)", note)
        self.declare(may_abstain=share > 0)

    def bind(self, target: Loaded, draft: Loaded | None) -> DatastoreParams:
        raise ValueError(
            "a datastore proposer comes without its datastore: pass "
            "drafter=specjax.load_datastore(folder).drafter(target)"
        )

    def init(
        self, params: DatastoreParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> OwnText:
        if (size := params.prior.shape[0]) != self.vocab_size:
            raise ValueError(
                f"the datastore has {size} tokens and the proposer {self.vocab_size}: make the "
                "proposer with Datastore.drafter(target)"
            )
        return OwnText.empty(prompt, capacity, lookahead.depth + 1)

    def truncate(self, state: OwnText, count: Array, last: Array | None) -> OwnText:
        return state.first(count)

    def begin(
        self, params: DatastoreParams, state: OwnText, context: Context
    ) -> tuple[OwnText, Reading, Array]:
        put = jax.vmap(lambda text, at, token: text.at[at].set(token))
        text = dataclasses.replace(
            state,
            tokens=put(state.tokens, state.length, context.pending),
            length=state.length + 1,
        )
        back = text.length[:, None] - 1 - jnp.arange(DEPTH)
        last = jnp.take_along_axis(text.tokens, jnp.maximum(back, 0), axis=1)
        last = jnp.where((back >= 0) & (last >= 0), last, NONE)
        logits = _predict(params, text, last[:, None])[:, 0]
        is_sure = jnp.ones(len(last), bool)
        if self.may_abstain:
            is_sure = logits.max(-1) >= jnp.log(self.min_share)
        return state, Reading(text, last, is_sure), logits

    def extend(
        self, params: DatastoreParams, reading: Reading, tokens: Array
    ) -> tuple[Reading, Array]:
        context = jnp.concatenate([tokens[:, None], reading.context[:, :-1]], axis=1)
        logits = _predict(params, reading.text, context[:, None])[:, 0]
        return dataclasses.replace(reading, context=context), logits

    def read_tree(
        self,
        params: DatastoreParams,
        reading: Reading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[Reading, Array]:
        rows, size = tokens.shape
        # The path to each node by depth: [B, T, D] -> [B, M, D].
        levels = (depth == jnp.arange(size)[:, None])[None, None] & mask[:, :, None]
        paths = jnp.sum(jnp.where(levels, tokens[:, None, None], 0), axis=-1)
        paths = jnp.take_along_axis(paths, at[..., None], axis=1)
        before = jnp.broadcast_to(reading.context[:, None, ::-1], (rows, at.shape[1], DEPTH))
        whole = jnp.concatenate([before, paths], axis=2)
        last = DEPTH + depth[at][..., None] - jnp.arange(DEPTH)
        return reading, _predict(params, reading.text, jnp.take_along_axis(whole, last, axis=2))

    def end(
        self, params: DatastoreParams, state: OwnText, reading: Reading, proposal: Proposal
    ) -> OwnText:
        return state

    def observe(self, params: DatastoreParams, state: OwnText, block: Block) -> OwnText:
        return state.append(block)

    def known(self, params: DatastoreParams, reading: Reading, tokens: Array) -> Array | None:
        if not self.may_abstain:
            return None
        return jnp.broadcast_to(reading.is_sure[:, None], tokens.shape)


def _predict(params: DatastoreParams, text: OwnText, context: Array) -> Array:
    """[B, M, DEPTH] -> logits [B, M, V]."""
    each = jax.vmap(jax.vmap(functools.partial(look_up, params), (0, None, None)))
    return each(context, text.tokens, text.length)
