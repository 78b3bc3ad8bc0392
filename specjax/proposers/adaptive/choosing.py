"""`choose`: chooses the option of an `Adaptive` proposer that the next step takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.prefix_sums import running_sum
from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.trials import Trials


@dataclasses.dataclass(frozen=True)
class Part:
    """The inputs of a choice for one proposer, the lookup or the drafter, before a step."""

    name: str
    gains: Array  # [B, W] expected tokens with its drafts, for each of the first W widths
    able: Array  # [B] bool: it can draft
    late: Array  # [B] what it has to read first, in steps of plain decoding
    trials: Trials
    # [B, W'] if its drafts are trees: those of chains instead, whose options come after the others
    chains: Array | None = None

    @property
    def forms(self) -> list[Array]:
        """The gains of each form of its drafts."""
        return [self.gains] if self.chains is None else [self.gains, self.chains]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen option of each row.  Times are in steps of plain decoding."""

    option: Array  # [B] int32: an index into the options
    time: Array  # [B] of the step, with the wait for the other rows
    worth: Array  # [B] the time that a token would take otherwise
    tried: Array  # [B] bool: it is a trial
    weight: Array  # [B] of each row's tokens for all rows; they add up to 1


def choose(
    widths: tuple[int, ...],
    seconds: Array,
    parts: Sequence[Part],
    alive: Array,
    remaining: Array | None,
    together: bool,
    policy: Policy = POLICY,
    levels: Array | None = None,
) -> Choice:
    """Chooses the option with the most tokens a second, or a trial of another one that can be paid.

    Args:
      widths: numbers of tokens that the target may read of a row, from 1.
      seconds: [O], or for each row [B, O], of a step without drafts, and with the drafts of each
        proposer at each other width.
      parts: the lookup, then the drafter, of those that exist.  With an option of the drafter a row
        takes the drafts of the lookup where they promise more.
      alive: [B] bool, rows that are not done.
      remaining: [B] the most tokens that each row may still get, or None.
      together: all rows take one option.  The batch is done when its last row is, so rows that
        have more left count more, and drafts with which rows drift apart count less.
      policy: the numbers of the choice.
      levels: [W] the most drafts of each width that can be accepted.  If they are given, nothing is
        tried that would not pay even if all of them were.
    """
    # All numbers are float32, whatever JAX takes for a quotient of integers.
    rows, count = len(alive), jnp.maximum(alive.sum(dtype=jnp.float32), 1)
    together &= rows > 1  # one row waits for nobody
    weight = _weights(alive, remaining, policy.apart)
    lates = [jnp.where(alive, part.late, 0.0) for part in parts]
    if together:
        lates = [jnp.full(rows, late.max()) for late in lates]

    def waits(gains: Array) -> Array:
        """Returns the factor by which a step takes longer since a batch waits for its last row."""
        if not together or remaining is None:
            return jnp.ones((), jnp.float32)
        left = remaining.astype(jnp.float32)
        ahead = jnp.maximum(jnp.where(alive, left, 0.0).sum() / count, 1.0)
        # Rows that are further apart already do not wait for what is added.
        apart = jnp.where(alive, (left - ahead) ** 2, 0.0).sum() / count
        more = ahead * _spread(gains, widths[: gains.shape[1]]) ** 2
        apart = jnp.maximum(apart - more, 0.0)
        added = jnp.sqrt(apart + more) - jnp.sqrt(apart)
        # The expected greatest of `count` normal variables (Blom 1958).
        last = jax.scipy.special.ndtri((count - 0.375) / (count + 0.25))
        return 1 / (1 - jnp.minimum(last * added / ahead, 0.5))

    def of_batch(gains: Array) -> Array:
        if not together:
            return gains
        total = (gains * weight[:, None]).sum(0)
        return jnp.broadcast_to(jnp.maximum(total, 1.0), gains.shape)

    best = jnp.ones((rows, len(widths)), jnp.float32)
    plain, quotients, options = (
        seconds[..., :1],
        [jnp.full((rows, 1), 1 + policy.margin, jnp.float32)],
        [],
    )
    first = 1
    for part, late in zip(parts, lates, strict=True):
        begins, found, others = first, list[tuple[Array, ...]](), best
        for form in part.forms:
            sizes = form.shape[1]
            own = seconds[..., first : first + sizes - 1] / plain
            # More nodes than it has drafts for give as much as all of its drafts.
            wider = jnp.pad(form, ((0, 0), (0, len(widths) - sizes)), mode="edge")
            wider = jnp.maximum(others, wider)
            best = jnp.maximum(best, wider)
            gains = of_batch(wider[:, :sizes]), of_batch(form)
            # Alone it counts as a trial, or a part that always promises less would never be tried.
            times = [own * waits(each) for each in gains]
            # The wait counts against plain decoding only.  Among numbers of drafts it would favour
            # few drafts too much: rows that draft wait for each other in any case.
            pays = gains[0][:, 1:] / (times[0] + late[:, None] / policy.stays) > 1 + policy.margin
            pays &= ~part.trials.barred[:, None]
            quotients.append(
                jnp.where(pays, gains[0][:, 1:] / (own + late[:, None] / policy.stays), 0.0)
            )
            times = [each + late[:, None] for each in times]
            hopeful = jnp.ones((), bool)
            if levels is not None:
                hopeful = ((1 + levels[1:sizes]) / own > 1 + policy.margin).any(-1)
            hopeful = jnp.broadcast_to(hopeful, rows)[:, None]
            found.append((gains[0][:, 1:], times[0], gains[1][:, 1:], times[1], hopeful))
            first += sizes - 1
        joined = [jnp.concatenate(each, axis=1) for each in zip(*found, strict=True)]
        options.append((begins, *joined[:4], joined[4].any(1)))
    option = jnp.argmax(jnp.concatenate(quotients, axis=1), axis=1).astype(jnp.int32)
    one = jnp.ones((rows, 1), jnp.float32)
    taken = jnp.concatenate([one, *(gains for _, gains, *_ in options)], axis=1)
    times = jnp.concatenate([one, *(times for _, _, times, *_ in options)], axis=1)
    time, tried = _at(times, option), jnp.zeros(rows, bool)
    worth = time / _at(taken, option)
    chosen = option
    for part, (first, _, _, gains, times, hopeful) in zip(parts, options, strict=True):
        losses = times - gains * worth[:, None]
        loss, least = losses.min(1), jnp.argmin(losses, axis=1)
        wanted = alive & part.able & part.trials.due(loss, chosen == 0) & jnp.isfinite(loss)
        wanted &= hopeful
        if together:
            wanted = jnp.broadcast_to(2 * wanted.sum() > alive.sum(), wanted.shape)
        used = (chosen >= first) & (chosen < first + gains.shape[1])
        wanted &= ~used & ~tried
        option = jnp.where(wanted, first + least, option).astype(jnp.int32)
        time = jnp.where(wanted, _at(times, least), time)
        tried |= wanted
    return Choice(option, time, jnp.where(tried, worth, 1.0), tried, weight)


