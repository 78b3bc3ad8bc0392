"""`PublishedDrafter`: a proposer over a source that was read from a published folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, PartitionSpec

from specjax._internal.checks import reworded
from specjax.contract import Proposer, Weights
from specjax.methods.drafter import Drafter
from specjax.methods.published.source import PublishedSource
from specjax.methods.published.tables import SharedParams
from specjax.models import Int8, LanguageModel, LinenModel, Tables, Transformer
from specjax.parallel import (
    RULES,
    Rules,
    Shardings,
    Specs,
    described,
    mesh_of,
    named_shardings,
    put,
)

Sizes = tuple[int, int, int]
"""The hidden size, the vocabulary size and the number of layers of a target."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PublishedDrafter(Drafter):
    """The drafter that `load_drafter` returns for sources that read hidden states of the target.

    `params` are the drafter's own parameters.  It uses the target's embedding and head where the
    folder has none, and does not copy them.  On the target's mesh its parameters are split by
    `rules`, like those of the target.
    """

    source: PublishedSource
    shares: tuple[str, ...] = ()  # of "embedding" and "head": those of the target that it uses
    sizes: Sizes  # of the target that it was loaded for
    rules: Rules = dataclasses.field(default_factory=lambda: RULES)

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError if the target has other sizes than the one that it was loaded for.

        A target in int8 whose head would be used, or a target on another mesh, is refused as well.
        """
        theirs = sizes_of(target, self.name)
        if theirs != self.sizes:
            raise ValueError(
                f"the drafter {self.name} is for a target of {_words(self.sizes)}, and "
                f"{target.name} has {_words(theirs)}: pass the target that it was trained for"
            )
        head = target.params.get("head", {})
        in_int8 = "head" in self.shares and isinstance(head.get("kernel"), Int8)
        if in_int8 and not self.source.takes_int8_head:
            raise ValueError(
                f"the drafter {self.name} uses the head of its target, and that of {target.name} "
                "is quantised: pass the target without int8"
            )
        ours, mesh = mesh_of(self.params), mesh_of(target.params)
        if mesh is not None and any(
            isinstance(leaf, Int8) for leaf in flatten_dict(self.params).values()
        ):
            raise ValueError(
                f"the drafter {self.name} holds weights in int8, for one device, and {target.name} "
                f"is on {described(mesh)}: load the drafter without dtype="
            )
        if ours not in (None, mesh):
            raise ValueError(
                f"the drafter {self.name} is on {described(ours)}, and {target.name} is on "
                f"{described(mesh)}: load the drafter with specjax.load_drafter(path, target) for "
                "this target"
            )

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> SharedParams[Tables]:
        del slots
        used = set(self.shares)
        if "head" in used and "head" not in target.params:
            used = {"embedding"}  # the target's head is its embedding
        shared = {name: target.params[name] for name in sorted(used)}
        return SharedParams(self._own_on(mesh_of(target.params)), shared)

    def _own_on(self, mesh: Mesh | None) -> Tables:
        """Returns the drafter's own parameters on a mesh; None leaves them where they are."""
        if mesh is None or mesh_of(self.params) == mesh:
            return self.params
        with reworded(f"the drafter {self.name} on {described(mesh)}: "):
            at = own_shardings(self.source, self.params, mesh, self.rules)
        return jax.tree.map(put, self.params, at)

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> PublishedDrafter:
        return dataclasses.replace(self, proposer=shape(self.source, **numbers))


def is_over(*sources: type) -> Callable[[Drafter], bool]:
    """Returns `Format.makes` of drafters over one of these sources."""
    return lambda drafter: (
        isinstance(drafter, PublishedDrafter) and isinstance(drafter.source, sources)
    )


def own_shardings(
    source: PublishedSource, own: Weights, mesh: Mesh, rules: Rules = RULES
) -> Shardings:
    """Returns a tree of `NamedSharding` like a drafter's own parameters (arrays or shapes).

    Raises:
      ValueError: a dimension that the mesh does not divide, as for a target.
    """
    known: dict[str, PartitionSpec | Specs | None] = {"embedding": PartitionSpec("vocab", "embed")}
    known["head"] = {"kernel": PartitionSpec("embed", "vocab")}
    known |= source.axes()
    names = {name: known.get(name) for name in own}
    units = {"heads": source.layers.num_heads, "kv_heads": source.layers.num_kv_heads}
    return named_shardings(names, own, mesh, rules, units)


def sizes_of(target: LanguageModel, name: str) -> Sizes:
    """Returns the sizes that a drafter depends on.

    Raises:
      ValueError: the target is not a specjax Transformer; the message names the drafter.
    """
    module = target.model.module if isinstance(target.model, LinenModel) else None
    if not isinstance(module, Transformer) or not isinstance(target.params, Mapping):
        raise ValueError(
            f"the drafter {name} reads the hidden states of a specjax Transformer, and "
            f"{target.name} is a {type(target.model).__name__}: pass the target that it was "
            "trained for, as specjax.load returns it"
        )
    config = module.config
    return config.hidden_size, config.vocab_size, config.num_layers


def _words(sizes: Sizes) -> str:
    return f"hidden size {sizes[0]}, {sizes[1]} tokens and {sizes[2]} layers"
