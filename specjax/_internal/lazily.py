"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any


def lazily(
    package: str, file: str, moved: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package whose `__init__` imports only for type checkers.

    It imports a name from the module that `if TYPE_CHECKING:` names for it, or a module of the
    package.

    Args:
      package: `__name__` in that `__init__`.
      file: `__file__` there.
      moved: what `forward` returns, for names that are elsewhere now.
    """
    blocks = [
        part for part in ast.parse(pathlib.Path(file).read_bytes()).body if isinstance(part, ast.If)
    ]
    imports = [part for block in blocks for part in block.body if isinstance(part, ast.ImportFrom)]
    homes = {
        alias.asname or alias.name: (part.module, alias.name)
        for part in imports
        for alias in part.names
    }

    def found(name: str) -> Any:
        module, own = homes.get(name, (None, name))
        if module is not None:
            value = getattr(importlib.import_module(module), own)
        elif not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        elif moved is not None:
            return moved(name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return found
