"""Executables that are kept between processes, and found again before anything is traced.

JAX's compilation cache knows a program by its text, so a second process still traces and lowers all
of it.  Here a program is known by what it is traced from: the source of specjax, the versions of
all packages that are called, JAX's settings, the devices, the static arguments, and the shapes of
the arrays.  A static argument with something in it that this list does not cover, such as a
function of the user's, has no key, and its program is only in JAX's cache.

The files lie beside JAX's, in a folder that only its user writes, and that is bounded with them.  A
file is written whole or not at all, and has its digest before it.  Files of another user are not
read, since loading an executable runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pathlib
import pickle
import sys
import tempfile
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from specjax._internal.processors import processors

_DIGEST = 32  # bytes
_KNOWN = ("specjax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "llvmlite")
"""The packages whose version, or source, is part of a key."""

_SETTINGS = ("XLA_", "JAX_", "LIBTPU_", "TPU_", "CUDA_", "OMP_", "NPROC", "SPECJAX_")
"""The beginnings of the names of the environment's variables that are part of a key."""

_BEGAN = time.time()
"""When this process began to import specjax."""

_folder: pathlib.Path | None = None
_needs: list[tuple[str, str, tuple[Any, ...]]] = []
_log = logging.getLogger(__name__)


class Unknown(Exception):
    """A value on which a program may depend in a way that no key covers."""


def keep_in(folder: pathlib.Path | None) -> None:
    """Keeps executables in a folder from now on; None keeps none."""
    global _folder
    _folder = folder


def stop() -> None:
    """Keeps no programs from now on, and reads none, where a command had begun to keep them.

    XLA:CPU runs collectives of a program that it reads from a cache in an order that differs
    between devices, and then they wait for one another until XLA ends the process.
    """
    from jax.experimental.compilation_cache import compilation_cache

    if keeps():
        keep_in(None)
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting once


def keeps() -> bool:
    """Returns whether executables are kept."""
    return _folder is not None


def needs(module: str, function: str, *arguments: Any) -> None:
    """Records a call that a later process makes before it loads any executable of this one.

    XLA looks for the kernels of a program when it loads it.
    """
    _needs.append((module, function, arguments))


def place_of(kind: str, *known: object, traced: bool = True) -> pathlib.Path | None:
    """Returns the file of what is made from `known`, which need not be there; None: it has no key.

    Args:
      kind: the first part of the name of the file.
      known: all that it is made from, beside what `_surroundings` covers.
      traced: it also depends on the source of specjax.
    """
    if _folder is None:
        return None
    try:
        text = repr([describe(part) for part in known])
        source = _source() if traced else ""
        made_from = "\0".join((_surroundings(), source, text))
        name = hashlib.sha256(made_from.encode()).hexdigest()
    except (Unknown, RecursionError) as reason:
        _log.debug("%s is not kept: %s", kind, reason)
        return None
    return _folder / f"{kind}-{name}"


def read(place: pathlib.Path | None) -> bytes | None:
    """Returns what is kept in a file; None if it is not there, not whole, or another user's."""
    if place is None:
        return None
    try:
        with place.open("rb") as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            held = file.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # the files that were used longest ago are removed first
    kept = held[_DIGEST:]
    return kept if kept and hashlib.sha256(kept).digest() == held[:_DIGEST] else None


def write(place: pathlib.Path | None, kept: bytes) -> None:
    """Keeps bytes; a folder that is full, or may not be written, costs only time."""
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=place.parent, prefix="writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(kept).digest() + kept)
            os.replace(written, place)  # other processes see all of it or nothing
        except OSError:
            os.unlink(written)
            raise


