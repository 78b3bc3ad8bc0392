"""`tune`: measures on prompts which drafter decodes fastest on this machine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax._internal.checks import typed, within
from specjax.decoding import Decoder
from specjax.drafters import AdaptiveDrafter, adaptive, as_chain, automatic, on_demand, widths_of
from specjax.generation.prepared import Prepared, prepare
from specjax.generation.request import Prompts, Request
from specjax.generation.warmup import Ready, place, warm_up
from specjax.measure import Sample, Timed, first_calls, medians, take_turns
from specjax.methods import Drafter, make_drafter
from specjax.models import LanguageModel
from specjax.parallel import to_host
from specjax.proposers import Adaptive, AdaptiveState
from specjax.rules import Match
from specjax.tuning import (
    Candidate,
    Learned,
    OptionClock,
    Plan,
    Tree,
    about,
    costs_of,
    fastest_tree,
    judged_by_part,
    saved_plan,
    step_costs,
    weights_of,
)
from specjax.types import Params

_OWN_PROMPTS, _OWN_TOKENS, _COST_ROUNDS = 4, 32, 3

_FIRST = 32
"""Steps within which the processor's caches have what decoding needs."""


class _Way(Timed):
    """Decoding of every batch of prompts with the same arrays of the proposer."""

    def __init__(self, name: str, batches: Sequence[Ready], learned: Learned | None) -> None:
        super().__init__(name, len(batches))
        self.tokens, self.passes = np.zeros(len(batches)), np.zeros(len(batches))
        self.judged = np.zeros((2, 2))  # drafts of lookup and drafter, and those accepted
        self.steps: Counter[int] = Counter()  # by option
        self.lengths = np.zeros(len(batches), int)  # steps of each batch of prompts
        self._batches = batches
        if learned is not None:
            self._batches = [
                dataclasses.replace(one, params=learned.put(one.params)) for one in batches
            ]

    def run(self, item: int) -> Sample:
        decoder, params, state = self._begin(item)
        started = time.perf_counter()
        jax.block_until_ready(decoder.run(params, state))
        return Sample(time.perf_counter() - started)

    def run_first(self) -> None:
        """Compiles, and counts the drafts of each step.

        Later runs write the same text by the same steps, since nothing is learned between them.
        """
        super().run_first()
        for item in range(len(self._batches)):
            decoder, params, state = self._begin(item)
            proposer = decoder.proposer
            if isinstance(proposer, Adaptive):
                while not to_host(state.done).all():
                    state = decoder.run(params, state, 1)
                    self.steps[_option(proposer, state.proposer)] += 1
                    self.lengths[item] += 1
                for part, judged in judged_by_part(state.proposer).items():
                    self.judged[part] += judged
            else:
                state = decoder.run(params, state)
            stats = to_host(state.stats)
            self.tokens[item], self.passes[item] = stats.emitted.sum(), stats.target_passes.sum()

    def _begin(self, item: int) -> tuple[Decoder, Params, Any]:
        ready = self._batches[item]
        return ready.prepared.decoder, ready.params, jax.block_until_ready(ready.prefill())

    def candidate(self, seconds: np.ndarray, start: float) -> Candidate:
        """Returns its speeds, from the seconds [O] of a step with each option and before a text."""
        predicted = rate = None
        if self.steps:
            spent = sum(number * seconds[option] for option, number in self.steps.items())
            spent += start * len(self._batches)
            predicted = float(self.tokens.sum() / spent)
        if all(self.seconds):
            rate = float(self.tokens.sum() / medians(self.seconds).sum())
        tau = float(self.tokens.sum() / max(self.passes.sum(), 1))
        return Candidate(self.name, tau, predicted, rate)


class _Step(Timed):
    """Steps with an option, timed as often as a way decodes batches of prompts."""

    def __init__(self, option: int, clock: OptionClock, items: int) -> None:
        super().__init__(f"option {option}", items)
        self._option, self._clock = option, clock

    def run(self, item: int) -> Sample:
        self._clock.restart()
        return Sample(self._clock.sample(self._option))


class _Beginning(_Way):
    """The first steps of plain decoding, which find the processor's caches full of the prompt."""

    def run(self, item: int) -> Sample:
        decoder, params, state = self._begin(item)
        started = time.perf_counter()
        jax.block_until_ready(decoder.run(params, state, _FIRST))
        return Sample(time.perf_counter() - started)

    def start(self, seconds: float) -> float:
        """Returns the seconds of a text besides its steps, which take `seconds` without drafts."""
        rests = [
            sample - min(_FIRST, length) * seconds
            for length, samples in zip(self.lengths, self.seconds, strict=True)
            for sample in samples
        ]
        return max(statistics.median(rests), 0.0) if rests else 0.0


