"""`AdapterBank`: drafters of one method with the same sizes, from which each row chooses one."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax._internal.checks import each, settle, shown
from specjax.contract import Weights
from specjax.methods.drafter import Adapter, Drafter
from specjax.models import LanguageModel

DrafterT = TypeVar("DrafterT", bound=Drafter)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdapterBank(Drafter, abc.ABC, Generic[DrafterT]):
    """Adapters of one method with the same sizes, for one target.

    A method says in `fits` which adapters belong together, and makes the proposer's parameters from
    `params` and the slot of each row in `make`.  Compiled programs depend on the capacity only:
    `add` writes into a free slot and recompiles nothing.  `params` are the parameters of the
    adapters, stacked: every leaf [capacity, ...].
    """

    name: str = "bank"
    adapters: dict[str, DrafterT]  # by name, in the order of their slots, without weights

    @abc.abstractmethod
    def fits(self, name: str, adapter: DrafterT) -> None:
        """Raises ValueError if an adapter has other sizes, or is for another target."""

    @property
    def capacity(self) -> int:
        """The most adapters that the bank can hold."""
        return len(jax.tree.leaves(self.params)[0])

    def add(self, name: str, adapter: DrafterT) -> Self:
        """Returns a bank with one more adapter.  Programs that decode are not compiled again.

        Raises:
          ValueError: a name that is taken, no free slot, or an adapter of other sizes or for
            another target.
        """
        slot = len(self.adapters)
        settle(
            (
                name in self.adapters,
                f"the bank has an adapter {name!r} already: choose another name",
            ),
            (
                slot == self.capacity,
                f"the bank holds {slot} of {self.capacity} adapters: create one with "
                f"capacity={slot + 1} or more",
            ),
        )
        self.fits(name, adapter)
        form = dataclasses.replace(adapter, params=None)
        stacked = _put(self.params, jnp.int32(slot), adapter.params)
        return dataclasses.replace(self, params=stacked, adapters={**self.adapters, name: form})

    @property
    def has_adapters(self) -> bool:
        return True

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    def check(self, target: LanguageModel) -> None:
        for adapter in self.adapters.values():
            adapter.check(target)

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray:
        return slots_of(self.adapters, adapter, rows)


def empty_slots(params: Weights, capacity: int) -> Weights:
    """Returns zeros for `capacity` adapters with parameters such as these."""
    return jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), params)


def slots_of(names: Iterable[str], adapter: Adapter, rows: int) -> np.ndarray:
    """Returns the slot of each row's adapter [B] int32, -1 for None.

    An adapter that is the only one is the default.

    Raises:
      ValueError: an unknown name, or no name although there are several adapters.
    """
    slot_of = {name: slot for slot, name in enumerate(names)}
    known = ", ".join(slot_of)
    if adapter is None:
        if len(slot_of) > 1:
            raise ValueError(
                f"the bank has several adapters: pass adapter= with one of {known} for all "
                "prompts, or with a list that has a name or None for each prompt"
            )
        return np.zeros(rows, np.int32)
    slots = []
    for name in each("adapter", adapter, rows):
        if not isinstance(name, str | None):
            raise ValueError(
                f"adapter={shown(name)} is not allowed; it must be one of {known}, or None"
            )
        if name is not None and name not in slot_of:
            raise ValueError(f"there is no adapter {name!r} in the bank; it has {known}")
        slots.append(-1 if name is None else slot_of[name])
    return np.array(slots, np.int32)


@jax.jit
def _put(stacked: Weights, slot: jax.Array, params: Weights) -> Weights:
    return jax.tree.map(
        lambda all_, one: all_.at[slot].set(one.astype(all_.dtype)), stacked, params
    )
