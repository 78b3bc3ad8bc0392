"""`cost_aware` and `calibrated`: drafters of trees that leave out drafts that do not pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax._internal.checks import real, typed
from specjax.contract import Proposer
from specjax.methods import Adapter, Drafter
from specjax.models import LanguageModel
from specjax.proposers import Calibrated, CostAware, CostAwareParams


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CostAwareDrafter(Drafter):
    """The drafter that `cost_aware` returns."""

    inner: Drafter
    seconds: tuple[float, ...]  # of a step at each of the proposer's widths

    @property
    def weights(self) -> Any:
        return self.inner.weights

    @property
    def reader(self) -> LanguageModel | None:
        return self.inner.reader

    @property
    def has_adapters(self) -> bool:
        return self.inner.has_adapters

    def check(self, target: LanguageModel) -> None:
        self.inner.check(target)

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray | None:
        return self.inner.slots(adapter, rows)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> CostAwareParams:
        seconds = jnp.array(self.seconds, jnp.float32)
        return CostAwareParams(self.inner.make(target, slots), seconds)


def cost_aware(drafter: Drafter, seconds: Mapping[int, float]) -> Drafter:
    """Makes a drafter whose trees have only the drafts that make decoding faster.

    In every step each row keeps the number of its best drafts that gives the most tokens a second:
    one more is added only while its expected gain exceeds its cost.  The text stays the same
    (`match`), or keeps its distribution (`rejection`).

    Args:
      drafter: a drafter of trees: `specjax.drafters.arrange(specjax.load_drafter(...),
        num_nodes=32)`.
      seconds: the time of a step by the number of nodes that the target reads, the root included;
        the greatest number is that of the drafter.  `specjax.step_costs` measures it.  Other times
        for the same numbers of nodes do not recompile.

    Raises:
      ValueError: a drafter that does not estimate the chances of its drafts, or invalid numbers of
        nodes or seconds.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> numbers = {"depth": 2, "width": 2, "num_nodes": 4}
      >>> tree = specjax.make_drafter(target, draft, specjax.DynamicTree, **numbers)
      >>> specjax.cost_aware(tree, {2: 0.010, 4: 0.011}).proposer.num_nodes
      4
    """
    typed("what load_drafter returns", Drafter, drafter=drafter)
    for nodes, cost in seconds.items():
        real(f"seconds[{nodes}]", cost, "(0, inf)", ", the time of a step")
    widths = tuple(sorted(seconds))
    proposer: Proposer = CostAware(drafter.proposer, widths)
    times = tuple(float(seconds[width]) for width in widths)
    return CostAwareDrafter(proposer=proposer, name=drafter.name, inner=drafter, seconds=times)


def calibrated(drafter: Drafter) -> Drafter:
    """Makes a drafter that learns from each text how likely its drafts are accepted.

    A tree then grows deep where first drafts are mostly right, and wide where one of several is.
    Three numbers a row are learned from the drafts that were judged, in the compiled step.  The
    text stays the same (`match`), or keeps its distribution (`rejection`).

    Args:
      drafter: a drafter of trees that are chosen anew in every step, such as
        `specjax.drafters.arrange(specjax.load_drafter(...), num_nodes=32)`, or one that
        `cost_aware` made.

    Raises:
      ValueError: a drafter that does not estimate the chances of its drafts.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> numbers = {"depth": 2, "width": 2, "num_nodes": 4}
      >>> tree = specjax.make_drafter(target, draft, specjax.DynamicTree, **numbers)
      >>> specjax.calibrated(tree).proposer.num_nodes
      4
    """
    typed("what load_drafter returns", Drafter, drafter=drafter)
    return dataclasses.replace(drafter, proposer=Calibrated(drafter.proposer))
