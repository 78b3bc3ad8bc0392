"""The paths of the cache folder, and of the checkpoints that come with the library."""

from __future__ import annotations

import os
import pathlib

_HOME = pathlib.Path(__file__).parents[1]


def cache_folder(name: str) -> pathlib.Path:
    """Returns the folder `name` in `$SPECJAX_CACHE`, or in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("SPECJAX_CACHE") or pathlib.Path(home) / "specjax") / name


def shipped(name: str) -> pathlib.Path:
    """Returns the path of a checkpoint or file of the library, such as "pycode/target".

    A wheel has the folder `checkpoints` next to the modules; a checkout has it next to `specjax/`.
    `checkpoints/README.md` documents how each checkpoint was made.

    Raises:
      FileNotFoundError: there is none of that name; the message lists the existing ones.

    Example:
      >>> specjax.shipped("pycode/target").name
      'target'
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
    """Returns the folder of the checkpoints, in a checkout or in an installed package."""
    # Beside an installed package are other packages, and `checkpoints` there would be a stranger's.
    is_checkout = (_HOME.parent / "pyproject.toml").is_file()
    return (_HOME.parent if is_checkout else _HOME) / "checkpoints"
