"""`choose` of adaptive drafting as one compiled program, which tests call often."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.proposers.adaptive.choosing import Part, choose


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _compiled(
    widths: tuple[int, ...], names: tuple[str, ...], seconds: Any, parts: Any, alive: Any,
    remaining: Any, together: bool,
) -> Any:  # fmt: skip
    made = [Part(name, *part) for name, part in zip(names, parts, strict=True)]
    return vars(choose(widths, seconds, made, alive, remaining, together))


def chosen(
    widths: tuple[int, ...], seconds: Any, parts: Sequence[Part], alive: Any, remaining: Any,
    together: bool,
) -> Any:  # fmt: skip
    """The fields of a `Choice`, as NumPy arrays."""
    made = [(part.gains, part.able, part.late, part.trials) for part in parts]
    names = tuple(part.name for part in parts)
    seconds = np.asarray(seconds, np.float32)
    return types.SimpleNamespace(
        **jax.device_get(_compiled(widths, names, seconds, made, alive, remaining, together))
    )
