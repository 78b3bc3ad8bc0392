"""`Demand`: counts the time that options would have saved which are not compiled yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

_DOUBT = 8.0  # drafts that the rate of earlier texts counts
_CHOOSING, _MOST_CHOOSING = 6e-5, 0.2
"""The seconds that a step of choosing is taken to cost, and the most as a share of a plain step."""

_FOUND = 0.5  # the share of steps in which a lookup is taken to find drafts, where none are used


def cost_of_choosing(plain: float) -> float:
    """Returns the time that choosing is taken to cost, as a share of a step of so many seconds."""
    return min(_CHOOSING / plain, _MOST_CHOOSING)


@dataclasses.dataclass
class Demand:
    """The seconds that calls with few options have lost, and those that the others would cost.

    The others are compiled when the two are equal.  So the calls never cost more than twice what
    they would cost if it were known beforehand how many there will be: this is the rule of ski
    rental, Karlin, Manasse, Rudolph and Sleator 1988, "Competitive snoopy caching".

    Attributes:
      depths: the numbers of drafts of all options.
      compiling: the seconds that their compilation is expected to take.
      lost: the seconds that they would have saved so far.

    Example:
      >>> Demand((2, 4, 8), compiling=6.0, lost=7.0).pays
      True
    """

    depths: tuple[int, ...]
    compiling: float
    lost: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether all options should be compiled now."""
        return self.lost >= self.compiling

    def count(
        self,
        options: Sequence[tuple[str, int]],
        seconds: np.ndarray,
        judged: Mapping[int, tuple[float, float]],
        prior: np.ndarray,
        drafting: float,
        spent: float,
    ) -> None:
        """Counts a finished call.

        A step with a number of drafts that was not measured is taken to lie on the line through
        those that were, and every depth to have one rate of acceptance.

        Args:
          options, seconds: the compiled ones, and the seconds [O] of a step with each of them.
          judged: the judged and the accepted drafts of the lookup (0) and of the drafter (1).
          prior: [2] acceptance rates of the two in earlier texts.
          drafting: the share of steps with drafts.
          spent: the seconds of the call.
        """
        depths = np.array([0, *self.depths])
        few, many = [1 / seconds[0]], [(1 / seconds[0], 0.0)]
        for (name, depth), cost in list(zip(options, seconds, strict=True))[1:]:
            part = ("lookup", "drafter").index(name)
            of, accepted = judged[part]
            rate = (accepted + _DOUBT * prior[part]) / (of + _DOUBT)
            tokens = (rate ** np.arange(max(*depths, depth) + 1)).cumsum()
            # A step with drafts that seems to take less than one without was measured badly.
            costs = seconds[0] + max(cost - seconds[0], 0.0) * depths / depth
            few.append(tokens[depth] / cost)
            # A rate that hardly any draft has shown is no reason to compile.
            sure = min(of / _DOUBT, 1.0) * (1.0 if part else _FOUND)
            many.append((float((tokens[depths] / costs).max()), sure))
        best, share = max(many)
        if int(np.argmax(few)) > 0:  # it drafts where it can
            share = drafting
        self.lost += spent * share * max(1 - max(few) / best, 0.0)

    def count_rests(self, plain: float, saved: float, spent: float) -> None:
        """Counts what a finished call has lost since it cannot rest where drafts save little.

        Args:
          plain: seconds of a step without drafts.
          saved: what drafts saved a step, as a share of that.
          spent: the seconds of the call.
        """
        self.lost += spent * max(cost_of_choosing(plain) - max(saved, 0.0), 0.0)