def _weights(alive: Array, remaining: Array | None, apart: float) -> Array:
    """[B]: the weight of a token of each row, if all rows take one option; they add up to 1."""
    if len(alive) == 1:
        return jnp.ones(1, jnp.float32)
    left = jnp.zeros(alive.shape) if remaining is None else remaining
    left = jnp.where(alive, left.astype(jnp.float32), 0.0)
    most = jnp.maximum(left.max(), 1.0)
    weight = jnp.where(alive, jnp.exp((left - most) / (apart * jnp.sqrt(most))), 0.0)
    return weight / jnp.maximum(weight.sum(), 1e-9)


def _spread(gains: Array, widths: tuple[int, ...]) -> Array:
    """[B, W - 1]: the standard deviation of the tokens of a step, over the root of their mean.

    A chain of w - 1 drafts that is right up to draft k gives k + 1 tokens, and their squares grow
    by the sums of neighbouring widths.
    """
    sums = jnp.array([a + b for a, b in itertools.pairwise(widths)], jnp.float32)
    squares = 1 + running_sum(jnp.diff(gains, axis=1) * sums)
    mean = gains[:, 1:]
    return jnp.sqrt(jnp.maximum(squares - mean**2, 0.0) / mean)


def _at(x: Array, index: Array) -> Array:
    """Returns [B], the entries of x [B, O] at the index [B]."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
