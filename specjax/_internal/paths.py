"""Where the library keeps what it can make again, and finds the checkpoints that come with it."""

from __future__ import annotations

import os
import pathlib

_HOME = pathlib.Path(__file__).parents[1]


def cache_folder(name: str) -> pathlib.Path:
    """The folder `name` in `$SPECJAX_CACHE`, or in `specjax` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("SPECJAX_CACHE") or pathlib.Path(home) / "specjax") / name


def shipped(name: str) -> pathlib.Path:
    """The path of a checkpoint or file that comes with the library, such as "pycode/target".

    A wheel holds the folder `checkpoints` beside the modules; a checkout holds it beside
    `specjax/`.  `checkpoints/README.md` says how each checkpoint was made.

    Raises:
      FileNotFoundError: there is none of that name; the message names those that there are.
    """
    place = _checkpoints()
    if name and (place / name).exists():
        return place / name
    there = sorted(config.parent.relative_to(place) for config in place.rglob("config.json"))
    cure = (
        f"there are {', '.join(path.as_posix() for path in there)}"
        if there
        else "name the folder of a model of your own (--target FOLDER, or org/name on the Hub), or "
        "use a wheel or a checkout of specjax, which hold the checkpoints"
    )
    raise FileNotFoundError(f"no checkpoint {name!r} in {place}: {cure}")


def _checkpoints() -> pathlib.Path:
    """The folder of the checkpoints, in a checkout or in an installed package."""
    # Beside an installed package are other packages, and `checkpoints` there would be a stranger's.
    is_checkout = (_HOME.parent / "pyproject.toml").is_file()
    return (_HOME.parent if is_checkout else _HOME) / "checkpoints"
