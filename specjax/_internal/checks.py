"""Checks the arguments that a user passes.  An error names the argument, its value and the fix.

The checks are stricter than Python and NumPy: True does not count as 1, the string "2" not as 2.0,
and bytes not as a sequence of numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import reprlib
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax.numpy as jnp
import numpy as np

_T = TypeVar("_T")


def shown(value: object) -> str:
    """Returns a value as text for a message: short, on one line, without the arrays of a model."""
    if isinstance(value, type):
        return f"<the class {value.__name__}>"
    if dataclasses.is_dataclass(value):
        return f"<a {type(value).__name__}>"
    plain = number(value)
    try:
        return " ".join(reprlib.repr(value if plain is None else plain).split())
    except ValueError:  # Python does not print an int of more than 4300 digits
        return f"<a very long {type(value).__name__}>"


def number(value: object) -> int | float | None:
    """Returns `value` as an int or a float if it is a number of any library, else None.

    An array of 0 dimensions is a number; a boolean is not.
    """
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, int | float):
        if isinstance(value, bool):
            return None
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, type) or not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    if array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer):
        return int(array)
    return float(array) if array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.floating) else None


def items(value: object) -> list[Any] | None:
    """Returns the items of a list, a tuple or an array of 1 or more dimensions, else None.

    A string counts as one value, so it gives None.
    """
    if value is None or isinstance(
        value, int | float | type | str | bytes | bytearray | memoryview
    ):
        return None
    if isinstance(value, list | tuple | Sequence):
        return list(value)
    if not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    if array.ndim == 0:
        return None
    return array.tolist() if array.dtype.kind in "iufb" else list(array)


def whole(name: str, value: object, least: int, most: int, wanted: str) -> int:
    """Returns `value` as an int, if it is a whole number in [least, most].

    Raises:
      ValueError: `value` is anything else; the message says that it must be `wanted`.
    """
    plain = number(value)
    if not isinstance(plain, int) or not least <= plain <= most:
        raise ValueError(f"{name}={shown(value)} is not allowed; it must be {wanted}")
    return plain


def counts(**values: object) -> None:
    """Raises ValueError if a value is not a whole number; further checks are the caller's."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise ValueError(f"{name}={shown(value)} is not allowed; it must be a whole number")


def flag(name: str, value: object) -> bool:
    """Returns True or False.  Raises ValueError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={shown(value)} is not allowed; it must be True or False")
    return bool(value)


def hashable(name: str, value: object) -> None:
    """Raises ValueError if `value` is not hashable: it is part of the key of compiled programs."""
    with reworded(
        f"{name}={shown(value)} is not hashable (",
        "), and compiled programs are cached by it: make it a frozen dataclass of hashable fields",
        (TypeError,),
    ):
        hash(value)


def each(name: str, value: object, rows: int, unit: str = "prompt") -> list[Any]:
    """Returns a list of one value per row, from one value for all rows or from such a list.

    Raises:
      ValueError: the list has another length.
    """
    values = items(value)
    if values is None:
        return [value] * rows
    if len(values) != rows:
        count = f"{len(values)} values for {rows} {unit}s"
        raise ValueError(f"{name} has {count}; pass one, or one per {unit}")
    return values


def per_row(
    name: str,
    value: object,
    batch: int,
    dtype: type[np.integer] | type[np.floating],
    accept: Callable[[float], bool],
    wanted: str,
) -> np.ndarray:
    """Returns a setting as [batch] numbers on the host, from one number or one per row.

    A list of a single number applies to all rows.

    Raises:
      ValueError: a value is not a finite number of that type, or `accept` is False for it; the
        message says that it must be `wanted`.
    """
    listed = items(value)
    if listed is not None and len(listed) == 1:
        values = listed * batch
    else:
        values = each(name, value, batch, "row")
    if issubclass(dtype, np.integer):
        greatest = np.iinfo(dtype).max
    else:
        greatest = float(np.finfo(dtype).max)
    at: np.ndarray | slice = slice(None)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.shape == (batch,):
        # Long arrays have few different values, and each is checked once.
        unique, at = np.unique(value, return_inverse=True)
        values = unique.tolist()
    made = []
    for v in values:
        plain = number(v)
        if plain is None or (issubclass(dtype, np.integer) and isinstance(plain, float)):
            fits = False
        else:
            fits = abs(plain) <= greatest and accept(plain)
        if not fits:
            raise ValueError(f"{name}={shown(v)} is not allowed; it must be {wanted}")
        made.append(plain)
    return np.array(made, dtype)[at]


def is_count(value: float) -> bool:
    """Returns whether a number is 0 or greater, for `accept` of `per_row`."""
    return value >= 0


def tokens_of(name: str, tokens: object, vocab_size: int) -> list[int]:
    """Returns a list of token ids, or raises ValueError with the argument's name."""
    listed = items(tokens)
    if listed is None:
        raise ValueError(f"{name} holds {shown(tokens)}; pass a list of texts or of token-id lists")
    made = []
    for token in listed:
        known = number(token)
        if not isinstance(known, int) or not 0 <= known < vocab_size:
            raise ValueError(
                f"{name} holds the token {shown(token)}; the vocabulary has 0 to {vocab_size - 1}"
            )
        made.append(known)
    return made


