"""Corrections: small networks that condition the prediction of a slot on the drafts before it.

A pass of a block draft predicts all slots at once, each without knowing what the others draft.  A
correction is a small network that changes the logits of a slot once the token before it is known.

    drafts       x_1 -> x_2 -> x_3           a step reads the last draft and what it remembers
    memory        m_1 -> m_2 -> m_3          of the path, and returns the logits after it

Its functions work on M paths of each row at a time, so that a tree can be corrected along each of
its paths.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from specjax.models import dot_general

_WeightsT = TypeVar("_WeightsT")

Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
Axes = Mapping[tuple[str, ...], tuple[str | None, ...]]


class Slot(NamedTuple):
    """The prediction of a block draft for one slot, and the last drafts before it."""

    number: int  # of the draft, from 0
    hidden: Array  # [B, H]
    logits: Array  # [B, U] float32, on the draft's vocabulary
    previous: Array  # [B, M] int32; the target's ids
    embed: Callable[[], Array]  # [B, M, H] embeddings of `previous`, for those that read them


@dataclasses.dataclass(frozen=True)
class Correction(abc.ABC, Generic[_WeightsT]):
    """A network that corrects logits: hashable, without arrays; `shapes` names its parameters."""

    hidden_size: int  # H, of the block draft
    vocab_size: int  # V, of the target
    draft_vocab_size: int  # U, of the block draft

    @abc.abstractmethod
    def shapes(self) -> Shapes:
        """Returns the shape of each parameter, by its path."""

    def axes(self) -> Axes:
        """Returns the logical axes of the parameters that are split over a mesh, by their paths.

        A matrix that makes logits is split by vocabulary, as logits are.  All others are
        replicated: where a slot reads a few rows of a table, or a small matrix, a sum over the
        devices would take more time than the split saves.
        """
        return {}

    @abc.abstractmethod
    def correct(
        self, params: _WeightsT, slot: Slot, memory: Array | None
    ) -> tuple[Array, Array | None]:
        """Returns the logits [B, M, U] of a slot after each path, and the memory for the next slot.

        `memory` is the memory that this method returned for the slot before, [B, M, ...] for M
        paths; None for the first slot.
        """

    @property
    def estimates(self) -> bool:
        """True if the correction has a `confidence`."""
        return False

    def confidence(self, params: _WeightsT, slot: Slot) -> Array:
        """Returns [B, M] an estimate of the probability that this slot's draft is accepted."""
        del params, slot
        raise NotImplementedError(f"{type(self).__name__} estimates no acceptance")


def multiply(x: Array, kernel: Array) -> Array:
    """Multiplies [..., in] by [in, out]."""
    return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def along_paths(x: Array, paths: Array) -> Array:
    """[B, H] -> [B, M, H], the same for each of the M paths."""
    return jnp.broadcast_to(x[:, None], (*paths.shape[:2], x.shape[-1]))
