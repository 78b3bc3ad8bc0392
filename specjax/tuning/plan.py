"""`Plan`: the measurements of `specjax.tune`, as a table, and as a file that later calls read."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import kernels
from specjax._internal.paths import cache_folder
from specjax.decoding import Decoder
from specjax.drafters import cost_aware
from specjax.methods import Drafter
from specjax.models import LanguageModel
from specjax.proposers import Adaptive
from specjax.tuning.calibrate import Learned

_MARGIN = 0.05

_LEAD = 0.03
"""Share.  A drafter with a program of its own must be faster than `auto` and plain decoding by this
share, since those choose an option in every step.
"""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An option with which to decode the prompts."""

    name: str
    tokens_per_pass: float
    predicted: float | None  # tokens/s, by the seconds of its steps
    measured: float | None  # tokens/s; None if other processes disturbed every sample


@dataclasses.dataclass(frozen=True)
class Tree:
    """A drafter of trees without its weights, with what is needed to load and make it again."""

    name: str  # as in `Plan.candidates`
    structure: str  # of the drafter as it was passed to `tune`
    # The seconds of a step by the number of nodes, ascending, for `cost_aware`; None: as it is.
    seconds: tuple[tuple[int, float], ...] | None

    @classmethod
    def of(cls, drafter: Drafter, seconds: dict[int, float] | None = None) -> Tree:
        """Returns the record of a drafter, or with `seconds` of its `cost_aware` drafter."""
        name = f"{type(drafter.proposer).__name__} of {drafter.name}"
        pairs = None if seconds is None else tuple(seconds.items())
        name = name if seconds is None else f"cost-aware {name}"
        return cls(name, _digest(drafter.proposer), pairs)

    def made_from(self, drafter: Drafter) -> Drafter | None:
        """Returns the drafter that was measured; None if it was made from another one."""
        proposer = drafter.proposer
        if _digest(proposer) != self.structure:
            return None
        if self.seconds is None:
            return drafter
        if not proposer.estimates or self.seconds[-1][0] != proposer.num_nodes:
            return None
        return cost_aware(drafter, dict(self.seconds))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The measured seconds of a step with each option, and the speeds that follow from them."""

    about: dict[str, Any]  # structures, weights, device, versions, rows; the file's key
    seconds: tuple[float, ...]  # of a step with each of `Adaptive.options`
    prior: tuple[float, float]  # acceptance rates of lookup and drafter
    candidates: tuple[Candidate, ...]  # plain decoding first, then the others, "auto" last
    tree: Tree | None = None  # what "auto" stands for where the same drafter is passed
    awake: float = 0.0  # what choosing takes, in steps of plain decoding

    @property
    def best(self) -> Candidate:
        """The fastest option by measurement, or by prediction where nothing was measured."""
        return max(self.candidates, key=lambda one: one.measured or one.predicted or 0.0)

    def fixed(self) -> tuple[str, int]:
        """Returns the option of `Adaptive.options` that is fastest where every step has its width.

        An engine needs it: its passes have one width, also for rows without drafts.  If drafts gain
        less than `_MARGIN`, it is plain decoding, since estimates err.
        """
        options = [(str(name), int(depth)) for name, depth in self.about["options"]]
        speeds = [
            one.tokens_per_pass / seconds
            for one, seconds in zip(self.candidates, self.seconds, strict=False)
        ]
        best = max(range(len(options)), key=speeds.__getitem__)
        return options[best] if speeds[best] > (1 + _MARGIN) * speeds[0] else options[0]

    @property
    def path(self) -> pathlib.Path:
        """The file that `save` writes."""
        text = json.dumps(self.about, sort_keys=True)
        return cache_folder("plans") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def save(self) -> pathlib.Path:
        """Writes the plan to the cache directory, where `generate` on this device finds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(whole)
        partial.replace(self.path)
        return self.path

    def __str__(self) -> str:
        """Returns a table, and the advice."""
        plain = self.candidates[0].measured
        wide = max(28, *(len(one.name) for one in self.candidates))
        lines = [
            f"{'':<{wide}} tokens a pass  predicted   measured      off  speed-up",
        ]
        for one in self.candidates:
            off = gain = ""
            if one.predicted and one.measured:
                off = f"{100 * (one.predicted / one.measured - 1):+.0f} %"
            if one.measured and plain:
                gain = f"{one.measured / plain:.2f} x"
            predicted, measured = (
                "" if rate is None else f"{rate:.0f}" for rate in (one.predicted, one.measured)
            )
            lines.append(
                f"{one.name:<{wide}} {one.tokens_per_pass:>13.2f} {predicted:>10} {measured:>10} "
                f"{off:>8} {gain:>9}"
            )
        if any(one.measured is None for one in self.candidates):
            lines.append("(where no speed is measured, other processes disturbed every sample)")
        head = "tokens/s of all rows".rjust(wide + 28)
        return "\n".join([head, *lines, "", self.advice()])

    def advice(self) -> str:
        """Returns one sentence: the arguments to pass to `generate`."""
        plain, best = self.candidates[0], self.best
        if self.tree is not None:
            return (
                f'The fastest is {self.tree.name}. proposer="auto" with the same drafter decodes '
                "with it."
            )
        if best.name == plain.name:
            return (
                "Nothing was faster than plain decoding here: leave the draft out, or train one "
                '(specjax train distill). proposer="auto" will not draft on such texts.'
            )
        others = self.candidates[len(self.seconds) : -1]
        if self.seconds and best in others:
            return (
                f'The fastest is {best.name}, and proposer="auto" does not take it: it takes '
                f"trees of the first of the drafters only, if they are {100 * _LEAD:.0f} % faster. "
                "Pass this drafter as drafter= without proposer=."
            )
        return f'The fastest is {best.name}. proposer="auto" starts from these figures.'


