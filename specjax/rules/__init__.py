"""Rules: which part of a proposal is kept.  A rule is a function about one row; `exact` says whether it is lossless."""

from specjax.rules.match import Match
from specjax.rules.rejection import Rejection
from specjax.types import Rule

RULES: dict[str, type[Rule]] = {"match": Match, "rejection": Rejection}

__all__ = ["RULES", "Match", "Rejection"]
