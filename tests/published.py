"""Folders of published drafters with made-up weights, for the tests and for the scripts that ran
the reference packages on the same weights (`tests/fixtures/drafters/make.py`).

It needs NumPy only: the packages of the references and JAX are never in one environment.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "drafters"

HIDDEN, VOCAB, LAYERS = 16, 29, 4
"""Of the target."""

COUNTS = (7, 3, 1)
"""How many tokens are committed before each block."""
ANCHORS = (5, 11, 2)
"""The pending token of each block."""


def numbers(name: str, shape: tuple[int, ...], scale: float | None = None) -> np.ndarray:
    """Numbers in [-scale, scale] that depend on the name of a tensor, without a generator."""
    index = np.arange(np.prod(shape, dtype=int)) + zlib.crc32(name.encode()) % 100_003
    hashed = np.sin(index * 12.9898) * 43758.5453
    uniform = (2 * (hashed - np.floor(hashed)) - 1).reshape(shape)
    if scale is None:
        scale = 1.0 if "embed_tokens" in name or len(shape) == 1 else 2.5 / shape[-1] ** 0.5
    if len(shape) == 1 and name.endswith("norm.weight"):
        return (1 + 0.3 * uniform).astype(np.float32)
    return (scale * uniform).astype(np.float32)


def weights(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    """A tensor for each name; maps of vocabularies are given as they are."""
    return {
        name: np.array(shape["values"]) if isinstance(shape, dict) else numbers(name, tuple(shape))
        for name, shape in shapes.items()
    }


def features(num_taps: int) -> np.ndarray:
    """[1, T, F] hidden states of the target at all committed tokens."""
    return numbers("features", (1, sum(COUNTS), num_taps * HIDDEN), 1.5)


def embedding() -> np.ndarray:
    return numbers("embed_tokens.weight", (VOCAB, HIDDEN))


def head() -> np.ndarray:
    """[V, H], as in a file."""
    return numbers("lm_head.weight", (VOCAB, HIDDEN))


def path(block: int, length: int) -> np.ndarray:
    """Drafts along which corrections are compared; they need not be what is drafted."""
    return (np.arange(length) * 7 + block * 3 + 1) % VOCAB


def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


NAMES = sorted(file.stem for file in FIXTURES.glob("*.json"))