def outside(value: float | None, interval: str, kind: str = "finite") -> str | None:
    """Returns what a number must do to lie in an interval, such as "be at least 1", else None.

    Args:
      value: the number; None stands for a value that is not of the kind.
      interval: written as in mathematics: "[0, 1)", or "(0, inf)".
      kind: the kind of the number in words.
    """
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    if value is not None and low <= value <= high:
        if (value > low or interval[0] == "[") and (value < high or interval[-1] == "]"):
            return None
    is_kind = value is not None and math.isfinite(value)
    if math.isfinite(high):
        return f"{'lie' if is_kind else f'be a {kind} number'} in {interval}"
    first = interval[1 : interval.index(",")]
    bound = f"greater than {first}" if interval[0] == "(" else f"at least {first}"
    return f"be {bound}" if is_kind else f"be a {kind} number, {bound}"


def within(name: str, value: object, least: int, most: int | None = None, note: str = "") -> int:
    """Returns `value` as an int, if it is a whole number in [least, most]; `note` says why.

    Raises:
      ValueError: `value` is anything else.
    """
    plain = number(value)
    count = plain if isinstance(plain, int) else None
    interval = f"[{least}, inf)" if most is None else f"[{least}, {most}]"
    wanted = outside(count, interval, "whole")
    if count is None or wanted is not None:
        raise ValueError(f"{name}={shown(value)}; it must {wanted}{note}")
    return count


def real(name: str, value: object, interval: str, note: str = "") -> float:
    """Returns `value` as a float, if it is a number in an interval, such as "[0, 1)" or "(0, inf)".

    Raises:
      ValueError: `value` is anything else; `note` says why, or what a bound means.
    """
    plain = number(value)
    wanted = outside(plain, interval)
    if plain is None or wanted is not None:
        raise ValueError(f"{name}={shown(value)}; it must {wanted}{note}")
    return float(plain)


def typed(cure: str, kind: type | types.UnionType, **values: object) -> None:
    """Raises ValueError for the first argument that is not of a kind; `cure` says what to pass."""
    for name, value in values.items():
        if not isinstance(value, kind):
            text = shown(value)  # which may name the type
            kind_of_it = "" if text.startswith("<a ") else f", of the type {type(value).__name__}"
            raise ValueError(f"{name}={text}{kind_of_it}; pass {cure}")


def instance(name: str, value: object, kind: type[_T], cure: str) -> _T:
    """Returns a value of a kind; raises ValueError for another one, as `typed`."""
    typed(cure, kind, **{name: value})
    return cast(_T, value)


def listed(name: str, value: object, cure: str) -> list[Any]:
    """Returns the items of a list, a tuple or an array; raises ValueError for another value."""
    found = items(value)
    if found is None:
        raise ValueError(f"{name}={shown(value)} is not allowed; pass {cure}")
    return found


def chosen(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises ValueError if a value, which may be of any type, is not among the allowed ones."""
    if not isinstance(value, str | None) or value not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{name}={shown(value)} is not allowed; pass one of {names}")


def settle(*faults: tuple[object, str]) -> None:
    """Raises ValueError with the sentence of every fault that is true, all of them at once."""
    found = [sentence for is_wrong, sentence in faults if is_wrong]
    if found:
        raise ValueError("; ".join(found))


@contextlib.contextmanager
def reworded(
    before: str, after: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Turns an error of this block into a ValueError with words before and after its own."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{before}{error}{after}") from None
