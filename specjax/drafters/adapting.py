"""`adaptive`: takes prompt lookup, a drafter or plain decoding, in every step the fastest."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax._internal.checks import shown, typed, whole
from specjax._internal.held_numbers import on_device
from specjax.contract import Proposer
from specjax.drafters.arranging import CHAIN, as_chain
from specjax.drafters.costs import calibrated
from specjax.drafters.folder import mtp_of
from specjax.methods import Adapter, BoundDrafter, Drafter, make_drafter
from specjax.models import LanguageModel
from specjax.proposers import (
    MEASURED,
    PAUSE,
    Adaptive,
    AdaptiveParams,
    Aligned,
    Calibrated,
    Chain,
    FirstOf,
    NGram,
)

_LADDER = (1, 3, 5, 9, 17, 33)
"""Widths, in tokens that the target may read of a row, up to the depth of the drafts and one."""

_FIRST = (4, 2)
"""The drafts of the first calls on a CPU, of one row and of several, which rarely lose much.

On other platforms a pass over all drafts costs little more, so first calls have all of them there.
"""

PRIOR = (0.5, 0.4)
"""Acceptance rates (shares) of lookup and drafter before anything was measured."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdaptiveDrafter(Drafter):
    """The drafter that `adaptive` returns."""

    proposer: Adaptive
    lookup: Drafter | None
    drafter: Drafter | None
    # Of each option, and by context if there are several; None: the first call measures them.
    seconds: tuple[tuple[float, ...], ...] | None
    prior: tuple[float, float]
    contexts: tuple[int, ...] = ()  # the longest text of each row of `seconds`; (): there is one
    on_demand: bool = False  # first calls have few options: see `begun`

    def begun(self, rows: int) -> AdaptiveDrafter | None:
        """Returns the drafter of the first calls for `rows` rows, whose program compiles sooner.

        It has plain decoding, and one number of drafts of each part.  None: this drafter has no
        more options than that, was not made to begin so, or has parts that cannot be shortened.
        """
        proposer, cpu = self.proposer, jax.default_backend() == "cpu"
        if not self.on_demand or not proposer.is_chain or len(proposer.widths) < 3:
            return None
        depth = min(_FIRST[rows > 1] if cpu else proposer.max_depth, proposer.max_depth)
        parts = [
            None if part is None else _shortened(part, depth)
            for part in (self.lookup, self.drafter)
        ]
        lookup, drafter = parts
        if (lookup is None) != (self.lookup is None) or (drafter is None) != (self.drafter is None):
            return None
        inner = [None if part is None else part.proposer for part in parts]
        made = Adaptive(*inner, widths=(1, depth + 1), brief=True)
        return dataclasses.replace(self, proposer=made, lookup=lookup, drafter=drafter)

    @property
    def reader(self) -> LanguageModel | None:
        return None if self.drafter is None else self.drafter.reader

    @property
    def weights(self) -> Any:
        return [part.weights for part in (self.lookup, self.drafter) if part is not None]

    def check(self, target: LanguageModel) -> None:
        for part in (self.lookup, self.drafter):
            if part is not None:
                part.check(target)

    def slots(self, adapter: Adapter, rows: int) -> None:
        for part in (self.lookup, self.drafter):
            if part is not None:
                part.slots(None, rows)
        super().slots(adapter, rows)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> AdaptiveParams:
        lookup, drafter = (
            None if part is None else part.make(target, part.slots(None, 1))
            for part in (self.lookup, self.drafter)
        )
        return AdaptiveParams(lookup=lookup, drafter=drafter, **self._numbers)

    @functools.cached_property
    def _numbers(self) -> dict[str, jax.Array]:
        """The fields of `AdaptiveParams` that hold numbers, on the device."""
        # Unmeasured, every token that the target reads costs a tenth of a pass.
        tenths = [1 + 0.1 * depth for _, depth in self.proposer.options]
        several = len(self.contexts) > 1
        seconds = self.seconds or [tenths] * max(1, len(self.contexts))
        numbers = {
            "seconds": np.array(seconds if several else seconds[0], np.float32),
            "forced": np.array(MEASURED, np.int32),
            "prior": np.array(self.prior, np.float32),
            "pause": np.full(2, PAUSE, np.int32),
            "saved": np.array(1.0, np.float32),
            "awake": np.array(0.0, np.float32),
        }
        if several:
            numbers["contexts"] = np.array(self.contexts, np.int32)
        if not self.proposer.is_chain:
            for name, widths in (
                ("trees", self.proposer.widths),
                ("chains", self.proposer.chain_widths),
            ):
                numbers[name] = np.zeros((len(widths), 2), np.float32)
        # jnp.asarray would compile a program for each shape.
        return {name: on_device(number) for name, number in numbers.items()}


