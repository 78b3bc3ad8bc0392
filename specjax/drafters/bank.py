"""Adapters per request: Medusa heads with their weights, and a bank of them from which every row picks its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arguments import each, shown
from specjax.drafters.drafter import Adapter, Drafter, MakeArrays
from specjax.models import LanguageModel, MedusaHeads, head_matrix, initial_medusa
from specjax.parallel import to_host
from specjax.proposers import ChoiceTree, Medusa, MedusaParams


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MedusaAdapter(Drafter):
    """Heads with their weights: what `load_medusa` returns, and `generate` takes as `drafter=`."""

    proposer: ChoiceTree = dataclasses.field(init=False)
    heads: MedusaHeads
    choices: tuple[tuple[int, ...], ...] = ()  # the tree that suits them; () is a chain
    acceptance: tuple[float, ...] = ()  # of each choice where its parent was right, as measured
    marks: tuple[float, ...] = ()  # a few numbers of the target that they were trained for

    def __post_init__(self):
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
        """Untrained heads for a target: each says what the target's own head says."""
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
        places = _places({self.name: self}, adapter, rows)
        return lambda laid: _arrays(self.bank, laid, places)

    @functools.cached_property
    def bank(self) -> MedusaBank:
        """This adapter alone."""
        return MedusaBank.create({self.name: self})

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError for another target than theirs."""
        if not (isinstance(target.params, Mapping) and "embedding" in target.params):
            raise ValueError(
                f"the adapter {self.name} reads the features of a specjax Transformer, and {target.name} is a "
                f"{type(target.model).__name__}: pass the target that it was trained for"
            )
        found, wanted = (
            (self.heads.hidden_size, self.heads.vocab_size),
            head_matrix(target.params).shape,
        )
        if found != wanted:
            raise ValueError(
                f"the adapter {self.name} is for a target of {found[0]} features and {found[1]} tokens, and "
                f"{target.name} has {wanted[0]} and {wanted[1]}: pass the target that it was trained for"
            )
        if self.marks and not np.allclose(self.marks, target_marks(target), rtol=0.02, atol=1e-4):
            raise ValueError(
                f"the adapter {self.name} was trained for another target than {target.name}, which has the same shape "
                "but other weights: pass that target, or train heads for this one"
            )


def target_marks(target: LanguageModel) -> tuple[float, ...]:
    """Numbers by which a target is known again, whatever type its weights were rounded to."""
    return tuple(to_host(target.params["embedding"][:4, :4]).astype(np.float32).ravel().tolist())


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MedusaBank(Drafter):
    """Adapters of one form for one target, and one tree of choices.

    A capacity is compiled once: to add an adapter writes numbers into a free place.  `params` are
    the adapters' own, stacked: every leaf [capacity, ...].
    """

    proposer: ChoiceTree
    name: str = "bank"
    heads: MedusaHeads  # the form of each
    adapters: dict[
        str, MedusaAdapter
    ]  # by name, in the order of their places; without their weights

    @classmethod
    def create(
        cls,
        adapters: Mapping[str, MedusaAdapter],
        *,
        capacity: int | None = None,
        choices: Sequence[Sequence[int]] | None = None,
    ) -> MedusaBank:
        """A bank with room for `capacity` adapters, by default for those given.

        Args:
          adapters: at least one.
          capacity: the most that it will ever hold.
          choices: the tree for all of them; by default the first one's.

        Raises:
          ValueError: what does not fit, and the cure.
        """
        if not adapters:
            raise ValueError("adapters is empty; a bank needs one, whose form the others share")
        capacity = len(adapters) if capacity is None else capacity
        if capacity < len(adapters):
            raise ValueError(
                f"capacity={capacity}, and there are {len(adapters)} adapters: pass {len(adapters)} or more"
            )
        first = next(iter(adapters.values()))
        tree = first.choices if choices is None else tuple(map(tuple, choices))
        room = jax.tree.map(
            lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), first.params
        )
        bank = cls(proposer=Medusa(first.heads, tree), params=room, heads=first.heads, adapters={})
        for name, adapter in adapters.items():
            bank = bank.add(name, adapter)
        return bank

    @property
    def capacity(self) -> int:
        return len(jax.tree.leaves(self.params)[0])

    def add(self, name: str, adapter: MedusaAdapter) -> MedusaBank:
        """A bank with one more adapter.  Nothing that decodes is compiled again.

        Raises:
          ValueError: a name that is taken, no free place, or an adapter of another form or target.
        """
        place = len(self.adapters)
        if name in self.adapters:
            raise ValueError(f"the bank has an adapter {name!r} already: choose another name")
        if place == self.capacity:
            raise ValueError(
                f"the bank holds {place} of {self.capacity} adapters: create one with capacity={place + 1} or more"
            )
        if adapter.heads != self.heads:
            raise ValueError(
                f"the adapter {name!r} has another form than those of the bank: {_form(adapter.heads)} instead of "
                f"{_form(self.heads)}; put it into a bank of its own"
            )
        for other, known in self.adapters.items():
            if (
                adapter.marks
                and known.marks
                and not np.allclose(adapter.marks, known.marks, rtol=0.02, atol=1e-4)
            ):
                raise ValueError(
                    f"the adapters {name!r} and {other!r} were trained for different targets: use two banks"
                )
        kept = dataclasses.replace(adapter, params=None)
        stacked = _put(self.params, jnp.int32(place), adapter.params)
        return dataclasses.replace(self, params=stacked, adapters={**self.adapters, name: kept})

    @property
    def has_adapters(self) -> bool:
        return True

    def check(self, target: LanguageModel) -> None:
        for adapter in self.adapters.values():
            adapter.check(target)

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        """As `Drafter.for_rows`; an adapter of None is plain decoding.

        Raises:
          ValueError: an unknown name, another number of names than rows, a bank of several and no
            choice, or another target than the adapters'.
        """
        self.check(target)
        places = _places(self.adapters, adapter, rows)
        return lambda laid: _arrays(self, laid, places)


def _arrays(bank: MedusaBank, target: LanguageModel, places: list[int]) -> MedusaParams:
    key = "head" if "head" in target.params else "embedding"
    output = None if bank.heads.own_heads else {key: target.params[key]}
    return MedusaParams(bank.params, jnp.asarray(np.array(places, np.int32)), output)


def _places(names: Iterable[str], adapter: Adapter, rows: int) -> list[int]:
    """The place of each row's adapter; -1 for None.  A single adapter serves all rows unasked.

    Raises:
      ValueError: a name that is none of these, or several names and no choice.
    """
    places, found = {name: place for place, name in enumerate(names)}, []
    if adapter is None:
        if len(places) > 1:
            raise ValueError(
                f"the bank has several adapters: pass adapter= with one of {', '.join(places)} for all "
                "prompts, or with a list of a name or None for each"
            )
        return [0] * rows
    for name in each("adapter", adapter, rows):
        if not isinstance(name, str | None):
            known = ", ".join(places)
            raise ValueError(
                f"adapter={shown(name)} is not allowed; it must be one of {known}, or None"
            )
        if name is not None and name not in places:
            raise ValueError(
                f"there is no adapter {name!r} in the bank; it has {', '.join(places)}"
            )
        found.append(-1 if name is None else places[name])
    return found


def _form(heads: MedusaHeads) -> str:
    kind = "linear maps of their own" if heads.own_heads else "the target's head"
    return (
        f"{heads.num_heads} heads of {heads.num_layers} blocks on {heads.hidden_size} features, "
        f"{heads.vocab_size} tokens by {kind}"
    )


@jax.jit
def _put(stacked: Any, place: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda all_, one: all_.at[place].set(one.astype(all_.dtype)), stacked, params
    )
