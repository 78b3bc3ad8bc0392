"""What transformers said, read from `tests/fixtures`; `make_transformers.py` stored it."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np
from warps import DEFAULTS, LOGITS, SETTINGS

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
YEAR = "<the year of today>"
"""Stands in stored texts for the year in which they are compared."""


@functools.cache
def said() -> dict[str, Any]:
    return json.loads((FIXTURES / "transformers.json").read_text())


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "transformers.npz") as file:
        return dict(file)


def warped(row: int) -> np.ndarray:
    """`warps.LOGITS` under one of its settings, -inf where transformers removes a token."""
    kept = np.unpackbits(arrays()["kept"][row], count=LOGITS.size).reshape(LOGITS.shape)
    temperature = np.float32((DEFAULTS | SETTINGS[row])["temperature"])
    return np.where(kept == 1, LOGITS / temperature, -np.inf)