def _shortened(part: Drafter, depth: int) -> Drafter | None:
    """Returns prompt lookup or a chain with fewer drafts; None for another drafter."""
    proposer = part.proposer
    if isinstance(proposer, NGram | Chain):
        return dataclasses.replace(part, proposer=dataclasses.replace(proposer, num_drafts=depth))
    try:
        return as_chain(part, depth)
    except ValueError:  # it has no source, so its chains stay as they are
        return None


def automatic(
    target: LanguageModel,
    draft: LanguageModel | None = None,
    dtype: str | None = None,
    num_drafts: int = CHAIN,
    expects: bool = False,
) -> Drafter:
    """The drafter of `proposer="auto"`: prompt lookup, and a draft model or the target's MTP layer.

    Args:
      target, draft: loaded models.
      dtype: "int8" or "int4" rounds the weights of the draft.
      num_drafts: the greatest depth of the drafts.
      expects: the rows have texts that are expected of them.

    Raises:
      ValueError: as `make_drafter`.
    """
    lookup = expecting(num_drafts) if expects else NGram(num_drafts)
    own = _own_layer(target) if draft is None else None
    if own is not None:
        return on_demand(adaptive(as_chain(own, num_drafts), lookup))
    if draft is None:
        return on_demand(adaptive(lookup=lookup))
    chain = make_drafter(target, draft, dtype=dtype, num_drafts=num_drafts)
    # Another tokenizer's draft has to read every token, in steps without drafts too.
    return on_demand(adaptive(chain, lookup)) if chain.proposer.resumes else chain


def on_demand(drafter: Drafter, wanted: bool = True) -> Drafter:
    """Returns an adaptive drafter whose first calls have few options, or all of them.

    A program has a pass for each number of drafts, which takes about a second to compile for a
    small model.  So the first calls have one number, and the others are compiled when the time
    that they would have saved is as long as their compilation.  Another drafter is unchanged.
    """
    if not isinstance(drafter, AdaptiveDrafter):
        return drafter
    return dataclasses.replace(drafter, on_demand=wanted)


def expecting(num_drafts: int, drawn: bool = False) -> Proposer:
    """Returns a proposer for rows with expected texts, in which it looks up where a row differs.

    With `drawn` what it looks up is drawn with the rule's noise, as for samples of other keys.
    """
    last = Aligned(num_drafts)
    found = FirstOf(Aligned(num_drafts, agreed=True), NGram(num_drafts, drawn=drawn))
    return FirstOf(found, last, last.narrower)


def _own_layer(target: LanguageModel) -> Drafter | None:
    """Returns the MTP layer in the target's folder, or None if there is none that can be used.

    A layer that cannot be read gives a warning and no error, since the user did not ask for it.
    """
    if not target.mtp or not isinstance(target.params, Mapping):
        return None
    try:
        return mtp_of(target)
    except (ValueError, OSError) as error:
        warnings.warn(f"auto drafts without the MTP layer of {target.name}: {error}", stacklevel=2)
        return None


def widths_of(depth: int) -> tuple[int, ...]:
    """Returns the widths of an `Adaptive` proposer with chains, or trees, of so many drafts."""
    return (*(width for width in _LADDER if width <= depth), depth + 1)


