"""Checks of single texts: their figures, their ends, and each token against the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.auditing.reference import Reader, Rounding, noise
from specjax.auditing.report import Check
from specjax.auditing.samples import GREEDY, Rows, Texts
from specjax.auditing.warping import Processing, warp
from specjax.contract import Model
from specjax.decoding import acceptance_rate, mean_accepted_length
from specjax.parallel import to_host
from specjax.types import ArrayTree, DecodeState


def figures(texts: Texts) -> Check:
    """Checks that the statistics agree with the texts.

    Each pass emits one token more than it accepts; only a row's last pass may be cut short.
    """
    stats, ends = to_host((texts.state.stats, texts.state.length))
    cut = stats.accepted + stats.target_passes - stats.emitted
    right = (
        (stats.emitted == ends - texts.rows.lengths)
        & ((cut == 0) | (cut == 1))
        & (stats.accepted <= stats.tested)
        & (stats.tested <= stats.proposed)
    )
    alpha, tau = acceptance_rate(stats), mean_accepted_length(stats)
    seen = f"alpha {'none' if alpha is None else f'{alpha:.3f}'}, tau {tau:.2f}"
    wrong = (
        ""
        if right.all()
        else f"; those of {(~right).sum()} of {len(right)} rows do not fit their texts"
    )
    return Check("figures", True, bool(right.all()), seen + wrong)


def ends(texts: Texts, eos: tuple[int, ...]) -> Check:
    """Checks that every row ends at its first EOS or at its limit, with its prompt unchanged."""
    right = 0
    for row, (text, new) in enumerate(zip(texts.texts, texts.new, strict=True)):
        prompt = list(texts.rows.prompts[texts.rows.prompt_of[row]])
        limit = int(texts.rows.limit[row]) - len(prompt)
        first = next((n + 1 for n, token in enumerate(new) if token in eos), limit)
        right += text[: len(prompt)] == prompt and len(new) == min(first, limit)
    total = len(texts.texts)
    detail = f"{right} of {total} texts end at their first EOS or at their limit"
    return Check("ends", True, right == total, detail)


@dataclasses.dataclass
class Judged:
    """The tokens of some rows, with the reference's own choice for each."""

    tokens: int = 0
    near: int = 0  # other tokens than the reference's, whose score is equal up to rounding
    unsure: int = 0  # rounding decides what the filters keep
    wrong: int = 0
    first: str = ""  # where the first wrong token is

    def check(self, name: str, claimed: bool) -> Check:
        same = self.tokens - self.near - self.unsure - self.wrong
        detail = f"{same} of {self.tokens} tokens are the reference's"
        if self.near:
            detail += f", {self.near} tie with it up to rounding"
        if self.unsure:
            detail += f", {self.unsure} lie at the bound of a filter"
        if self.wrong:
            detail += f", {self.wrong} are others; the first is {self.first}"
        label = "float noise" if self.near else ""
        return Check(name, claimed, self.wrong == 0 and same > 0, detail, label)


def tokens(
    rows: Rows,
    texts: list[list[int]],
    reader: Reader,
    processing: Processing,
    rounding: Rounding,
    shared_noise: bool,
) -> tuple[Judged, Judged]:
    """Judges every token of the greedy rows, and with shared noise those of the sampled rows.

    `texts` are those of the rows, each with its prompt.
    """
    greedy, sampled = Judged(), Judged()
    starts = rows.lengths
    chosen = [
        row
        for row, text in enumerate(texts)
        if len(text) > starts[row] and (shared_noise or rows.kind[row] == GREEDY)
    ]
    # The last token of a text decides nothing, so the logits are those after each token before it.
    before = [texts[row][: rows.limit[row]][:-1] for row in chosen]
    for numbers, logits, _ in reader.after(before, rows.width, rows.new_tokens):
        for kind in range(len(rows.settings)):
            nodes = [
                (chosen[number], at, logits[n, at - len(before[number]) - 1])
                for n, number in enumerate(numbers)
                if rows.kind[chosen[number]] == kind
                for at in range(starts[chosen[number]], len(before[number]) + 1)
            ]
            if nodes:
                into = greedy if kind == GREEDY else sampled
                _judge(into, rows, texts, nodes, kind, processing, rounding)
    return greedy, sampled