def executable(
    function: Callable[..., Any],
    static: tuple[object, ...],
    arrays: tuple[object, ...],
    jitted: Callable[[], Any],
) -> Callable[..., Any] | None:
    """Returns a compiled function of arrays like these, read from its file or else compiled.

    Args:
      function: the one that is compiled, of a module of specjax.
      static: the arguments that its trace depends on.
      arrays: the other arguments.
      jitted: returns the `jax.jit` of the function with these static arguments.

    Returns:
      None if it has no key, or if JAX cannot keep it.
    """
    name = function.__name__
    try:
        module = _known(function.__module__)
        place = place_of(f"program-{name}", module, function.__qualname__, static, _shapes(arrays))
    except Unknown as reason:
        _log.debug("%s is not kept: %s", name, reason)
        return None
    if place is None:
        return None
    if (found := read(place)) is not None:
        try:
            if (loaded := _loaded(found, arrays)) is not None:
                return loaded
        except Exception as reason:  # a file that cannot be loaded costs at most the time
            _log.debug("%s is not loaded: %s", name, reason)
    before, lowered = _hits(), jitted().trace(*arrays).lower()
    compiled = lowered.compile()
    try:
        _keep(place, compiled, lowered.as_text(), arrays, fresh=_hits() == before)
    except Exception as reason:  # what JAX cannot write, it says in many ways
        _log.debug("%s is not kept: %s", name, reason)
    return cast(Callable[..., Any], compiled)


def _keep(
    place: pathlib.Path, compiled: Any, text: str, arrays: tuple[object, ...], fresh: bool
) -> None:
    """Writes an executable, and a file that says where it is.

    XLA:CPU loses functions of an executable that JAX's cache had, when it writes it again.  So only
    what was compiled here is written, and programs of one text share a file if they have the same
    arrays: the text does not name those that the program never reads, but a call checks them.
    """
    from jax.experimental import serialize_executable

    _source()  # it may have changed while the function was traced
    given = [_shape(leaf) for leaf in jax.tree.leaves(arrays)]
    code = place_of("code", text, given, traced=False)
    if code is None:
        return
    if fresh:
        write(code, zlib.compress(serialize_executable.serialize(compiled)[0], 1))
    elif not code.exists():
        return
    out = compiled.out_tree
    numbered = jax.tree.unflatten(out, range(out.num_leaves))
    write(place, pickle.dumps((tuple(_needs), code.name, numbered)))


def _loaded(kept: bytes, arrays: tuple[object, ...]) -> Callable[..., Any] | None:
    from jax.experimental import serialize_executable

    calls, name, numbered = pickle.loads(kept)
    code = read(None if _folder is None else _folder / name)
    if code is None:
        return None
    for module, function, arguments in calls:
        getattr(importlib.import_module(module), function)(*arguments)
    given, out = jax.tree.structure((arrays, {})), jax.tree.structure(numbered)
    return serialize_executable.deserialize_and_load(zlib.decompress(code), given, out)


def _shapes(arrays: object) -> object:
    """Returns what a trace sees of arrays: their structure, shapes and dtypes.

    Raises:
      Unknown: an array is not on the one device that this process has.
    """
    leaves, structure = jax.tree.flatten(arrays)
    return [_shape(leaf) for leaf in leaves], structure


def _shape(x: Any) -> tuple[object, ...]:
    if isinstance(x, Tracer) or not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise Unknown(f"a leaf is a {type(x).__name__}")
    held = (bool(getattr(x, name, False)) for name in ("weak_type", "committed"))
    return tuple(x.shape), str(x.dtype), *held


@functools.cache
def _events() -> list[str]:
    """The hits of JAX's compilation cache, in a list that grows by each."""
    found: list[str] = []

    def note(event: str, **_: str | int) -> None:
        if event.endswith("/cache_hits"):
            found.append(event)

    jax.monitoring.register_event_listener(note)
    return found


def _hits() -> int:
    return len(_events())


