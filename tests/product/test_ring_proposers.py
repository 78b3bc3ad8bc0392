"""Windows under every way to draft; `tests/core/test_ring.py` has a chain."""

import pytest
import rings


@pytest.mark.parametrize("case", sorted({*rings.PROPOSERS} - {"chain"}))
def test_the_text_is_that_of_a_full_cache(case, monkeypatch):
    """Ragged rows, prompts of several chunks, and a ring that wraps several times."""
    rings.check(case, monkeypatch)
