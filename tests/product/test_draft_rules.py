"""The laws of decoding with a perfect draft, under the rules that `tests/core` leaves out."""

from typing import ClassVar

from draft_laws import DraftLaws
from over import pytest_generate_tests  # noqa: F401 - pytest calls it

from specjax import RULES


class TestDraftRules(DraftLaws):
    PAIRS: ClassVar = [("draft 3", "rejection"), ("draft 3", "threshold")]


def test_every_rule_is_in_core_or_here():
    named = {rule for _, rule in TestDraftRules.PAIRS} | {"match", "block", "typical"}
    assert named == set(RULES)
