"""The folder in which the library keeps what it can make again."""

from __future__ import annotations

import os
import pathlib


def cache_folder(name: str) -> pathlib.Path:
    """The folder `name` in `$SPECJAX_CACHE`, or in `specjax` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("SPECJAX_CACHE") or pathlib.Path(home) / "specjax") / name
