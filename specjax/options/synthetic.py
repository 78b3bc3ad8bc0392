"""The options of synthetic acceptance, with which a measurement accepts drafts as asked."""

from __future__ import annotations

import dataclasses

from specjax import SyntheticAcceptance
from specjax._internal.checks import reworded
from specjax.options.fields import Options, option


@dataclasses.dataclass(frozen=True)
class SyntheticOptions(Options):
    """How many drafts are accepted, right or wrong."""

    group = "speculation"

    synthetic_acceptance: float | None = option(
        None, "lossy, to measure speed: accept a draft with this probability, right or wrong; "
        "texts are worthless", metavar="RATE",
    )  # fmt: skip
    synthetic_acceptance_length: float | None = option(
        None, "lossy, to measure speed: accept drafts, right or wrong, so that a pass gives this "
        "many tokens on average, with the least variance; texts are worthless", metavar="TOKENS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.synthetic()

    def synthetic(self) -> SyntheticAcceptance | None:
        """Returns the rule that the options ask for.

        Raises:
          ValueError: both options, or a number that cannot be.
        """
        rate, length = self.synthetic_acceptance, self.synthetic_acceptance_length
        if rate is None and length is None:
            return None
        if rate is not None and length is not None:
            raise ValueError(
                f"--synthetic-acceptance {rate} and --synthetic-acceptance-length {length} say two "
                "things: leave one of them out"
            )
        with reworded("--synthetic-acceptance: "):
            return SyntheticAcceptance(rate, length)
