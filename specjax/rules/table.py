"""The rules by name."""

from specjax.contract import Rule
from specjax.rules.block import BlockVerification
from specjax.rules.match import Match
from specjax.rules.rejection import Rejection
from specjax.rules.threshold import Threshold
from specjax.rules.typical import Typical

RULES: dict[str, type[Rule]] = {
    "match": Match,
    "rejection": Rejection,
    "block": BlockVerification,
    "typical": Typical,
    "threshold": Threshold,
}
