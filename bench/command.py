"""What the command lines of all benchmarks share."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

Report = dict[str, Any]
"""A report, or a row of one, as JSON holds it."""


def run(main: Callable[[], None]) -> None:
    """Run a command line; an error that a user can fix ends in its message and exit status 2."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        path = pathlib.Path(sys.argv[0])
        print(
            f"{path.parent.name if path.stem == '__main__' else path.stem}: {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
