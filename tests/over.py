"""Laws in a class, over the pairs that each of its subclasses names.

    class Laws:
        @over("PAIRS")
        def test_a_law(self, case, rule): ...

    class TestTables(Laws):
        PAIRS = [("draft 3", "match")]

A test file imports `pytest_generate_tests` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Law = TypeVar("Law", bound=Callable[..., Any])


def over(pairs: str) -> Callable[[Law], Law]:
    """The cases of a law are the pairs of a case and a rule in this attribute of its class."""

    def mark(law: Law) -> Law:
        law.over = pairs  # type: ignore[attr-defined]
        return law

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pairs = getattr(metafunc.function, "over", None)
    if pairs is not None:
        metafunc.parametrize(("case", "rule"), getattr(metafunc.cls, pairs))