def tune(
    target: LanguageModel,
    drafters: LanguageModel | Drafter | Sequence[LanguageModel | Drafter] = (),
    prompts: Prompts | None = None,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    rounds: int = 5,
    save: bool = True,
) -> Plan:
    """Measures costs of steps and gains of drafts, and writes a plan that "auto" starts from.

    Plain decoding, prompt lookup and the chains of the first drafter run in one program, which is
    compiled once, each with several numbers of drafts.  Trees and other drafters have programs of
    their own.  Trees with estimates are measured twice: as they are, and as `cost_aware` cuts them.
    All take turns on the same prompts; samples that other processes disturbed are dropped.

    Where a tree of the first drafter is faster than all of that, `generate` with `proposer="auto"`
    and this drafter decodes with the tree.

    Args:
      target: from `specjax.load`.
      drafters: draft models, or what `load_drafter`, `make_drafter` and other loaders return.  The
        first that has chains is the one that the plan is for.
      prompts: texts or token-id lists like those that will be decoded; by default texts that the
        target writes itself.
      batch: rows that are decoded together.
      temperature: of all rows.
      max_new_tokens: of each prompt.
      rounds: measured turns.
      save: write the plan to the cache directory.  `generate` with the same models, dtypes of
        weights, rows, device and versions then measures nothing.

    Returns:
      The plan; print it to see the table and what to do.

    Raises:
      ValueError: no prompts, or a drafter that does not fit the target.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> plan = specjax.tune(target, prompts=["import os"], max_new_tokens=8, rounds=1, save=False)
      >>> isinstance(plan, specjax.Plan)  # print(plan) shows the table
      True
    """
    typed("what specjax.load(folder) returns", LanguageModel, target=target)
    for name, number in (("batch", batch), ("rounds", rounds), ("max_new_tokens", max_new_tokens)):
        within(name, number, 1)
    given = [drafters] if isinstance(drafters, LanguageModel | Drafter) else list(drafters)
    for one in given:
        typed("models from specjax.load, or drafters", LanguageModel | Drafter, drafters=one)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    rows = _batches(_own_text(target) if prompts is None else prompts, batch)
    if not target.model.reads_trees:
        raise ValueError(
            f"the passes of {target.name!r} all have one width, so its decoding cannot be tuned: "
            "compare proposers with specjax bench"
        )
    together, inside = _together(target, given)

    def prepared(drafter: Drafter) -> list[Prepared]:
        asked = [Request(prompts=each, drafter=drafter, **settings) for each in rows]
        return [prepare(target, request) for request in asked]

    batches = prepared(together)
    learned = warm_up(batches[0]).learned
    placed = [place(one) for one in batches]
    decoder, proposer = batches[0].decoder, together.proposer
    assert learned is not None
    learned.longer = None  # the new seconds are for all lengths of these texts
    ways = [
        _Way("plain" if not depth else f"{name} of {depth}", placed, _only(learned, index))
        for index, (name, depth) in enumerate(proposer.options)
    ]
    trees: list[tuple[Tree, _Way]] = []  # those of the drafter inside
    for one in given:
        drafter = make_drafter(target, one) if isinstance(one, LanguageModel) else one
        if one is inside and drafter.proposer.is_chain:
            continue
        for tree in _measured(target, drafter, batch, temperature):
            made = tree.made_from(drafter)
            assert made is not None  # it was made from this one
            own = [place(one) for one in prepared(made)]
            ways.append(_Way(tree.name, own, None))
            if one is inside:
                trees.append((tree, ways[-1]))
    first_calls(ways)
    for option, way in zip(proposer.options, ways, strict=False):
        _learn(learned, way, option)
    clock = OptionClock(
        decoder,
        placed[0].params,
        functools.partial(placed[0].prefill, endless=True),
    )
    # The last one chooses, and has no drafts.
    forced = [clock.plain, *range(1, len(proposer.options)), 0]
    steps = [_Step(option, clock, len(placed)) for option in forced]
    take_turns(steps, 1)
    _measure(learned, clock, steps)
    auto = _Way("auto", placed, dataclasses.replace(learned, seconds=learned.seconds.copy()))
    beginning = _Beginning("beginning", placed, _only(learned, 0))
    first_calls([auto, beginning])
    take_turns([*ways, auto, beginning, *steps], rounds)
    _measure(learned, clock, steps)
    start = beginning.start(learned.seconds[0])
    seconds, choosing = learned.seconds, learned.awake * learned.seconds[0]
    # Only plain decoding and "auto" rest.
    without_rests = seconds + choosing * clock.sometimes
    without_rests[0] += choosing
    candidates = [
        way.candidate(seconds if way in (ways[0], auto) else without_rests, start)
        for way in (*ways, auto)
    ]
    own_trees = [(tree, candidates[ways.index(way)]) for tree, way in trees]
    weights, longest = weights_of(target, together), max(one.context for one in batches)
    plan = Plan(
        about(decoder, weights, batch, temperature > 0, longest),
        tuple(learned.seconds.tolist()),
        (float(learned.prior[0]), float(learned.prior[1])),
        tuple(candidates),
        fastest_tree(candidates[0], candidates[-1], own_trees),
        learned.awake,
    )
    if save:
        plan.save()
    return plan