def _judge(
    into: Judged,
    rows: Rows,
    texts: list[list[int]],
    nodes: list[tuple[int, int, np.ndarray]],
    kind: int,
    processing: Processing,
    rounding: Rounding,
) -> None:
    """Judges the tokens at (row, index in the text), with the reference's logits before them."""
    settings = rows.settings[kind]
    row, at = (np.array([node[i] for node in nodes]) for i in range(2))
    logits = processing(
        np.stack([node[2] for node in nodes]),
        [texts[r][:n] for r, n, _ in nodes],
        [int(rows.lengths[r]) for r in row],
    )
    warped, sure = warp(logits, settings, rounding.slack)
    slack = rounding.slack
    if kind == GREEDY:
        score = logits
        sure = np.ones(len(logits), bool)
    else:
        score = warped + noise(rows.key[row], at, logits.shape[1])
        slack = slack / settings.temperature + 1e-5
    emitted = np.array([texts[r][n] for r, n, _ in nodes])
    best = score.argmax(-1)
    index = np.arange(len(score))
    with np.errstate(invalid="ignore"):
        behind = score[index, best] - score[index, emitted]
    same = emitted == best
    near = ~same & sure & (behind <= slack)
    wrong = ~same & sure & ~near
    into.tokens += len(nodes)
    into.near += int(near.sum())
    into.unsure += int((~sure & ~same).sum())
    into.wrong += int(wrong.sum())
    for n in np.flatnonzero(wrong)[: not into.first]:
        new = at[n] - rows.lengths[row[n]]
        into.first = (
            f"new token {new} of row {row[n]}: {emitted[n]}, the reference has {best[n]}, "
            f"{behind[n]:.2g} ahead"
        )


def layout(texts: Texts, other: Texts, order: np.ndarray, rounding: Rounding) -> Check:
    """Checks that a text depends on the row's own key, prompt and settings, not on its index.

    Rounding may flip a draw of a number close to a probability.  The expected number of such flips
    is at most that of the tokens times the rounding of a logit.
    """
    differ = sum(other.new[n] != texts.new[row] for n, row in enumerate(order))
    size = sum(map(len, texts.new))
    flips = 8 * size * rounding.typical
    most = flips + 6 * flips**0.5 + (1 if rounding.typical else 0)
    detail = (
        f"{len(order) - differ} of {len(order)} texts are the same with the rows in another order"
    )
    return Check("row order", True, differ <= most, detail, "float noise" if differ else "")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_logits(target: Model, width: int, params: ArrayTree, state: DecodeState) -> Array:
    """Returns the logits [B, V] after the pending token, from a pass over `width` tokens."""
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    positions = state.cache.length[:, None] + jnp.arange(width)
    return (
        target.apply(params, jnp.pad(pending, ((0, 0), (0, width - 1))), positions, state.cache)
        .logits[:, 0]
        .astype(jnp.float32)
    )


def next_logits(target: Model, width: int, params: ArrayTree, state: DecodeState) -> np.ndarray:
    """Returns the logits [B, V] after each text, from its KV cache and one pass."""
    return to_host(_next_logits(target, width, params, state))


def same_bits(texts: Texts, plain: Texts, logits: np.ndarray, wanted: np.ndarray) -> Check:
    """Checks that both KV caches give the same bits, on the rows with equal texts."""
    same = np.array([a == b for a, b in zip(texts.texts, plain.texts, strict=True)])
    bits = np.array([a.tobytes() == b.tobytes() for a, b in zip(logits, wanted, strict=True)])
    detail = (
        f"after {(bits & same).sum()} of {same.sum()} equal texts the logits agree in every bit"
    )
    return Check("same bits", True, bool(same.any() and bits[same].all()), detail)


def widths(narrow: np.ndarray, wide: np.ndarray, width: int, eps: float) -> Check:
    """Checks that passes over one and over `width` tokens give the same logits up to rounding."""
    apart = float(np.abs(np.where(np.isfinite(narrow), narrow - wide, 0)).max())
    size = float(np.abs(np.where(np.isfinite(narrow), narrow, 0)).max())
    bound = 64 * eps * max(size, 1.0)
    detail = (
        f"logits after one token, read alone or among {width}, differ by at most {apart:.2g}; "
        f"rounding explains {bound:.2g}"
    )
    holds = bool(np.isfinite(wide).all() or not np.isfinite(narrow).all()) and apart <= bound
    return Check("width", True, holds, detail, "float noise" if apart else "")
