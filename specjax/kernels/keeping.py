"""Machine code of kernels that is kept between processes, beside JAX's compiled programs.

A file has the digest of what it holds before it, and its name is the digest of what it was made
from: LLVM's instructions, the processor and its features, and the version of llvmlite.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
from typing import Any

import jax

_DIGEST = 32  # bytes


def place_of(*made_from: str) -> pathlib.Path | None:
    """Returns the file of a kernel's code, which need not be there; None if none is kept.

    None is kept without JAX's compilation cache in a folder of this machine.

    Args:
      made_from: all texts on which the code depends.
    """
    settings: Any = jax.config
    folder, keeps = settings.jax_compilation_cache_dir, settings.jax_enable_compilation_cache
    if not folder or "://" in folder or not keeps:
        return None
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    return pathlib.Path(folder) / f"kernel-{name}"


def read_code(place: pathlib.Path | None) -> bytes | None:
    """Returns the code that is kept; None if there is none, or if the file is not whole."""
    if place is None:
        return None
    try:
        held = place.read_bytes()
    except OSError:
        return None
    code = held[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == held[:_DIGEST] else None


def write_code(place: pathlib.Path | None, code: bytes) -> None:
    """Keeps the code; a folder that is full, or may not be written, costs only time."""
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=place.parent, prefix="kernel-")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(written, place)  # other processes see all of it or nothing
