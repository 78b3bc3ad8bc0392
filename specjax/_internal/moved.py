"""Keeps names importable from a module after they moved to another."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def forward(old: str, **new: Sequence[str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module whose names moved (PEP 562).

    A name is looked up when it is used, so a module may forward to one that imports it.

    Args:
      old: the name of the module.
      **new: for each name that moved, the module of `specjax` that has it now.

    Returns:
      A function that takes a name; it raises AttributeError for one that did not move.
    """
    home = {name: f"specjax.{module}" for module, names in new.items() for name in names}

    def look(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return look
