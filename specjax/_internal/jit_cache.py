"""Compiled programs that are freed when they have not been used for a long time.

A jitted function keeps a program for each value of its static arguments until the process ends, and
a program takes several megabytes.  Here each such value has a jitted function of its own, which JAX
frees together with its programs.  Only those that were used last are kept.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from specjax._internal import kept_programs
from specjax._internal.checks import within
from specjax._internal.held_numbers import on_device
from specjax._internal.mappings import mapped

MOST = 64

_CROWDED = 0.5
"""The share of a process's memory mappings beyond which programs are freed before others come."""


class _Table(Protocol):
    """A `Recent` of any keys and values."""

    def trim(self) -> None: ...

    def halve(self) -> None: ...

    def clear(self) -> None: ...


_MOST_FORMS = 8
"""The most executables of one structure that are kept between processes."""

_ZERO = np.zeros((), np.int32)

_most: int | None = MOST
_tables: list[_Table] = []

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_InputsT = ParamSpec("_InputsT")
_OutputT = TypeVar("_OutputT")


def keep_programs(most: int | None = MOST) -> None:
    """Keeps the compiled programs of the `most` structures that were used last; None keeps all.

    A structure is a model with a proposer and a rule, a number of rows, a capacity, and a set of
    settings.  A structure that was dropped is compiled again when it is used.  Unless all are kept,
    half of them are dropped too when the process has half of the memory mappings that Linux allows,
    before XLA would crash.

    Raises:
      ValueError: `most` is less than 1.

    Example:
      >>> specjax.keep_programs(64)
    """
    global _most
    if most is not None:
        within("most", most, 1, note=", or None for all")
    _most = most
    for table in _tables:
        table.trim()


def clear_programs() -> None:
    """Frees all compiled programs of decoding; the next call of each structure compiles again.

    Example:
      >>> specjax.clear_programs()
    """
    for table in _tables:
        table.clear()
    with _bound_lock:
        programs = list(_bound)
    for program in programs:
        program.clear()


def structure_of(tree: object) -> Hashable:
    """Returns the structure of a pytree as a key: equal for the same nodes, in the same places.

    In JAX 0.10.2 `jax.tree.structure` compares as equal for two dataclasses with the same fields,
    although their classes differ, and `jax.jit` then takes one program for both.
    """

    structure = jax.tree.structure(tree)
    kinds, nodes = [], [structure]
    while nodes:
        node = nodes.pop()
        data = node.node_data()  # (class, static fields), or None for a leaf
        kinds.append(data and data[0])
        nodes += node.children()
    return structure, tuple(kinds)