def plan_of(
    target: LanguageModel, draft: LanguageModel | None, *, batch: int, temperature: float,
    context: int = 1,
) -> Plan | None:  # fmt: skip
    """Returns the plan that `tune` saved for these models, rows and device, or None.

    It is the plan of texts of at most 1024 tokens, or of the power of two that holds `context`.
    """
    drafter = _together(target, [] if draft is None else [draft])[0]
    decoder = Decoder(target.model, drafter.proposer, Match())
    weights = weights_of(target, drafter)
    return saved_plan(about(decoder, weights, batch, temperature > 0, context))


_Passed = LanguageModel | Drafter


def _together(
    target: LanguageModel, given: Sequence[_Passed]
) -> tuple[AdaptiveDrafter, _Passed | None]:
    """Returns the drafter "auto", and the first given drafter whose chains it uses.

    A draft model with other tokens is left out: it has to read every token, so it cannot be left
    out of steps.
    """
    for one in given:
        if isinstance(one, LanguageModel):
            made = on_demand(automatic(target, one), False)
        else:
            try:
                made = adaptive(as_chain(one))
            except ValueError:  # it has no chains, or none that can be left out of steps
                continue
        if isinstance(made, AdaptiveDrafter):
            return made, one
    made = on_demand(automatic(target), False)
    assert isinstance(made, AdaptiveDrafter)
    return made, None


def _measured(
    target: LanguageModel, drafter: Drafter, batch: int, temperature: float
) -> list[Tree]:
    """Returns a drafter as it is and, if it can be cut, with the widths that pay by `seconds`."""
    proposer = drafter.proposer
    made = [Tree.of(drafter)]
    if proposer.estimates and not proposer.is_chain:
        widths = widths_of(proposer.num_nodes - 1)
        costs = step_costs(
            target, drafter, widths, batch=batch, rounds=_COST_ROUNDS, temperature=temperature
        )
        made.append(Tree.of(drafter, costs))
    return made


def _only(learned: Learned, option: int) -> Learned:
    """Returns parameters with which every step takes one option, or none without its drafts.

    Any other option is so dear that not even a trial of it could be paid.  Without drafts,
    most steps are at rest.
    """
    seconds = np.full_like(learned.seconds, 1e9)
    seconds[0], seconds[option] = 1e3, 1.0
    awake = 0.0 if option else learned.awake
    return Learned(seconds, learned.prior.copy(), 0.0, saved=0.0, awake=awake)


def _option(proposer: Adaptive, state: AdaptiveState) -> int:
    """Returns the option whose width the last step of all rows had."""
    offered = to_host(state.offered)
    deepest = int(offered.max())
    if deepest == 0:
        return 0
    drafted = to_host(state.drafted) & (offered > 0)
    name = "drafter" if drafted.any() else "lookup"
    width = next(width for width in proposer.widths if width > deepest)
    return proposer.options.index((name, width - 1))


def _measure(learned: Learned, clock: OptionClock, steps: Sequence[_Step]) -> None:
    """Takes the costs of each option and of choosing, unless all samples of one were disturbed."""
    *options, awake = [list(itertools.chain(*step.seconds)) for step in steps]
    if all(options) and awake:
        costs = costs_of(clock, options, awake)
        learned.seconds, learned.awake = costs.seconds, costs.awake


def _learn(learned: Learned, way: _Way, option: tuple[str, int]) -> None:
    """Takes the acceptance rate of a proposer's first drafts from its shallowest option.

    Rows of that option may have had drafts of the lookup, which do not count for the drafter.
    """
    name, depth = option
    if 0 < depth <= 2:
        index = ("lookup", "drafter").index(name)
        judged, accepted = way.judged[index]
        if judged:
            learned.prior[index], learned.judged[index] = accepted / judged, judged


def _batches(prompts: Any, batch: int) -> list[list[Any]]:
    """Returns lists of `batch` prompts; the last is filled with the first ones."""
    listed = [prompts] if isinstance(prompts, str) else list(prompts)
    if not listed:
        raise ValueError("prompts is empty; pass texts like those that will be decoded, or None")
    short = -len(listed) % batch
    filled = [*listed, *(listed * (short // len(listed) + 1))[:short]]
    return [filled[start : start + batch] for start in range(0, len(filled), batch)]


def _own_text(target: LanguageModel) -> list[list[int]]:
    """Returns beginnings of texts that the target writes, each after one token."""
    first = np.random.default_rng(0).integers(0, target.model.vocab_size, _OWN_PROMPTS)
    request = Request(
        prompts=[[int(token)] for token in first], proposer="none", temperature=1.0, eos=[],
        max_new_tokens=min(_OWN_TOKENS, target.model.max_positions // 4),
    )  # fmt: skip
    ready = place(prepare(target, request))
    state = ready.runner.run(ready.params, ready.prefill())
    tokens, length = to_host((state.tokens, state.length))
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]
