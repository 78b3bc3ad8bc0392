"""Hostile values, and changes of JSON values and of bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**32, 2**63, 10**7, 10**12,
    10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e-45, 1e39, 1e308, float("inf"),
    float("-inf"), float("nan"), "", "x", "1", "0.5", "false", "null", "\x00", "\ud800", "ü" * 50,
    "a" * 5000, "../x", "/etc/passwd", [], [[]], [None], [0], [1, 2], [1.5], ["a"], [[1], [2]],
    [10**12], [True], {}, {"a": 1}, {"type": "default"}, {"content": 5}, [{}] * 3, list(range(300)),
]  # fmt: skip


def some(rng: random.Random) -> Any:
    """A hostile value, sometimes deep inside others."""
    value = copy.deepcopy(rng.choice(VALUES))
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 40))):
        value = [value] if rng.random() < 0.5 else {rng.choice(("a", "type", "content")): value}
    return value


def near(rng: random.Random, value: Any) -> Any:
    """A value like `value`, a little off."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value)))
    if isinstance(value, int):
        real = float(max(min(value, 10**300), -(10**300)))
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**5, real))
    if isinstance(value, float):
        whole = int(value) if abs(value) < 1e300 else 0
        return rng.choice((-value, value * 1e3, value / 1e3, whole, str(value)))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(("", "x", "\n", " ", "\x00", "é")) + value[at + 1 :]
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], [*value, some(rng)], tuple(value)))
    return some(rng)


def changed(rng: random.Random, value: Any, times: int = 1) -> Any:
    """A copy of a JSON value with so many entries replaced, dropped, added or swapped."""
    value = copy.deepcopy(value)
    for _ in range(times):
        value = _change(rng, value)
    return value


def _change(rng: random.Random, value: Any) -> Any:
    entries = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if value and isinstance(value, list)
        else []
    )
    if not entries or rng.random() < 0.05:
        return near(rng, value) if rng.random() < 0.4 else some(rng)
    key = rng.choice(list(entries))
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        value[key] = _change(rng, value[key])
        return value
    act = rng.random()
    if act < 0.55:
        value[key] = some(rng)
    elif act < 0.8:
        value[key] = near(rng, value[key])
    elif act < 0.9:
        del value[key]
    elif isinstance(value, dict):
        value[rng.choice(("", "a", str(key) + "x"))] = value[key]
    else:
        value.append(some(rng))
    return value


def text_of(rng: random.Random, value: Any) -> bytes:
    """A JSON value as the bytes of a file, sometimes damaged."""
    try:
        content = json.dumps(value, ensure_ascii=rng.random() < 0.8).encode(
            "utf-8", "surrogatepass"
        )
    except TypeError:
        content = b"{}"
    if rng.random() < 0.9:
        return content
    return damaged(rng, content)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes cut, changed, doubled, or replaced by what is hard to parse."""
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        (
            lambda: content[:at],
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + b"\xff\xfe\x00" + content[at:],
            lambda: content + content,
            lambda: b"[" * 100_000,
            lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
            lambda: content[:-1] + b', "deep": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            lambda: content[:-1] + b', "long": ' + b"9" * 6000 + b"}",
            lambda: b"",
            lambda: b"\x00" * 4096,
        )
    )()
