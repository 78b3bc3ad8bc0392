"""Checks that any target, proposer and rule decode losslessly.

The decoder is compared with plain decoding under `match`, with passes of the same width.

    figures        every rule     the statistics agree with the texts
    greedy         exact rules    at temperature 0, beside sampled rows: the tokens are equal
    same key       shared noise   sampled with the same key: the tokens are equal
    same bits      chains         the target's logits after the text, read from either KV cache, are
                                  equal in every bit (not checked if the proposer may abstain, since
                                  then the width of a pass depends on the text)
    distribution   exact rules    chi-square test of the first tokens of many samples

A rule that does not claim to be exact is measured too, but it can fail in `figures` only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from specjax import metrics
from specjax.audit import chisquare
from specjax.contract import Arrays, Model
from specjax.decoding import Decoder
from specjax.parallel import leader, to_host
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.types import DecodeState, Params

# A cell needs this many texts in both samples together, so about 5 are expected in each sample.
_LEAST = 10

Samples = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
"""Texts with and without speculation, each as (number of the prompt, *new tokens)."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One property, whether the decoder claims it, whether it holds, and the measurement."""

    name: str
    claimed: bool
    holds: bool
    detail: str

    @property
    def verdict(self) -> str:
        return "pass" if self.holds else "FAIL" if self.claimed else "inexact by design"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `audit`; its `str` is a table."""

    subject: str
    checks: tuple[Check, ...]
    p_value: float  # of the distribution check
    total_variation: float  # measured in the cells of that check
    expected: float  # the total variation that chance alone would give
    detectable: float  # the total variation that would be detected with probability 0.95

    @property
    def passed(self) -> bool:
        """No claim is broken."""
        return all(check.holds or not check.claimed for check in self.checks)

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the broken claims."""
        return tuple(check.name for check in self.checks if check.claimed and not check.holds)

    def __str__(self) -> str:
        width = max(len(check.verdict) for check in self.checks)
        lines = [
            f"  {check.name:<14} {check.verdict:<{width}}  {check.detail}" for check in self.checks
        ]
        power = (
            f"a total variation of {self.detectable:.3f} "
            "would have been found with probability 0.95"
        )
        end = "passed: no claim is broken" if self.passed else f"FAILED: {', '.join(self.failures)}"
        return "\n".join([self.subject, "", *lines, "", f"  {power}", f"  {end}"])