def tree_widths(depth: int, nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `widths` and `compiled` of an `Adaptive` proposer of trees.

    A whole chain is a width of its own.  It has no further pass of the target, which would take
    long to compile: it takes the place of the next smaller one of the ladder if that is the
    nearest, and otherwise is read with the next wider one.

    Args:
      depth: of the trees, in drafts.
      nodes: of a tree, the root included.

    Example:
      >>> tree_widths(5, 13)
      ((1, 3, 5, 6, 9, 13), (1, 3, 6, 9, 13))
    """
    ladder, chain = widths_of(nodes - 1), depth + 1
    if chain in ladder or chain > nodes:
        return ladder, ladder
    below = max(width for width in ladder if width < chain)
    above = min(width for width in ladder if width > chain)
    compiled = ladder
    if below > 1 and chain - below < above - chain:
        compiled = tuple(chain if width == below else width for width in ladder)
    return tuple(sorted({*ladder, chain})), compiled


def _grows(proposer: Proposer) -> bool:
    """Whether a proposer makes trees of which `adaptive` can keep the best nodes."""
    return proposer.estimates and not (proposer.is_chain or proposer.shares_cache)


def adaptive(
    drafter: Drafter | None = None,
    lookup: Drafter | Proposer | None = None,
    *,
    seconds: Sequence[float] | Mapping[int, Sequence[float]] | None = None,
    prior: tuple[float, float] = PRIOR,
) -> Drafter:
    """Makes a drafter that drafts only if it saves time, at the depth that saves the most.

    In every step it takes the option that promises the most tokens a second: plain decoding, the
    lookup, or the drafter, each with several depths.  Under the rule `match` the text is the same
    for every choice.

    Args:
      drafter: one of chains, such as `make_drafter(target, draft, num_drafts=8)`, or of trees that
        are chosen anew in every step; their chances are learned then, as by `calibrated`.  A draft
        model costs nothing in steps in which it does not draft.
      lookup: a proposer of chains without a model; by default prompt lookup as deep as the drafter.
      seconds: the time of a step with each of `proposer.options`, or such times by the tokens of
        the longest text that they are for.  By default the first call of `generate` measures them;
        `specjax.tune` measures them once and for all.
      prior: acceptance rates of lookup and drafter before any draft was judged.

    Raises:
      ValueError: a drafter of fixed trees, a lookup and a drafter of different depths, times that
        are not positive, or contexts that are not whole numbers above 0.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> drafter = specjax.adaptive(specjax.make_drafter(target, draft, num_drafts=4))
      >>> drafter.proposer.max_depth
      4
    """
    for name, part in (("drafter", drafter), ("lookup", lookup)):
        typed("the drafter that a loader returns", Drafter | Proposer | None, **{name: part})
    if isinstance(drafter, Proposer):
        drafter = BoundDrafter(drafter)
    if drafter is not None and _grows(drafter.proposer):
        learns = isinstance(drafter.proposer, Calibrated)
        drafter = drafter if learns else calibrated(drafter)
    depth = CHAIN if drafter is None else drafter.proposer.max_depth
    if lookup is None:
        lookup = NGram(depth)
    if isinstance(lookup, Proposer):
        depth = lookup.max_depth
        lookup = BoundDrafter(lookup)
    inner = None if drafter is None else drafter.proposer
    nodes = lookup.proposer.num_nodes if inner is None else inner.num_nodes
    widths, compiled = tree_widths(depth, max(nodes, depth + 1))
    proposer = Adaptive(lookup.proposer, inner, widths, compiled=compiled)
    contexts, rows = _by_context(proposer, seconds)
    name = "prompt lookup" if drafter is None else f"prompt lookup and {drafter.name}"
    return AdaptiveDrafter(
        proposer=proposer,
        name=name,
        lookup=lookup,
        drafter=drafter,
        seconds=rows,
        prior=prior,
        contexts=contexts,
    )


def _by_context(
    proposer: Adaptive, seconds: Sequence[float] | Mapping[int, Sequence[float]] | None
) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...] | None]:
    """Returns the contexts, ascending, and the checked seconds of each."""
    if seconds is None:
        return (), None
    if not isinstance(seconds, Mapping):
        return (), (_checked(proposer, seconds),)
    if not seconds:
        raise ValueError("seconds={}; pass the times for one context or more")
    most = 2**31 - 1
    for context in seconds:
        whole("a context of seconds", context, 1, most, f"a whole number from 1 to {most}")
    contexts = tuple(sorted(seconds))
    return contexts, tuple(_checked(proposer, seconds[context]) for context in contexts)


def _checked(proposer: Adaptive, seconds: Sequence[float]) -> tuple[float, ...]:
    made = tuple(float(second) for second in seconds)
    if len(made) != len(proposer.options) or not all(0 < s for s in made):
        raise ValueError(
            f"seconds={shown(made)}; pass a time above 0 for each of the options "
            f"{', '.join(f'{name} {depth}' for name, depth in proposer.options)}"
        )
    return made
