"""The auditor passes every sound decoder of the campaign."""

import pytest
from audit_campaign import CLEAN, check_sound


@pytest.mark.parametrize("name", CLEAN)
def test_sound_decoders_pass(name):
    check_sound(name, seeds=(0, 2, 3), samples=8192)