def audit(
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    samples: int = 4096,
    num_tokens: int = 3,
    rows: int = 64,
    seed: int = 0,
    significance: float = 1e-4,
    **settings: Any,
) -> Report:
    """Check that a decoder is as exact as it claims.

    Args:
      decoder: target, proposer and rule; its capacity must hold the longest prompt and
        `max_new_tokens` more tokens.
      params: arrays of the decoder.
      prompts: token ids; at most half as many as `rows`.  A few prompts after which the target is
        uncertain give the most sensitive test.
      max_new_tokens: length of the texts that are compared token for token.
      samples: the number of texts drawn with speculation, over all prompts; as many are drawn
        without it.
      num_tokens: the length of those texts, which the distribution check compares.
      rows: rows of a batch; all batches run the same program.
      seed: of all keys.
      significance: the probability that a lossless decoder fails the distribution check.
      **settings: numbers for `Sampling.create`; the temperature is 1 by default, and must be
        greater than 0.

    Raises:
      ValueError: arguments that do not fit, and what to pass instead; before anything is compiled.
    """
    settings = {"temperature": 1.0, **settings}
    ids = [list(prompt) for prompt in prompts]
    _check(
        decoder,
        ids,
        max_new_tokens,
        samples,
        num_tokens,
        rows,
        significance,
        settings["temperature"],
    )
    prompt_of = np.arange(rows) % len(ids)
    lengths = np.array([len(prompt) for prompt in ids], np.int32)[prompt_of]
    tokens = np.zeros((rows, lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompt_of, strict=True):
        row[: len(ids[prompt])] = ids[prompt]
    sampling = Sampling.create(rows, **settings)
    greedy = np.arange(rows) // len(ids) % 2 == 0
    mixed = dataclasses.replace(sampling, temperature=jnp.where(greedy, 0, sampling.temperature))

    plain = Decoder(
        decoder.target,
        NoProposer(decoder.proposer.num_nodes),
        Match(),
        decoder.eos,
        decoder.capacity,
    )
    both = ((decoder, params), (plain, Params(params.target)))
    limit = lengths + np.int32(max_new_tokens)
    starts = [
        dec.prefill(
            arrays, tokens, lengths, limit=limit, sampling=sampling, key=_keys(seed, 0, rows)
        )
        for dec, arrays in both
    ]

    speculative, reference = (
        _decode(dec, arrays, start, limit, mixed, _keys(seed, 0, rows))
        for (dec, arrays), start in zip(both, starts, strict=True)
    )
    texts, wanted = _texts(speculative, lengths), _texts(reference, lengths)
    same = np.array([text == other for text, other in zip(texts, wanted, strict=True)])
    exact = decoder.rule.exact
    checks = [_figures(speculative, lengths)]
    checks.append(_equal("greedy", exact, greedy, same, texts, wanted))
    if exact and decoder.rule.shared_noise:
        checks.append(_equal("same key", True, ~greedy, same, texts, wanted))
    if exact and decoder.proposer.is_chain and not decoder.proposer.may_abstain:
        checks.append(_same_bits(decoder, params, speculative, reference, same))

    drawn: Samples = ([], [])
    limit = lengths + np.int32(num_tokens)
    quiet = None if leader() else True
    for number in tqdm(
        range(-(-samples // rows)), desc="audit", unit="batch", disable=quiet, file=sys.stderr
    ):
        for side, ((dec, arrays), start) in enumerate(zip(both, starts, strict=True)):
            # The two sides use different keys, so that the samples are independent.
            key = _keys(seed, 1 + 2 * number + side, rows)
            state = _decode(dec, arrays, start, limit, sampling, key)
            drawn[side].extend(
                (int(prompt), *text)
                for prompt, text in zip(prompt_of, _texts(state, lengths), strict=True)
            )
    proposer = decoder.proposer
    subject = (
        f"{type(proposer).__name__} of {proposer.num_nodes} nodes, rule {decoder.rule}"
        f"{'' if exact else ' (inexact)'}; {len(ids)} prompts, "
    ) + ", ".join(f"{name} {value:g}" for name, value in settings.items())
    return _judge(subject, checks, drawn, exact, significance)


@functools.partial(jax.jit, static_argnums=0)
def _decode(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    limit: np.ndarray,
    sampling: Sampling,
    key: Array,
) -> DecodeState:
    """Run a prefilled batch with these settings.

    Nothing is donated, because every batch starts from the same `state`.
    """
    state = dataclasses.replace(
        state, limit=limit, done=state.length >= limit, sampling=sampling, key=key
    )
    return decoder.run(params, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_logits(target: Model, width: int, params: Arrays, state: DecodeState) -> Array:
    """The logits [B, V] after the pending token, from a pass over `width` tokens."""
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    positions = state.cache.length[:, None] + jnp.arange(width)
    return target.apply(
        params, jnp.pad(pending, ((0, 0), (0, width - 1))), positions, state.cache
    ).logits[:, 0]


def _keys(seed: int, number: int, rows: int) -> Array:
    return jax.random.split(jax.random.fold_in(make_key(seed), number), rows)


def _texts(state: DecodeState, lengths: np.ndarray) -> list[tuple[int, ...]]:
    """The new tokens of every row."""
    tokens, ends = to_host((state.tokens, state.length))
    return [
        tuple(row[start:end].tolist())
        for row, start, end in zip(tokens, lengths, ends, strict=True)
    ]


def _figures(state: DecodeState, lengths: np.ndarray) -> Check:
    """Do the statistics agree with the texts?

    Each pass emits one token more than it accepts; only a row's last pass may be cut short.
    """
    stats, ends = to_host((state.stats, state.length))
    cut = stats.accepted + stats.target_passes - stats.emitted
    right = (
        (stats.emitted == ends - lengths)
        & ((cut == 0) | (cut == 1))
        & (stats.accepted <= stats.tested)
        & (stats.tested <= stats.proposed)
    )
    alpha, tau = metrics.acceptance_rate(stats), metrics.mean_accepted_length(stats)
    seen = f"alpha {'none' if alpha is None else f'{alpha:.3f}'}, tau {tau:.2f}"
    wrong = (
        ""
        if right.all()
        else f"; those of {(~right).sum()} of {len(right)} rows do not fit their texts"
    )
    return Check("figures", True, bool(right.all()), seen + wrong)


def _equal(
    name: str,
    claimed: bool,
    rows: np.ndarray,
    same: np.ndarray,
    texts: list[tuple[int, ...]],
    reference: list[tuple[int, ...]],
) -> Check:
    """Are the texts of the rows `rows` [B] bool equal token for token?"""
    detail = f"{(same & rows).sum()} of {rows.sum()} texts equal those of plain decoding"
    for row in np.flatnonzero(rows & ~same)[:1]:
        pairs = zip(texts[row], reference[row], strict=False)
        at = next(
            (n for n, (a, b) in enumerate(pairs) if a != b),
            min(len(texts[row]), len(reference[row])),
        )
        detail += f"; row {row} differs from new token {at} on"
    return Check(name, claimed, bool(same[rows].all()), detail)


def _same_bits(
    decoder: Decoder,
    params: Params,
    speculative: DecodeState,
    reference: DecodeState,
    same: np.ndarray,
) -> Check:
    """Do both KV caches give the same bits, on the rows with equal texts?"""
    logits, wanted = (
        to_host(_next_logits(decoder.target, decoder.proposer.num_nodes, params.target, state))
        for state in (speculative, reference)
    )
    bits = np.array([a.tobytes() == b.tobytes() for a, b in zip(logits, wanted, strict=True)])
    detail = (
        f"after {(bits & same).sum()} of {same.sum()} equal texts the logits agree in every bit"
    )
    return Check("same bits", True, bool(same.any() and bits[same].all()), detail)


def _judge(
    subject: str, checks: list[Check], drawn: Samples, exact: bool, significance: float
) -> Report:
    """Add the distribution check: a chi-square test of two samples of equal size."""
    cells = _cells([*drawn[0], *drawn[1]])
    order = sorted(set(cells.values()))
    counts = [collections.Counter(cells[text] for text in side) for side in drawn]
    speculative, plain = (np.array([count[cell] for cell in order], float) for count in counts)
    size = len(drawn[0])
    # Both samples have equally many texts of each prompt, which costs one degree of freedom.
    degrees = len(order) - len({cell[0] for cell in order})
    x = chisquare.statistic(speculative, plain)
    p_value = chisquare.survival(x, degrees)
    distance = float(np.abs(speculative - plain).sum() / (2 * size))
    expected = float(np.sqrt(2 / math.pi * (speculative + plain)).sum() / (2 * size))
    bias = chisquare.detectable(size, degrees, significance)
    detail = (
        f"chi-square {x:.1f} on {degrees} degrees of freedom, p = {p_value:.2g}; "
        f"total variation {distance:.3f}, {expected:.3f} by chance"
    )
    checks = [*checks, Check("distribution", exact, p_value >= significance, detail)]
    return Report(subject, tuple(checks), p_value, distance, expected, bias)


def _cells(texts: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The cell of each text: its longest prefix that is frequent enough.

    A text begins with the number of its prompt, and every cell contains at least that.
    """
    cells: dict[tuple[int, ...], tuple[int, ...]] = {}
    for size in range(max(map(len, texts)), 0, -1):
        counts = collections.Counter(text[:size] for text in texts)
        cells |= {text: text[:size] for text in texts if counts[text[:size]] >= _LEAST or size == 1}
        texts = [text for text in texts if text not in cells]
    return cells


def _check(
    decoder: Decoder,
    ids: list[list[int]],
    max_new_tokens: int,
    samples: int,
    num_tokens: int,
    rows: int,
    significance: float,
    temperature: float,
) -> None:
    """Raises ValueError for arguments of `audit` that do not fit."""
    if not ids or not all(ids):
        raise ValueError("audit needs at least one prompt, and each needs at least one token")
    least, most = min(map(min, ids)), max(map(max, ids))
    if least < 0 or most >= decoder.target.vocab_size:
        raise ValueError(
            f"the prompts hold token ids from {least} to {most}; "
            f"the vocabulary has {decoder.target.vocab_size}"
        )
    if rows < 2 * len(ids):
        raise ValueError(
            f"rows={rows} are too few for {len(ids)} prompts, each greedy and sampled: "
            f"pass {2 * len(ids)}"
        )
    if not 1 <= num_tokens <= max_new_tokens:
        raise ValueError(
            f"num_tokens={num_tokens}; it must lie in [1, max_new_tokens={max_new_tokens}]"
        )
    if samples < rows:
        raise ValueError(f"samples={samples}; it must be at least {rows}, the rows of a batch")
    if not 0 < significance < 1:
        raise ValueError(f"significance={significance}; it must lie between 0 and 1")
    if not np.ndim(temperature) == 0 or not temperature > 0:
        raise ValueError(
            f"temperature={temperature} draws nothing to compare; "
            "pass one greater than 0 (0 is checked too)"
        )
    room, longest = min(decoder.capacity, decoder.target.max_positions), max(map(len, ids))
    if longest + max_new_tokens > room:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into "
            f"{room}: raise the decoder's capacity, or pass shorter prompts or a smaller "
            "max_new_tokens"
        )