Weights = tuple[tuple[str, int], ...]
"""Dtypes, each with the number of its elements."""

_SHORT = 1024
"""Tokens.  Texts up to this length share a plan: their keys cost little beside the weights."""


def weights_of(target: LanguageModel, drafter: Drafter) -> Weights:
    """Returns how many numbers of each dtype the weights have: a step takes as long as they do.

    The same model may have weights in float32 and as codes of 8 bits.
    """
    found = collections.Counter[Any]()
    for leaf in jax.tree.leaves((target.params, drafter.weights)):
        found[leaf.dtype] += leaf.size
    return tuple(sorted((str(dtype), size) for dtype, size in found.items()))


def about(
    decoder: Decoder, weights: Weights, rows: int, samples: bool, context: int = _SHORT
) -> dict[str, Any]:
    """Returns the data on which the seconds of a step depend.

    Args:
      decoder: of an `Adaptive` proposer.
      weights: as `weights_of` returns them.
      rows: that are decoded together.
      samples: whether a row samples.
      context: tokens of the longest text; steps in longer texts take longer, and those of a draft
        model by another factor than those of the target.
    """
    assert isinstance(decoder.proposer, Adaptive)
    device = jax.devices()[0]
    return {
        "structure": _digest((decoder.target, decoder.proposer)),
        "weights": dict(weights),
        "options": [list(option) for option in decoder.proposer.options],
        "rows": 1 << (rows - 1).bit_length(),
        "context": contexts_of(context)[-1],
        "samples": samples,
        "device": f"{device.platform} {device.device_kind}",
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "kernels": device.platform == "cpu" and kernels.usable(),
    }


def contexts_of(longest: int) -> tuple[int, ...]:
    """Returns the contexts of a call: the powers of two from 1024 tokens that its texts reach."""
    made = [_SHORT]
    while made[-1] < longest:
        made.append(2 * made[-1])
    return tuple(made)


def _digest(structure: object) -> str:
    return hashlib.sha256(repr(structure).encode()).hexdigest()


