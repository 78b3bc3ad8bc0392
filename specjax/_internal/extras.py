"""Imports the optional dependencies of the package, or says how they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
from types import ModuleType

_ROOT = pathlib.Path(__file__).parents[2]


def need(package: str, subject: str, extra: str) -> None:
    """Raises ValueError if a package of an extra, which `subject` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{subject} needs {package}: {install(extra)}")


def imported(module: str, message: str) -> ModuleType:
    """Returns a module; raises ValueError with a message if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ValueError(message) from None


def install(extra: str) -> str:
    """Returns the command that installs an extra.

    In a checkout the command installs the checkout with the extra.  Elsewhere it installs the
    packages of the extra.  It never names `specjax` itself, because another project on the public
    index has that name.
    """
    if (_ROOT / "pyproject.toml").is_file():
        where = "." if pathlib.Path.cwd() == _ROOT else str(_ROOT)
        return f"pip install -e '{where}[{extra}]'"
    return f"pip install {' '.join(repr(one) for one in _requirements(extra))}"


def _requirements(extra: str) -> list[str]:
    """Returns the packages of an extra, from the metadata of the installed package."""
    found = importlib.metadata.requires("specjax") or []
    return [
        line.partition(";")[0].strip()
        for line in found
        if re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", line)
    ]
