"""How a benchmark ends where its command line is at fault."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """What a user can mend ends in its message and exit status 2."""
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