def fastest_tree(
    plain: Candidate, auto: Candidate, trees: Sequence[tuple[Tree, Candidate]]
) -> Tree | None:
    """Returns the fastest of these trees, if it beats "auto" and plain decoding by `_LEAD`.

    If a speed was not measured, the result is None, and "auto" is used.
    """
    if plain.measured is None or auto.measured is None:
        return None
    known = [(one.measured, tree) for tree, one in trees if one.measured is not None]
    least = (1 + _LEAD) * max(plain.measured, auto.measured)
    speed, tree = max(known, key=lambda pair: pair[0], default=(0.0, None))
    return tree if speed > least else None


def saved_plan(about: dict[str, Any]) -> Plan | None:
    """Returns the saved plan for the same structure, weights, device and versions, or None.

    A damaged file is reported once, and counts as missing: the plan is made anew.  So is a file of
    an earlier version, which does not say of what weights it is.
    """
    path = Plan(about, (), (0.0, 0.0), ()).path
    if not path.exists():
        unsaid = {name: value for name, value in about.items() if name != "weights"}
        earlier = Plan(unsaid, (), (0.0, 0.0), ()).path
        if earlier.exists():
            _tell(
                f"the plan {earlier} is of an earlier version of specjax and does not say of what "
                "weights (float32, int8) it is, so it is not used: delete it, or run specjax tune "
                "again"
            )
        return None
    try:
        found = json.loads(path.read_text())
        seconds, prior = (np.array(found[name], float) for name in ("seconds", "prior"))
        fits = found["about"] == about and len(seconds) == len(about["options"])
        if not fits or prior.shape != (2,) or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError("its figures are not those of this model")
        awake = float(found.get("awake", 0.0))  # a plan of an earlier version does not say
        if not 0 <= awake < 1:
            raise ValueError(f"its time of choosing is {awake}")
        candidates = tuple(Candidate(**one) for one in found["candidates"])
        tree = _tree_of(found.get("tree"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _tell(f"the plan {path} cannot be used ({error}); a new one is made")
        return None
    rates = float(prior[0]), float(prior[1])
    return Plan(about, tuple(seconds.tolist()), rates, candidates, tree, awake)


_told: set[str] = set()


def _tell(what: str) -> None:
    """Warns once: one call may look for a plan more than once."""
    if what not in _told:
        _told.add(what)
        warnings.warn(what, stacklevel=3)


def _tree_of(found: Any) -> Tree | None:
    """Returns the tree of a saved plan; a plan of an earlier version has none.

    Raises:
      ValueError, TypeError: it is damaged.
    """
    if found is None:
        return None
    tree = Tree(**found)
    seconds = tree.seconds
    if seconds is not None:
        seconds = tuple((int(nodes), float(cost)) for nodes, cost in seconds)
        nodes = [each for each, _ in seconds]
        costs = np.array([cost for _, cost in seconds])
        ascending = nodes == sorted(set(nodes)) and nodes[:1] > [0]
        if not ascending or not (np.isfinite(costs) & (costs > 0)).all():
            raise ValueError("the seconds of its tree cannot be")
    if not isinstance(tree.name, str) or not isinstance(tree.structure, str):
        raise ValueError("its tree has no name or no structure")
    return dataclasses.replace(tree, seconds=seconds)


def read_plan(about: dict[str, Any]) -> Learned | None:
    """Returns the statistics of a saved plan with which decoding starts, or None.

    While a text is short, it has the seconds of the plans of shorter contexts.
    """
    plan = saved_plan(about)
    if plan is None:
        return None
    contexts = contexts_of(about["context"])
    shorter = [saved_plan({**about, "context": context}) for context in contexts[:-1]]
    rows = [plan.seconds]
    for each in reversed(shorter):  # a context without a plan has that of the next longer one
        rows.append(rows[-1] if each is None else each.seconds)
    return Learned(
        np.array(plan.seconds), np.array(plan.prior), 0.0, judged=np.full(2, np.inf),
        longer=np.array(rows[::-1]) if len(rows) > 1 else None, awake=plan.awake,
    )  # fmt: skip
