"""Texts made to be rejected: `auto` takes at most a twentieth longer than plain decoding."""

import pytest

from bench.attack import BOUND, patterns, worst


@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_the_worst_text_is_bounded(draft):
    """On each of 81 patterns, some of which pay at first, with and without good earlier texts; a
    fixed number of drafts has no bound but its depth."""
    found = worst(512, draft, 0.01)
    auto = {way: ratio for way, (ratio, _) in found.items() if way.startswith("auto")}
    assert len(auto) == 4 and max(auto.values()) <= BOUND, found
    ratio, pattern = found["always 8"]
    # Every step reads and drafts eight tokens in vain.
    assert pattern == "never right" and ratio == pytest.approx((1.09 + 8 * draft) / 1.01, rel=1e-3)


def test_patterns_mislead():
    """Drafts are right somewhere and wrong elsewhere, in all but one pattern."""
    made = patterns(512)
    assert len(made) == 81 and not made.pop("never right").any()
    assert all(right.any() and not right.all() for right in made.values())
