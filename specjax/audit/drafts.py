"""What a proposer is given, and what it drafts: two claims that cost speed, not exactness.

A wrong draft is rejected, so its text is right and only slow.  A recorder in the proposer's place
notes what passes by, and the reference reads it again:

    features      the hidden states that `init` and `observe` get are those of the text's tokens
    acceptance    a first draft is accepted as often as its distributions allow

The second one needs a draft model that the reference can read too (`Chain` or `StaticTree` over a
`DraftSource`), and an exact rule.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.audit.reference import Reader, Rounding, noise
from specjax.audit.report import Check
from specjax.audit.samples import Texts
from specjax.audit.warping import Processing, softmax, warp
from specjax.contract import Arrays, Context, Proposer
from specjax.parallel import to_host
from specjax.proposers import Chain, DraftSource, StaticTree
from specjax.types import ABSENT, Block, Proposal


@struct.dataclass
class Recorded:
    """The state of a `Recorder`."""

    inner: Arrays
    length: Array  # [B] committed tokens
    drafts: Array  # [B, L] the first draft for the token at each index of the text, or ABSENT
    features: Array | None  # [B, L, E + sum E] hidden states and features of each committed token


@dataclasses.dataclass(frozen=True)
class Recorder(Proposer):
    """Proposes what `inner` proposes, and keeps what it is given."""

    inner: Proposer
    size: int  # E + sum E of its features; 0 if it reads no taps

    def __post_init__(self) -> None:
        own = self.inner
        self.declare(
            num_nodes=own.num_nodes, max_depth=own.max_depth, is_chain=own.is_chain,
            taps=own.taps, may_abstain=own.may_abstain, shares_cache=own.shares_cache,
            scratch=own.scratch, point_mass=own.point_mass, asks_draft=own.asks_draft,
        )  # fmt: skip

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Recorded:
        rows = len(prompt.tokens)
        room = capacity + self.max_depth + 1
        state = Recorded(
            self.inner.init(params, prompt, capacity),
            jnp.zeros(rows, jnp.int32),
            jnp.full((rows, room), ABSENT),
            jnp.zeros((rows, room, self.size), jnp.float32) if self.size else None,
        )
        return self._note(state, prompt)

    def propose(
        self, params: Arrays, state: Recorded, context: Context
    ) -> tuple[Proposal, Recorded]:
        proposal, inner = self.inner.propose(params, state.inner, context)
        first = jnp.where(proposal.parent[:, 1] == 0, proposal.tokens[:, 1], ABSENT)
        # The pending token is at index `length`, and the draft is for the one after it.
        rows = jnp.arange(len(first))
        drafts = state.drafts.at[rows, state.length + 1].set(first)
        return proposal, dataclasses.replace(state, inner=inner, drafts=drafts)

    def observe(self, params: Arrays, state: Recorded, block: Block) -> Recorded:
        inner = self.inner.observe(params, state.inner, block)
        return self._note(dataclasses.replace(state, inner=inner), block)

    def _note(self, state: Recorded, block: Block) -> Recorded:
        features = state.features
        if features is not None:
            assert block.features is not None  # the proposer has taps
            seen = jnp.concatenate([block.hidden, block.features], axis=-1).astype(jnp.float32)
            index = jnp.arange(block.tokens.shape[1])
            at = jnp.where(
                index < block.count[:, None], state.length[:, None] + index, features.shape[1]
            )
            rows = jnp.arange(len(at))[:, None]
            features = features.at[rows, at].set(seen, mode="drop")
        return dataclasses.replace(state, features=features, length=state.length + block.count)


def width_of_features(reader: Reader, taps: tuple[int, ...]) -> int:
    """E + sum E of a target's hidden states and features."""
    token = jnp.zeros((1, 1), jnp.int32)
    out = jax.eval_shape(
        lambda params: reader.model.apply(params, token, token, taps=taps), reader.params
    )
    return out.hidden.shape[-1] + out.features.shape[-1]


