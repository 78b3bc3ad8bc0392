"""Arguments of a user, read one at a time: what cannot be used is refused by name, with the cure.

Python counts True as 1, NumPy reads "2" as 2.0, and bytes are a sequence of numbers.  None of them
is a number here.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def shown(value: Any) -> str:
    """A value for a message: short, on one line, and without the arrays of a model."""
    if isinstance(value, type):
        return f"<the class {value.__name__}>"
    if dataclasses.is_dataclass(value):
        return f"<a {type(value).__name__}>"
    found = number(value)
    try:
        return " ".join(reprlib.repr(value if found is None else found).split())
    except ValueError:  # Python does not print an int of more than 4300 digits
        return f"<a very long {type(value).__name__}>"


def number(value: Any) -> int | float | None:
    """`value` as an int or a float, where it is a number of any library, or None.

    An array without axes is a number; a boolean is none.
    """
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


def items(value: Any) -> list[Any] | None:
    """What a list, a tuple or an array with axes holds; None for anything else, such as a text."""
    if isinstance(value, type | str | bytes | bytearray | memoryview):
        return None
    if isinstance(value, Sequence):
        return list(value)
    if not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    if array.ndim == 0:
        return None
    return array.tolist() if array.dtype.kind in "iufb" else list(array)


def whole(name: str, value: Any, least: int, most: int, wanted: str) -> int:
    """A whole number in [least, most].  Raises ValueError, which says what is `wanted`."""
    found = number(value)
    if not isinstance(found, int) or not least <= found <= most:
        raise ValueError(f"{name}={shown(value)} is not allowed; it must be {wanted}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False.  Raises ValueError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={shown(value)} is not allowed; it must be True or False")
    return bool(value)


def hashable(name: str, value: Any) -> None:
    """Raises ValueError for what no compiled program can be found again by."""
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"{name}={shown(value)} is not hashable ({error}), and compiled programs are found "
            "again by it: make it a frozen dataclass of hashable fields"
        ) from None


def each(name: str, value: Any, rows: int, unit: str = "prompt") -> list[Any]:
    """One value a row, from one value for all, or a list.

    Raises:
      ValueError: the list has another length.
    """
    found = items(value)
    if found is None:
        return [value] * rows
    if len(found) != rows:
        count = f"{len(found)} values for {rows} {unit}s"
        raise ValueError(f"{name} has {count}; pass one, or one a {unit}")
    return found


def per_row(
    name: str,
    value: Any,
    batch: int,
    dtype: Any,
    accept: Callable[[float], bool],
    wanted: str,
) -> Any:
    """A setting as [batch] numbers on the host, from one number, or one a row.

    A list of one number stands for all rows.

    Raises:
      ValueError: a value is no finite number of that type, or `accept` refuses it; the message says
        what is `wanted`.
    """
    given = items(value)
    if given is not None and len(given) == 1:
        values = given * batch
    else:
        values = each(name, value, batch, "row")
    integer = np.issubdtype(dtype, np.integer)
    greatest = np.iinfo(dtype).max if integer else float(np.finfo(dtype).max)
    made = []
    for v in values:
        found = number(v)
        if found is None or (integer and isinstance(found, float)):
            fits = False
        else:
            fits = abs(found) <= greatest and accept(found)
        if not fits:
            raise ValueError(f"{name}={shown(v)} is not allowed; it must be {wanted}")
        made.append(found)
    return np.array(made, dtype)


def is_count(value: float) -> bool:
    return value >= 0