class Recent(Generic[Key, Value]):
    """The values that were used last, as many as `keep_programs` sets.  Threads may share it."""

    def __init__(self) -> None:
        self._values: collections.OrderedDict[Key, Value] = collections.OrderedDict()
        self._lock = threading.Lock()
        _tables.append(self)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, which now is the one that was used last."""
        # A key is looked at as seldom as possible: to hash a large one takes 30 microseconds.
        with self._lock:
            if (known := self._values.get(key)) is not None:
                self._values.move_to_end(key)
                return known
        if key not in self and _most is not None and mapped() > _CROWDED:
            for table in _tables:
                table.halve()
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            value = self._values[key]
        self.trim()
        return value

    def trim(self) -> None:
        with self._lock:
            while _most is not None and len(self._values) > _most:
                self._values.popitem(last=False)

    def halve(self) -> None:
        """Drops the half that was used longest ago."""
        with self._lock:
            for _ in range(len(self._values) // 2):
                self._values.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def values(self) -> list[Value]:
        with self._lock:
            return list(self._values.values())

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._values


class _Entry:
    """The programs of one structure."""

    def __init__(self, bound: Callable[..., Any], donated: tuple[int, ...]) -> None:
        self._bound, self._donated = bound, donated
        self.plain = jax.jit(bound, donate_argnums=donated)  # inside of traced functions too
        self._quick: dict[str, jax.stages.Wrapped] = {}  # each for an option of XLA's
        self.kept: list[Callable[..., Any]] = []  # those that are kept between processes
        self.keeps = kept_programs.keeps()  # False also for a structure that has no key

    def of(self, arrays: object) -> jax.stages.Wrapped:
        """Returns the jitted function that arrays like these are given to."""
        from specjax._internal import quick_code  # training has no use for it

        if (options := quick_code.options(arrays)) is None:
            return self.plain
        # A traced function may call this with arrays that it only closes over.
        if isinstance(jax.device_put(on_device(_ZERO)), Tracer):
            return self.plain
        (option,) = options
        if option not in self._quick:
            self._quick[option] = jax.jit(
                self._bound, donate_argnums=self._donated, compiler_options=options
            )
        return self._quick[option]

    @property
    def jitted(self) -> list[jax.stages.Wrapped]:
        """The jitted functions that the calls of this structure have, as far as there were any."""
        return list(self._quick.values()) or [self.plain]

    def run(self, function: Callable[..., Any], fixed: tuple[object, ...], rest: Any) -> Any:
        """Runs a program that is kept between processes, if there can be one."""
        for program in self.kept:
            # Arrays of another form are refused before anything runs, and so are traced ones.
            with contextlib.suppress(TypeError, ValueError):
                return program(*rest)
        if self.keeps and len(self.kept) < _MOST_FORMS:
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(rest)):
                made = kept_programs.executable(function, fixed, rest, lambda: self.of(rest))
                self.keeps = made is not None
                if made is not None:
                    self.kept.append(made)
                    return made(*rest)
        return self.of(rest)(*rest)


class _Bound:
    """The program of one structure, which stays until `clear_programs`, whatever is used later."""

    def __init__(
        self, function: Callable[..., Any], fixed: tuple[object, ...], find: Callable[[], _Entry]
    ) -> None:
        self._function, self._fixed, self._find = function, fixed, find
        self._entry: _Entry | None = find()
        self._jitted: jax.stages.Wrapped | None = None
        with _bound_lock:
            _bound.add(self)

    def __call__(self, *rest: object) -> Any:
        entry = self._entry
        if entry is None:
            entry = self._entry = self._find()
        if entry.keeps:
            return entry.run(self._function, self._fixed, rest)
        if self._jitted is None:
            self._jitted = entry.of(rest)
        return self._jitted(*rest)

    def clear(self) -> None:
        self._entry = self._jitted = None


_bound: weakref.WeakSet[_Bound] = weakref.WeakSet()
_bound_lock = threading.Lock()  # another thread may add one while all are listed


class Programs(Generic[_InputsT, _OutputT]):
    """`jax.jit` of a function whose first arguments are static, for the structures used last."""

    def __init__(
        self,
        function: Callable[_InputsT, _OutputT],
        static: int,
        shape: Callable[..., Hashable],
        donate: tuple[int, ...],
    ) -> None:
        self._function: Callable[..., _OutputT] = function  # called with its arguments in two parts
        self._static, self._shape, self._donate = static, shape, donate
        self._recent: Recent[Hashable, _Entry] = Recent()
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: _InputsT.args, **named: _InputsT.kwargs) -> _OutputT:
        entry, rest = self._of(arguments), arguments[self._static :]
        if entry.keeps and not named:
            return entry.run(self._function, arguments[: self._static], rest)
        return entry.of((rest, named))(*rest, **named)

    def bound(self, *arguments: object) -> Callable[..., _OutputT]:
        """Returns the program for arguments of this structure, which takes those not static.

        To look at the structure takes the host up to a millisecond, and its calls do not do so.
        """
        fixed, shape = arguments[: self._static], self._shape(*arguments[self._static :])
        return _Bound(self._function, fixed, lambda: self._entry(fixed, shape))

    def trace(self, *arguments: object) -> jax.stages.Traced:
        """Traces as `jax.jit(...).trace`."""
        return self._of(arguments).plain.trace(*arguments[self._static :])

    def lower(self, *arguments: object) -> jax.stages.Lowered:
        """Lowers as `jax.jit(...).lower`."""
        return self._of(arguments).plain.lower(*arguments[self._static :])

    def jitted(self) -> list[jax.stages.Wrapped]:
        """Returns the jitted functions that are kept."""
        return [each for entry in self._recent.values() for each in entry.jitted]

    def _of(self, arguments: tuple[object, ...]) -> _Entry:
        return self._entry(arguments[: self._static], self._shape(*arguments[self._static :]))

    def _entry(self, fixed: tuple[object, ...], shape: Hashable) -> _Entry:
        def make() -> _Entry:
            def bound(*traced: object) -> _OutputT:
                return self._function(*fixed, *traced)

            # Profiles and compiled programs show the names of the function and of its arguments.
            bound.__name__ = bound.__qualname__ = self._function.__name__
            names = list(inspect.signature(self._function).parameters.values())[self._static :]
            bound.__signature__ = inspect.Signature(names)
            donated = tuple(n - self._static for n in self._donate)
            return _Entry(bound, donated)

        return self._recent.get((fixed, shape), make)


def programs(
    static: int, shape: Callable[..., Hashable], donate: tuple[int, ...] = ()
) -> Callable[[Callable[_InputsT, _OutputT]], Programs[_InputsT, _OutputT]]:
    """Decorates a function to be jitted.

    Args:
      static: the number of its static arguments, which come first and are hashable.
      shape: takes the other arguments, and returns a further key of the structure, such as the
        shape of a batch.  Arguments that differ in something else share an entry, which then has
        several programs.
      donate: the positions of donated arguments, as in `jax.jit`.
    """
    return lambda function: Programs(function, static, shape, donate)
