"""Checks the inputs and the drafts of a proposer: two claims that cost speed, not exactness.

A wrong draft is rejected, so its text is right and only slow.

    features      the hidden states that `init` and `observe` get are those of the text's tokens: a
                  recorder replaces the proposer and stores them, and the reference reads them again
    acceptance    with the target as its own draft, every draft is accepted (for `Chain` and
                  `StaticTree` over a `DraftSource`, and exact rules)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.auditing.reference import Reader, Rounding
from specjax.auditing.report import Check
from specjax.auditing.samples import Texts
from specjax.contract import ArrayTree, Context, Wrapper
from specjax.decoding import Decoder
from specjax.methods import DraftSource
from specjax.parallel import to_host
from specjax.proposers import Chain, StaticTree
from specjax.types import Block, Proposal


@struct.dataclass
class Recorded:
    """The state of a `Recorder`."""

    inner: ArrayTree
    length: Array  # [B] committed tokens
    features: Array  # [B, L, E + sum E] hidden states and features of each committed token


@dataclasses.dataclass(frozen=True)
class Recorder(Wrapper):
    """Proposes the drafts of `inner`, and stores the inputs that it gets."""

    size: int  # E + sum E of its features

    def __post_init__(self) -> None:
        self.declare_like(estimates=False, resumes=False, separable=False)

    def init(self, params: ArrayTree, prompt: Block, capacity: int) -> Recorded:
        rows = len(prompt.tokens)
        room = capacity + self.max_depth + 1
        return Recorded(
            self.inner.init(params, prompt, capacity),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, room, self.size), jnp.float32),
        )

    def read(self, params: ArrayTree, state: Recorded, block: Block) -> Recorded:
        inner = self.inner.read(params, state.inner, block)
        return self._note(dataclasses.replace(state, inner=inner), block)

    def propose(
        self, params: ArrayTree, state: Recorded, context: Context
    ) -> tuple[Proposal, Recorded]:
        proposal, inner = self.inner.propose(params, state.inner, context)
        return proposal, dataclasses.replace(state, inner=inner)

    def observe(self, params: ArrayTree, state: Recorded, block: Block) -> Recorded:
        inner = self.inner.observe(params, state.inner, block)
        return self._note(dataclasses.replace(state, inner=inner), block)

    def _note(self, state: Recorded, block: Block) -> Recorded:
        assert block.features is not None  # the proposer has taps
        seen = jnp.concatenate([block.hidden, block.features], axis=-1).astype(jnp.float32)
        index, room = jnp.arange(block.tokens.shape[1]), state.features.shape[1]
        at = jnp.where(index < block.count[:, None], state.length[:, None] + index, room)
        rows = jnp.arange(len(at))[:, None]
        features = state.features.at[rows, at].set(seen, mode="drop")
        return dataclasses.replace(state, features=features, length=state.length + block.count)


def width_of_features(reader: Reader, taps: tuple[int, ...]) -> int:
    """Returns E + sum E of a target's hidden states and features."""
    token = jnp.zeros((1, 1), jnp.int32)
    out = jax.eval_shape(
        lambda params: reader.model.apply(params, token, token, taps=taps), reader.params
    )
    return out.hidden.shape[-1] + out.features.shape[-1]


def features(texts: Texts, reader: Reader, taps: tuple[int, ...], eps: float) -> Check:
    """Checks that the proposer got the hidden states of the tokens that it got."""
    recorded = to_host(texts.state.proposer.features)
    total, wrong = 0, 0
    for numbers, _, seen in reader.after(texts.texts, texts.rows.width, 1, taps):
        assert seen is not None
        for n, number in enumerate(numbers):
            count = len(texts.texts[number]) - 1  # the last token is pending
            wanted, given = seen[n, :count], recorded[number, :count]
            bound = 256 * eps * max(1.0, float(np.sqrt((wanted**2).mean())))
            wrong += int((np.abs(wanted - given).max(-1) > bound).sum())
            total += count
    detail = f"the proposer got the hidden states of {total - wrong} of {total} tokens"
    return Check("features", True, wrong == 0, detail)


def with_itself(decoder: Decoder) -> Decoder | None:
    """Returns the decoder with the target as its own draft; None if no draft model fits."""
    proposer = decoder.proposer
    if not isinstance(proposer, Chain | StaticTree) or not isinstance(proposer.source, DraftSource):
        return None
    source = dataclasses.replace(proposer.source, model=decoder.target)
    return dataclasses.replace(decoder, proposer=dataclasses.replace(proposer, source=source))


def acceptance(texts: Texts, rounding: Rounding) -> Check:
    """Checks that every judged draft is accepted where the draft's distribution is the target's.

    An exact rule then has a residual of 0: min(1, p / q) = 1.  Only rounding may reject a draft.
    """
    stats = to_host(texts.state.stats)
    accepted, tested = int(stats.accepted.sum()), int(stats.tested.sum())
    allowed = 1 + 8 * tested * rounding.typical
    # The last pass of a row may be cut by an EOS or the limit; then the cut drafts do not count.
    detail = f"with the target as its own draft {accepted} of {tested} judged drafts were accepted"
    label = "float noise" if accepted < tested else ""
    return Check("acceptance", True, 0 < tested <= accepted + allowed, detail, label)
