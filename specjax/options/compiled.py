"""Compiled programs that commands keep between processes, in a folder of the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import stat
import sys
from collections.abc import MutableMapping
from typing import Any

MOST_BYTES = 2**30
"""Of all programs that are kept; beyond it, those that were used longest ago are removed."""

_SECONDS = "0.1"
"""The compilation time from which a program is kept."""


def keep_compiled(environ: MutableMapping[str, str] = os.environ) -> pathlib.Path | None:
    """Lets JAX keep the programs that this process compiles, and find those of earlier ones.

    A second `specjax generate` of the same models then takes a fifth of the time, since it traces
    nothing (`specjax._internal.kept_programs`).  JAX knows a program by its text and by its own
    version; the folder has the version of the compiler and the abilities of the processor in its
    name, so a folder that several machines share is safe.  Only its user may write into it.

    Args:
      environ: where JAX finds its settings.  If `JAX_COMPILATION_CACHE_DIR` is set there, it
        stands, and `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.

    Returns:
      The folder of the compiled programs; None if the user has chosen another one, or if it cannot
      be written, or belongs to somebody else.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    programs = pathlib.Path(home) / "specjax" / "programs"
    folder = programs / _machine()
    try:
        if not all(map(_is_ours, (programs.parent, programs, folder))):
            return None
        _trim(programs)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _SECONDS)
    if environ is os.environ:
        began = "jax" in sys.modules  # it has read its settings
        import jax

        from specjax._internal import kept_programs

        settings: Any = jax.config
        kept_programs.keep_in(folder if settings.jax_enable_compilation_cache else None)
        if not began:
            return folder
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(_SECONDS))
    return folder


def _is_ours(folder: pathlib.Path) -> bool:
    """Makes a folder, and takes leave to write from others; returns False if it is not the user's.

    Whoever may write there could have this process run their code.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return True
    found = folder.stat()
    if found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    return True


def _machine() -> str:
    """A name for the compiler with the processor."""
    flags = platform.processor()
    described = pathlib.Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text().splitlines()
        flags = next((x for x in lines if x.startswith(("flags", "Features"))), flags)
    version = importlib.metadata.version("jaxlib")
    known = "\n".join([version, platform.machine(), flags])
    return f"jaxlib-{version}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


def _trim(programs: pathlib.Path) -> None:
    """Removes the programs that were used longest ago, if all take more than `MOST_BYTES`."""
    files = []
    for path in programs.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            files += [(path, path.stat())] if path.is_file() else []
    left = sum(found.st_size for _, found in files)
    if left <= MOST_BYTES:
        return
    for path, found in sorted(files, key=lambda file: max(file[1].st_atime, file[1].st_mtime)):
        path.unlink(missing_ok=True)
        left -= found.st_size
        if left <= MOST_BYTES * 3 // 4:
            return
