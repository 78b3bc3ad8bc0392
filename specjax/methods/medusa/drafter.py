"""Medusa heads with their weights, and banks of them from which each row chooses an adapter."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from specjax._internal.checks import settle
from specjax.contract import Proposer
from specjax.methods.adapters import AdapterBank, empty_slots, slots_of
from specjax.methods.drafter import Adapter, Drafter
from specjax.methods.medusa.network import MedusaHeads, initial_medusa
from specjax.methods.medusa.source import Medusa, MedusaParams
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import to_host
from specjax.proposers import ChoiceTree


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

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return (self.name,)

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray:
        return slots_of((self.name,), adapter, rows)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> MedusaParams:
        return self.bank.make(target, slots)

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
        fits = (self.heads.hidden_size, self.heads.vocab_size) == (hidden_size, vocab_size)
        settle(
            (
                not fits,
                f"the adapter {self.name} is for a target of hidden size {self.heads.hidden_size} "
                f"and {self.heads.vocab_size} tokens, and {target.name} has {hidden_size} and "
                f"{vocab_size}: pass the target that it was trained for",
            ),
            (
                fits and self.marks and not _alike(self.marks, target_marks(target)),
                f"the adapter {self.name} was trained for another target than {target.name}, which "
                "has the same shape but other weights: pass that target, or train heads for this "
                "one",
            ),
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

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray:
        return self.adapter.slots(adapter, rows)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> MedusaParams:
        return self.adapter.make(target, slots)

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
class MedusaBank(AdapterBank[MedusaAdapter]):
    """Medusa adapters with the same sizes for one target, with one tree of choices."""

    proposer: ChoiceTree
    heads: MedusaHeads  # the sizes, which all adapters share

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
        capacity = len(adapters) if capacity is None else capacity
        settle(
            (not adapters, "adapters is empty; a bank needs at least one"),
            (
                capacity < len(adapters),
                f"capacity={capacity}, and there are {len(adapters)} adapters: pass "
                f"{len(adapters)} or more",
            ),
        )
        first = next(iter(adapters.values()))
        tree = first.choices if choices is None else tuple(map(tuple, choices))
        bank = cls(
            proposer=Medusa(first.heads, tree),
            params=empty_slots(first.params, capacity),
            heads=first.heads,
            adapters={},
        )
        for name, adapter in adapters.items():
            bank = bank.add(name, adapter)
        return bank

    def fits(self, name: str, adapter: MedusaAdapter) -> None:
        settle(
            (
                adapter.heads != self.heads,
                f"the adapter {name!r} has other sizes than those of the bank: "
                f"{_form(adapter.heads)} instead of {_form(self.heads)}; put it into a bank of its "
                "own",
            ),
            *(
                (
                    not _alike(adapter.marks, known.marks),
                    f"the adapters {name!r} and {other!r} were trained for different targets: use "
                    "two banks",
                )
                for other, known in self.adapters.items()
            ),
        )

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> MedusaParams:
        """Returns the parameters of the proposer; rows whose slot is -1 decode plainly."""
        key = "head" if "head" in target.params else "embedding"
        output = None if self.heads.own_heads else {key: target.params[key]}
        return MedusaParams(self.params, jnp.asarray(slots), output)


def _alike(marks: Sequence[float], others: Sequence[float]) -> bool:
    """Returns whether marks are of the same target, as far as both are known."""
    return not marks or not others or np.allclose(marks, others, rtol=0.02, atol=1e-4)


def _form(heads: MedusaHeads) -> str:
    kind = "linear maps of their own" if heads.own_heads else "the target's head"
    return (
        f"{heads.num_heads} heads of {heads.num_layers} blocks, hidden size {heads.hidden_size}, "
        f"{heads.vocab_size} tokens by {kind}"
    )