def describe(x: object) -> object:
    """Returns a text or tuples of texts that are equal in two processes only for equal values.

    Raises:
      Unknown: no text describes the value, or it is of a package whose version is not known.
    """
    if x is None or isinstance(x, bool | int | float | str | bytes):
        if type(x).__module__ not in ("builtins", *sys.stdlib_module_names):
            return _name(type(x)), repr(x)
        return type(x).__name__, repr(x)
    if isinstance(x, jax.tree_util.PyTreeDef):
        return _of_structure(x)
    if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
        return "shape", x.shape, str(x.dtype), bool(x.weak_type)
    if isinstance(x, enum.Enum):
        return _name(type(x)), x.name
    if type(x) in (tuple, list):
        return type(x).__name__, *map(describe, cast(Iterable[object], x))
    if isinstance(x, frozenset | set):
        return "set", *sorted(map(repr, map(describe, x)))
    if isinstance(x, Mapping):
        items = cast(Mapping[object, object], x).items()
        return _name(type(x)), *((describe(key), describe(value)) for key, value in items)
    if isinstance(x, np.dtype | range):
        return type(x).__name__, repr(x)
    if isinstance(x, functools.partial):
        return "partial", describe(x.func), describe(x.args), describe(x.keywords)
    if isinstance(x, np.ndarray | np.generic):
        digest = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
        return "array", str(x.dtype), x.shape, digest
    if isinstance(x, type | types.FunctionType | types.BuiltinFunctionType) or callable(x):
        with contextlib.suppress(Unknown):
            return "named", _name(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = ((f.name, describe(getattr(x, f.name, None))) for f in dataclasses.fields(x))
        return _name(type(x)), *fields
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return _name(type(x)), *map(describe, cast(Iterable[object], x))
    raise Unknown(f"{type(x).__module__}.{type(x).__qualname__}")


def _of_structure(structure: Any) -> object:
    data = structure.node_data()
    kind = "leaf" if data is None else (_name(data[0]), describe(data[1]))
    return kind, *map(_of_structure, structure.children())


def _name(x: Any) -> str:
    """Returns the name by which another process finds a class or a function.

    Raises:
      Unknown: it has none, or it is not of a package that keys cover.
    """
    if x is type(None):
        return "None"
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise Unknown(f"a {type(x).__name__} without a name")
    found: Any = sys.modules.get(_known(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not x:
        raise Unknown(f"{module}.{name} is another object")
    return f"{module}.{name}"


def _known(module: str) -> str:
    """Returns the name of a module of a package that keys cover.

    Raises:
      Unknown: they do not cover it.
    """
    root = module.partition(".")[0]
    if root not in _KNOWN and root not in sys.stdlib_module_names:
        raise Unknown(f"the module {module}")
    return module


def _source() -> str:
    """Returns a digest of the source of specjax, which is what this process has imported.

    Raises:
      Unknown: a file has changed since the process began, and its module may be older.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = []
    for path, changed in _files(root):
        if changed > _BEGAN:
            raise Unknown(f"{path} has changed")
        paths.append(path)
    return _digest(root, tuple(sorted(paths)))


def _files(folder: str) -> Iterator[tuple[str, float]]:
    """Yields the files of Python below a folder, and when each was changed.

    Each key asks for them, and `Path.rglob` takes several times as long.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_ctime
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _files(entry.path)


@functools.lru_cache(maxsize=1)
def _digest(root: str, paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, root).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


def _surroundings() -> str:
    """Returns all on which a program depends, beside its arguments and the source of specjax.

    Raises:
      Unknown: the process is not alone, or has no CPU as its platform, or several devices.
    """
    devices = jax.devices()
    if len(devices) != 1 or jax.process_count() != 1 or jax.default_backend() != "cpu":
        raise Unknown(f"{len(devices)} devices of {jax.default_backend()}")
    return _described(_settings())


def _settings() -> tuple[tuple[str, str], ...]:
    """Returns JAX's settings, but for those of its own cache."""
    values = cast(Mapping[str, object], jax.config.values)  # pyright: ignore
    return tuple(
        (name, repr(value)) for name, value in sorted(values.items()) if "cache" not in name
    )


@functools.lru_cache(maxsize=16)
def _described(settings: tuple[tuple[str, str], ...]) -> str:
    versions = []
    for package in _KNOWN[1:]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((package, importlib.metadata.version(package)))
    environ = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and "CACHE" not in name
    )
    cores = processors()
    return repr((sys.version, versions, settings, environ, cores))
