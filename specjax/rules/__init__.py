"""Rules decide which drafts of one row are accepted; `exact` says whether a rule is lossless."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.rules.block import BlockVerification
    from specjax.rules.match import Match
    from specjax.rules.rejection import Rejection
    from specjax.rules.synthetic import SyntheticAcceptance
    from specjax.rules.table import RULES
    from specjax.rules.threshold import Threshold
    from specjax.rules.typical import Typical

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "RULES",
    "BlockVerification",
    "Match",
    "Rejection",
    "SyntheticAcceptance",
    "Threshold",
    "Typical",
]