def features(texts: Texts, reader: Reader, taps: tuple[int, ...], eps: float) -> Check:
    """Are the hidden states that the proposer got those of the tokens it got them for?"""
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


def can_predict(proposer: Proposer) -> bool:
    """Can the reference read the draft model of this proposer?"""
    return isinstance(proposer, Chain | StaticTree) and isinstance(proposer.source, DraftSource)


def acceptance(
    texts: Texts,
    target: Reader,
    draft: Reader,
    processing: Processing,
    rounding: Rounding,
    shared_noise: bool,
) -> tuple[float, str]:
    """The p-value of "first drafts are accepted as often as they should be", and what was seen.

    With independent noise the probability of acceptance is sum min(p, q) at least (Leviathan et al.
    2022, arXiv 2211.17192, corollary 3.6).  With shared noise the draft is argmax(q + g), so
    acceptance is certain or impossible.
    """
    rows = texts.rows
    recorded = to_host(texts.state.proposer.drafts)
    found, wanted, spread, total = 0.0, 0.0, 0.0, 0
    for kind, settings in enumerate(rows.settings):
        nodes = [
            (int(row), at)
            for row in np.flatnonzero(rows.kind == kind)
            for at in range(rows.lengths[row], len(texts.texts[row]))
            if recorded[row, at] != ABSENT
        ]
        if not nodes:
            continue
        row, at = np.array(nodes).T
        before = [texts.texts[r][:n] for r, n in nodes]
        starts = [int(rows.lengths[r]) for r in row]
        scores, sure = [], np.ones(len(nodes), bool)
        size = target.model.vocab_size
        for reader in (target, draft):
            logits = _sized(_after(reader, texts, nodes), size)
            warped, fine = warp(processing(logits, before, starts), settings, rounding.slack)
            scores.append(warped)
            sure &= fine
        token = np.array([texts.texts[r][n] for r, n in nodes])
        accepted = recorded[row, at] == token
        if shared_noise:
            noisy = np.zeros_like(scores[0])
            if settings.temperature > 0:
                noisy = noise(rows.key[row], at, size)
            chance = (scores[1] + noisy).argmax(-1) == token
        else:
            chance = np.minimum(softmax(scores[0]), softmax(scores[1])).sum(-1)
        found += float(accepted[sure].sum())
        wanted += float(chance[sure].sum())
        spread += float((chance * (1 - chance))[sure].sum()) if not shared_noise else 0.0
        total += int(sure.sum())
    detail = f"{found:.0f} of {total} first drafts were accepted, {wanted:.1f} expected"
    if total == 0:
        return 1.0, detail
    # Rounding may flip a few.
    allowed = 2 + 8 * total * rounding.typical
    score = (wanted - found - allowed) / math.sqrt(spread + allowed)
    return (0.5 * math.erfc(score / math.sqrt(2)) if score > 0 else 1.0), detail


def _after(reader: Reader, texts: Texts, nodes: list[tuple[int, int]]) -> np.ndarray:
    """[M, V] the logits that predict the tokens at (row, index)."""
    most = texts.rows.new_tokens
    chosen = sorted({row for row, _ in nodes})
    kept: dict[tuple[int, int], np.ndarray] = {}
    asked = set(nodes)
    before = [texts.texts[row][:-1] for row in chosen]
    for numbers, logits, _ in reader.after(before, texts.rows.width, most):
        for n, number in enumerate(numbers):
            end = len(before[number])
            for at in range(max(1, end - most + 1), end + 1):
                if (chosen[number], at) in asked:
                    kept[chosen[number], at] = logits[n, at - end - 1]
    return np.stack([kept[node] for node in nodes])


def _sized(logits: np.ndarray, size: int) -> np.ndarray:
    """Logits on the target's vocabulary."""
    extra = size - logits.shape[1]
    if extra > 0:
        logits = np.pad(logits, ((0, 0), (0, extra)), constant_values=-np.inf)
    return logits[:, :size]
