"""Medusa heads with their weights, and banks of them from which each row chooses an adapter."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax._internal.checks import each, shown
from specjax.contract import Proposer
from specjax.methods.drafter import Adapter, Drafter, MakeArrays
from specjax.methods.medusa.network import MedusaHeads, initial_medusa
from specjax.methods.medusa.source import Medusa, MedusaParams
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import to_host
from specjax.proposers import ChoiceTree
from specjax.types import Weights


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MedusaAdapter(Drafter):
    """Medusa heads with their weights, from `load_medusa`, for `generate(drafter=...)`."""

    proposer: ChoiceTree = dataclasses.field(init=False)
    heads: MedusaHeads
    choices: tuple[tuple[int, ...], ...] = ()  # the best tree for these heads; () is a chain
    acceptance: tuple[float, ...] = ()  # measured for each choice, given that its parent was right
    marks: tuple[float, ...] = ()  # `target_marks` of the target that the heads were trained for

    def __post_init__(self) -> None:
        object.__setattr__(self, "proposer", Medusa(self.heads, self.choices))

    @classmethod
    def create(
        cls,
        target: LanguageModel,
        num_heads: int,
        *,
        num_layers: int = 1,
        own_heads: bool = False,
        name: str = "new",
    ) -> MedusaAdapter:
        """Makes untrained heads for a target: each predicts what the target's own head predicts."""
        matrix = head_matrix(target.params)
        cap = None if own_heads else target.model.module.config.logit_softcap
        size, vocab = matrix.shape
        heads = MedusaHeads(
            num_heads, size, vocab, num_layers=num_layers, own_heads=own_heads, logit_softcap=cap
        )
        return cls(
            params=initial_medusa(heads, matrix), name=name, heads=heads, marks=target_marks(target)
        )

    @property
    def has_adapters(self) -> bool:
        return True

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        self.check(target)
        slots = _slots({self.name: self}, adapter, rows)
        return lambda laid: _arrays(self.bank, laid, slots)

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> Drafter:
        return ShapedAdapter(
            proposer=shape(self.proposer.source, **numbers), name=self.name, adapter=self
        )

    @functools.cached_property
    def bank(self) -> MedusaBank:
        """Returns a bank that holds only this adapter."""
        return MedusaBank.create({self.name: self})

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError if the heads were trained for another target."""
        if not (isinstance(target.params, Mapping) and "embedding" in target.params):
            raise ValueError(
                f"the adapter {self.name} reads the hidden states of a specjax Transformer, and "
                f"{target.name} is a {type(target.model).__name__}: "
                "pass the target that it was trained for"
            )
        hidden_size, vocab_size = head_matrix(dict(target.params)).shape
        if (self.heads.hidden_size, self.heads.vocab_size) != (hidden_size, vocab_size):
            raise ValueError(
                f"the adapter {self.name} is for a target of hidden size {self.heads.hidden_size} "
                f"and {self.heads.vocab_size} tokens, and {target.name} has {hidden_size} and "
                f"{vocab_size}: pass the target that it was trained for"
            )
        if self.marks and not np.allclose(self.marks, target_marks(target), rtol=0.02, atol=1e-4):
            raise ValueError(
                f"the adapter {self.name} was trained for another target than {target.name}, which "
                "has the same shape but other weights: pass that target, or train heads for "
                "this one"
            )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShapedAdapter(Drafter):
    """Medusa heads whose drafts have another shape than a tree of choices, such as `BestFirst`."""

    adapter: MedusaAdapter

    @property
    def has_adapters(self) -> bool:
        return True

    def check(self, target: LanguageModel) -> None:
        self.adapter.check(target)

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        return self.adapter.for_rows(target, adapter, rows)

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> Drafter:
        return self.adapter.shaped(shape, **numbers)


def target_marks(target: LanguageModel) -> tuple[float, ...]:
    """A few weights that identify a target.  Compare them with a tolerance for the dtype.

    They are read from the device once for each target.
    """
    if target not in _marks:
        corner = to_host(target.params["embedding"][:4, :4])
        _marks[target] = tuple(corner.astype(np.float32).ravel().tolist())
    return _marks[target]


_marks: weakref.WeakKeyDictionary[LanguageModel, tuple[float, ...]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MedusaBank(Drafter):
    """Adapters with the same sizes for one target, with one tree of choices.

    Compiled programs depend on the capacity only: `add` writes into a free slot and recompiles
    nothing.  `params` are the parameters of the adapters, stacked: every leaf [capacity, ...].
    """

    proposer: ChoiceTree
    name: str = "bank"
    heads: MedusaHeads  # the sizes, which all adapters share
    adapters: dict[str, MedusaAdapter]  # by name, in the order of their slots, without weights

    @classmethod
    def create(
        cls,
        adapters: Mapping[str, MedusaAdapter],
        *,
        capacity: int | None = None,
        choices: Sequence[Sequence[int]] | None = None,
    ) -> MedusaBank:
        """Makes a bank with space for `capacity` adapters, by default for those given.

        Args:
          adapters: at least one.
          capacity: the most adapters that the bank can hold.
          choices: the tree for all of them; by default that of the first adapter.

        Raises:
          ValueError: no adapter, too many, or adapters that do not fit together.
        """
        if not adapters:
            raise ValueError("adapters is empty; a bank needs at least one")
        capacity = len(adapters) if capacity is None else capacity
        if capacity < len(adapters):
            raise ValueError(
                f"capacity={capacity}, and there are {len(adapters)} adapters: "
                f"pass {len(adapters)} or more"
            )
        first = next(iter(adapters.values()))
        tree = first.choices if choices is None else tuple(map(tuple, choices))
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), first.params
        )
        bank = cls(proposer=Medusa(first.heads, tree), params=empty, heads=first.heads, adapters={})
        for name, adapter in adapters.items():
            bank = bank.add(name, adapter)
        return bank

    @property
    def capacity(self) -> int:
        """The most adapters that the bank can hold."""
        return len(jax.tree.leaves(self.params)[0])

    def add(self, name: str, adapter: MedusaAdapter) -> MedusaBank:
        """Returns a bank with one more adapter.  Programs that decode are not compiled again.

        Raises:
          ValueError: a name that is taken, no free slot, or an adapter of other sizes or for
            another target.
        """
        slot = len(self.adapters)
        if name in self.adapters:
            raise ValueError(f"the bank has an adapter {name!r} already: choose another name")
        if slot == self.capacity:
            raise ValueError(
                f"the bank holds {slot} of {self.capacity} adapters: "
                f"create one with capacity={slot + 1} or more"
            )
        if adapter.heads != self.heads:
            raise ValueError(
                f"the adapter {name!r} has other sizes than those of the bank: "
                f"{_form(adapter.heads)} instead of {_form(self.heads)}; "
                "put it into a bank of its own"
            )
        for other, known in self.adapters.items():
            if (
                adapter.marks
                and known.marks
                and not np.allclose(adapter.marks, known.marks, rtol=0.02, atol=1e-4)
            ):
                raise ValueError(
                    f"the adapters {name!r} and {other!r} were trained for different targets: "
                    "use two banks"
                )
        form = dataclasses.replace(adapter, params=None)
        stacked = _put(self.params, jnp.int32(slot), adapter.params)
        return dataclasses.replace(self, params=stacked, adapters={**self.adapters, name: form})

    @property
    def has_adapters(self) -> bool:
        return True

    def check(self, target: LanguageModel) -> None:
        for adapter in self.adapters.values():
            adapter.check(target)

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        """Returns the parameters as `Drafter.for_rows`; rows whose adapter is None decode plainly.

        Raises:
          ValueError: an unknown name, another number of names than rows, no name although the bank
            has several adapters, or another target than the adapters'.
        """
        self.check(target)
        slots = _slots(self.adapters, adapter, rows)
        return lambda laid: _arrays(self, laid, slots)


def _arrays(bank: MedusaBank, target: LanguageModel, slots: list[int]) -> MedusaParams:
    key = "head" if "head" in target.params else "embedding"
    output = None if bank.heads.own_heads else {key: target.params[key]}
    return MedusaParams(bank.params, jnp.asarray(np.array(slots, np.int32)), output)


def _slots(names: Iterable[str], adapter: Adapter, rows: int) -> list[int]:
    """Returns the slot of each row's adapter, -1 for None.  A single adapter is the default.

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
        return [0] * rows
    slots = []
    for name in each("adapter", adapter, rows):
        if not isinstance(name, str | None):
            raise ValueError(
                f"adapter={shown(name)} is not allowed; it must be one of {known}, or None"
            )
        if name is not None and name not in slot_of:
            raise ValueError(f"there is no adapter {name!r} in the bank; it has {known}")
        slots.append(-1 if name is None else slot_of[name])
    return slots


def _form(heads: MedusaHeads) -> str:
    kind = "linear maps of their own" if heads.own_heads else "the target's head"
    return (
        f"{heads.num_heads} heads of {heads.num_layers} blocks, hidden size {heads.hidden_size}, "
        f"{heads.vocab_size} tokens by {kind}"
    )


@jax.jit
def _put(stacked: Weights, slot: jax.Array, params: Weights) -> Weights:
    return jax.tree.map(
        lambda all_, one: all_.at[slot].set(one.astype(all_.dtype)), stacked, params
    )
