"""EAGLE-3 heads in the layouts that `tests/core/test_eagle3.py` leaves out."""

import eagle3_driven
import pytest


@pytest.mark.parametrize(
    "layout", ["authors, own tables", "authors, shared", "ModelOpt", "speculators, 3.1"]
)
def test_drafts_are_those_of_the_reference(layout):
    eagle3_driven.check(layout)
