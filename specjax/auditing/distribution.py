"""Tests whether sampled texts follow the target's distribution: exact probabilities, chi-square.

The reference gives the probability of every frequent text, so only the decoder's texts are random:

    cells       the texts of which at least `LEAST` are expected, cut where fewer are; the rest of
                a node's children are one cell together
    statistic   sum((found - wanted)^2 / wanted)
    a text that the settings exclude      fails at once

With n samples and a total variation of TV the noncentrality is at least 4 n TV^2, twice that of a
test of two samples of this size.  Rounding may explain a part of it, which the critical value
allows for.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.auditing import chisquare
from specjax.auditing.reference import Reader, Rounding
from specjax.auditing.report import POWER, Distribution
from specjax.auditing.warping import Processing, Settings, softmax, warp

LEAST = 8.0

Prefix = tuple[int, ...]
Group = tuple[int, int]
"""The number of a kind of settings, and that of a prompt."""


@dataclasses.dataclass
class Cells:
    """The cells of the texts of one prompt and kind.

    Attributes:
      wanted: the expected share of each cell.
      own: the cell of each prefix that has one or leads to some; None if it leads to some.
      rest: by prefix, the cell of its other children.
      excluded: by prefix, [V] bool; the tokens that the settings exclude there.
    """

    wanted: list[float] = dataclasses.field(default_factory=list)
    own: dict[Prefix, int | None] = dataclasses.field(default_factory=dict)
    rest: dict[Prefix, int] = dataclasses.field(default_factory=dict)
    excluded: dict[Prefix, np.ndarray] = dataclasses.field(default_factory=dict)

    def add(self, share: float) -> int:
        """Adds a new cell."""
        self.wanted.append(share)
        return len(self.wanted) - 1

    def find(self, text: Prefix) -> int | None:
        """Returns the cell of a text; None if the settings exclude it."""
        for end in range(len(text) + 1):
            cell = self.own[text[:end]]
            if cell is not None or end == len(text):
                return cell
            if self.excluded[text[:end]][text[end]]:
                return None
            if text[: end + 1] not in self.own:
                return self.rest.get(text[:end])
        return None

    def split(self, prefix: Prefix, probs: np.ndarray, share: float, size: int) -> list[Prefix]:
        """Makes cells of the children of `prefix`; returns those that may be split again."""
        kept = np.flatnonzero(size * share * probs >= LEAST)
        left = share * (1 - probs[kept].sum())
        if size * left < 1e-9:
            left = 0.0
        if not len(kept) or (len(kept) == 1 and 0 < size * left < LEAST):
            self.own[prefix] = self.add(share)
            return []
        self.own[prefix], self.excluded[prefix] = None, probs == 0
        kept = kept[np.argsort(probs[kept])]
        if left > 0:
            merged = size * left < LEAST  # then the rarest of the frequent children joins the rest
            joined = kept[:1] if merged else kept[:0]
            self.rest[prefix] = self.add(left + share * float(probs[joined].sum()))
            for token in joined:
                self.own[(*prefix, int(token))] = self.rest[prefix]
            kept = kept[len(joined) :]
        return [(*prefix, int(token)) for token in kept]


def cells_of(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Settings],
    processing: Processing,
    sizes: Mapping[Group, int],
    num_tokens: int,
    slack: float,
) -> dict[Group, Cells]:
    """Returns the cells of every group, for as many samples as `sizes` has."""
    width = max(map(len, prompts)) + num_tokens
    made = {group: Cells() for group in sizes}
    front: dict[Group, dict[Prefix, float]] = {group: {(): 1.0} for group in sizes}
    for depth in range(num_tokens):
        nodes = sorted({(p, prefix) for (_, p), open_ in front.items() for prefix in open_})
        texts = [[*prompts[p], *prefix] for p, prefix in nodes]
        after = dict(zip(nodes, reader.all_after(texts, width), strict=True))
        following: dict[Group, dict[Prefix, float]] = {group: {} for group in sizes}
        for group, open_ in front.items():
            kind, p = group
            rows = [after[p, prefix] for prefix in open_]
            if not rows:
                continue
            starts = [len(prompts[p])] * len(rows)
            logits = processing(np.stack(rows), [[*prompts[p], *x] for x in open_], starts)
            warped, sure = warp(logits, settings[kind], slack)
            for (prefix, share), probs, fine in zip(
                open_.items(), softmax(warped), sure, strict=True
            ):
                if not fine:
                    made[group].own[prefix] = made[group].add(share)
                    continue
                for child in made[group].split(prefix, probs, share, sizes[group]):
                    below = share * float(probs[child[-1]])
                    if depth + 1 == num_tokens or child[-1] in processing.eos:
                        made[group].own[child] = made[group].add(below)
                    else:
                        following[group][child] = below
        front = following
    return made


def judge(
    name: str,
    claimed: bool,
    cells: Mapping[Group, Cells],
    drawn: Mapping[Group, collections.Counter[Prefix]],
    significance: float,
    rounding: float,
) -> Distribution:
    """Returns the check of one kind of settings.

    Args:
      name, claimed: of the check.
      cells: of each of its groups.
      drawn: the texts of each of its groups, and how often each was drawn.
      significance: the p-value below which it fails.
      rounding: the mean square by which rounding changes the logarithm of a text's probability.
    """
    statistic, degrees, total, apart, chance, excluded = 0.0, 0, 0, 0.0, 0.0, 0
    for group, counter in drawn.items():
        size = counter.total()
        found = np.zeros(len(cells[group].wanted))
        for text, count in counter.items():
            cell = cells[group].find(text)
            if cell is None:
                excluded += count
            else:
                found[cell] += count
        share = np.array(cells[group].wanted)
        wanted = size * share
        statistic += float(((found - wanted) ** 2 / wanted).sum())
        degrees += len(wanted) - 1
        total += size
        apart += float(np.abs(found - wanted).sum()) / 2
        chance += float(np.sqrt(2 / math.pi * wanted * (1 - share)).sum()) / 2
    free = total * rounding
    p_value = 0.0 if excluded else chisquare.power(statistic, degrees, free) if degrees else 1.0
    detail = (
        f"{total} texts, chi-square {statistic:.1f} on {degrees} degrees of freedom, "
        f"p = {p_value:.2g}; total variation {apart / total:.3f}, {chance / total:.3f} by chance"
    )
    if excluded:
        detail += f"; {excluded} texts hold a token that the settings exclude"
    least = chisquare.detectable(total, degrees, significance, POWER, 4, free)
    return Distribution(
        name,
        claimed,
        p_value >= significance,
        detail,
        samples=total,
        p_value=p_value,
        total_variation=apart / total,
        expected=chance / total,
        detectable=least,
    )


def rounding_of(rounding: Rounding, settings: Settings, num_tokens: int) -> float:
    """Returns the mean square by which rounding changes the logarithm of a text's probability."""
    return num_tokens * (2 * rounding.typical / settings.temperature) ** 2
