"""The auditor passes sound decoders; `tests/product` has more of them."""

import pytest
from audit_campaign import check_sound


@pytest.mark.parametrize("name", ["rejection", "prompt lookup", "processors", "taps"])
def test_sound_decoders_pass(name):
    """A rule with filters, one for chains over what may abstain, every kind of processor, and a
    proposer that reads its target, twice each."""
    check_sound(name, seeds=(0, 2), samples=4096)
