"""Imports a user's own code by `module:Name`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from specjax._internal.checks import reworded


def named(name: str, option: str) -> Any:
    """Returns the object that "module:Name" names; `option` is what the user passed it as.

    Call it in a block of `working_directory`, in which the module may also import others.

    Raises:
      ValueError: no such module, or no such name in it.
    """
    module, _, attribute = name.partition(":")
    # An empty name is a ValueError.
    kinds = (ImportError, AttributeError, ValueError)
    with reworded(f"{option}{name!r} cannot be imported (", "); it must be module:Name", kinds):
        return getattr(importlib.import_module(module), attribute)


@contextlib.contextmanager
def working_directory() -> Iterator[None]:
    """Searches modules also in the working directory, only within this block."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have removed it
            sys.path.remove(here)
