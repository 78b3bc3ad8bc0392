"""Applies sampling settings and logits processors in NumPy, without the decoder's code.

Numbers of two programs differ in their last bits.  So every function also returns where that could
change which tokens are kept: `slack` is the largest difference of a logit that counts as rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.processors import LogitsProcessor
from specjax.types import ABSENT


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sampling settings of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        fields, off = dataclasses.asdict(self), dataclasses.asdict(Settings())
        return ", ".join(
            f"{name.replace('_', '-')} {value:.3g}"
            for name, value in fields.items()
            if name == "temperature" or value != off[name]
        )


def warp(logits: np.ndarray, settings: Settings, slack: float) -> tuple[np.ndarray, np.ndarray]:
    """Maps logits [M, V] to those of the sampled distribution, and to [M] whether they are certain.

    A row is uncertain if a logit within `slack` of a filter's bound could be on its other side.
    The order is temperature, top-k, top-p, min-p; excluded tokens are -inf.
    """
    x = np.asarray(logits, np.float64)
    if settings.temperature == 0:
        best = x.argmax(-1)
        order = np.sort(x, axis=-1)
        sure = order[:, -1] - order[:, -2] > slack if x.shape[1] > 1 else np.ones(len(x), bool)
        return np.where(np.arange(x.shape[1]) == best[:, None], 0.0, -np.inf), sure
    x, slack = x / settings.temperature, slack / settings.temperature
    sure = np.ones(len(x), bool)
    if 0 < settings.top_k < x.shape[1]:
        bound = np.sort(x, axis=-1)[:, -settings.top_k, None]
        sure &= _apart(x, bound, slack)
        x = np.where(x >= bound, x, -np.inf)
    if settings.top_p < 1:
        order = -np.sort(-x, axis=-1)
        mass = np.cumsum(softmax(order), axis=-1)
        last = (mass < settings.top_p).sum(-1, keepdims=True).clip(max=x.shape[1] - 1)
        bound = np.take_along_axis(order, last, axis=-1)
        near = 2 * slack + 1e-6
        sure &= _apart(x, bound, slack) & (np.abs(mass - settings.top_p) > near).all(-1)
        x = np.where(x >= bound, x, -np.inf)
    if settings.min_p > 0:
        bound = x.max(-1, keepdims=True) + np.log(settings.min_p)
        sure &= (np.abs(x - bound) > slack).all(-1)
        x = np.where(x >= bound, x, -np.inf)
    return x, sure


def _apart(x: np.ndarray, bound: np.ndarray, slack: float) -> np.ndarray:
    """Returns [M] bool: no other logit [M, V] is within `slack` below the smallest kept one [M, 1].

    A tie with it is kept by definition, but rounding could break the tie.
    """
    return ((x >= bound - slack) & (x <= bound)).sum(-1) == 1


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns probabilities along the last axis, in float64."""
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Processing:
    """The logits processors of all rows: keywords of `Processors.create`, and a user's function."""

    settings: Mapping[str, Any]
    eos: tuple[int, ...]
    function: LogitsProcessor | None
    capacity: int  # the length of the text that the function gets

    def __call__(
        self, logits: np.ndarray, texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> np.ndarray:
        """Maps logits [M, V] after `texts`, whose prompts have the lengths `starts`, to [M, V]."""
        if not self.settings and self.function is None:
            return logits
        made = [
            self._one(row, list(text), start)
            for row, text, start in zip(logits, texts, starts, strict=True)
        ]
        if self.function is None:
            return np.stack(made)
        tails = np.full((len(texts), self.capacity), ABSENT, np.int32)
        counts = np.zeros_like(logits, np.int32)
        for tail, count, text, start in zip(tails, counts, texts, starts, strict=True):
            tail[self.capacity - len(text) :] = text
            np.add.at(count, np.asarray(text[start:], int), 1)
        rows = np.stack(made).astype(np.float32)
        return np.asarray(_apply(self.function)(rows, tails, counts))

    def _one(self, logits: np.ndarray, text: list[int], start: int) -> np.ndarray:
        """Processes logits [V] after one text.  The order is that of `specjax.processors`."""
        s, x = self.settings, np.array(logits, np.float64)
        for token, value in (s.get("logit_bias") or {}).items():
            x[token] += value
        words = [list(word) for word in s.get("bad_words", ())]
        x[[word[0] for word in words if len(word) == 1]] = -np.inf
        seen, output = np.unique(text), text[start:]
        penalty = s.get("repetition_penalty", 1.0)
        x[seen] = np.where(x[seen] < 0, x[seen] * penalty, x[seen] / penalty)
        for token in set(output):
            x[token] -= s.get("presence_penalty", 0.0)
            x[token] -= s.get("frequency_penalty", 0.0) * output.count(token)
        for *before, last in words:
            if before and text[-len(before) :] == before:
                x[last] = -np.inf
        if len(output) < s.get("min_new_tokens", 0):
            x[list(self.eos)] = -np.inf
        return x


_applied: dict[LogitsProcessor, Callable[..., Array]] = {}


def _apply(function: LogitsProcessor) -> Callable[..., Array]:
    """Applies the user's function over nodes, compiled once."""
    if function not in _applied:
        _applied[function] = jax.jit(jax.vmap(lambda *node: function(*node).astype(jnp.float32)))
    return _applied[function]
