"""`specjax bench` compares proposers, numbers of draft tokens and rules with plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import cast

import specjax
from specjax import plot
from specjax.cli.report import Facts, Measured, Row, label, print_report
from specjax.contract import Rule
from specjax.generation import Options, check_length, encode
from specjax.measure import (
    PromptCounts,
    Sample,
    Timed,
    alpha_and_tau,
    describe,
    first_calls,
    interval,
    medians,
    take_turns,
)
from specjax.options.command import parse
from specjax.options.fields import option
from specjax.options.models import DeviceOptions, ModelOptions, Models, load_models, make_drafter
from specjax.options.processes import ProcessOptions
from specjax.options.prompts import PromptOptions
from specjax.options.sampling import FilterOptions, ProcessorOptions
from specjax.options.speculation import (
    BRANCHING,
    DEPTH,
    DRAFTED,
    KINDS,
    WITH_DEPTH,
    NumberOptions,
    RuleNumbers,
    Value,
    given,
    make_rule,
    number,
    number_of,
    reads,
)
from specjax.parallel import leader

_LOOKAHEADS = (1, 2, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class _Drafts:
    """A drafter, the name of its proposer, and the branching of its tree if it has one."""

    kind: str
    drafter: specjax.Drafter
    branching: list[int] | None

    def facts(self, name: str, rule: Rule, temperature: float) -> Facts:
        proposer = self.drafter.proposer
        facts: Facts = {
            "proposer": self.kind,
            "num_drafts": proposer.max_depth,
            "drafted": proposer.num_nodes - 1,
            "rule": name,
            "exact": rule.exact,
            "temperature": temperature,
        }
        if self.branching is not None:
            facts["branching"] = self.branching
        return facts


class _Entry(Timed):
    """A row to be measured: `generate` with these options, on each prompt."""

    def __init__(
        self, target: specjax.LanguageModel, prompts: list[str], options: Options, facts: Facts
    ) -> None:
        super().__init__(f"{label(facts)} with {facts['rule']}", len(prompts))
        self.facts, self.outputs = facts, dict[int, specjax.Output]()
        self._target, self._prompts, self._options = target, prompts, options

    def run(self, item: int) -> Sample:
        output = specjax.generate(self._target, self._prompts[item], **self._options)
        self.outputs[item] = output
        return Sample(output.stats.seconds, output.stats.compile_seconds)


@dataclasses.dataclass(frozen=True)
class ComparedOptions(NumberOptions, RuleNumbers):
    """The proposers and rules that are compared, with several numbers of drafts."""

    group = "speculation"

    proposers: tuple[str, ...] = option(
        ("draft", "ngram"), "proposers to compare; plain decoding is always measured",
        choices=KINDS, names=("--proposer",),
    )  # fmt: skip
    num_drafts: tuple[int, ...] = number(
        _LOOKAHEADS, WITH_DEPTH, DEPTH, default=(), names=("--num-speculative-tokens",)
    )
    branching: tuple[tuple[int, ...], ...] = number(
        (3, 2, 1), ("tree", "datastore"), f"{BRANCHING}; repeat the option for another tree",
        default=(), repeated=True,
    )  # fmt: skip
    rules: tuple[str, ...] = option(
        ("match",), "rules to compare", choices=sorted(specjax.RULES), names=("--rule",)
    )


@dataclasses.dataclass(frozen=True)
class BenchOptions(
    DeviceOptions, ProcessOptions, ProcessorOptions, FilterOptions, ComparedOptions, ModelOptions,
    PromptOptions,
):  # fmt: skip
    """The options of `specjax bench`."""

    group = "measurement"

    temperature: tuple[float, ...] = option(
        (),
        "0 is greedy; default: as in the target's generation_config.json if that samples, else 0",
        names=("--temperatures",),
    )
    rounds: int = option(
        5, "measured rounds, after one round that compiles; 0 measures acceptance only"
    )
    limit_prompts: int = option(0, "use at most this many prompts; 0 uses all")
    json: bool = option(False, "print one JSON object and nothing else")
    save: str | None = option(None, "write that JSON object to this file", metavar="FILE")
    plot: str | None = option(None, "draw alpha, tau and speed-up to this file", metavar="FILE")


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(BenchOptions, argv, prog=prog)
    if arguments.rounds < 0 or arguments.limit_prompts < 0:
        raise ValueError(
            f"--rounds {arguments.rounds} and --limit-prompts {arguments.limit_prompts}: "
            "both must be 0 or more"
        )
    if arguments.plot:
        plot.new_figure()  # without matplotlib this raises before the measurement, not after it
    prompts = arguments.prompts()
    prompts = prompts[: arguments.limit_prompts or len(prompts)]
    # As for `generate`, `auto` has a draft model only if one is passed.
    drafted = DRAFTED if arguments.draft is None else (*DRAFTED, "auto")
    models = load_models(arguments, arguments.proposers, arguments.rules, arguments.devices())
    target = models.target
    entries, impossible = _entries(arguments, models, drafted, prompts)
    report = {
        **describe(),
        "dtype": target.model.dtype.name,
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "impossible": impossible,
    }
    measured = _measure(entries, arguments.rounds)
    if arguments.save and leader():
        text = json.dumps({**report, **measured}, indent=1)
        pathlib.Path(arguments.save).write_text(text + "\n")
    if arguments.plot and leader():
        plot.bench(measured).savefig(arguments.plot)
    if arguments.json:
        print(json.dumps({**report, **measured}))
    else:
        print_report(report, impossible, measured)


def _entries(
    arguments: BenchOptions, models: Models, drafted: Sequence[str], prompts: list[str]
) -> tuple[list[_Entry], list[tuple[str, str]]]:
    """Returns the rows to measure, and the pairs (proposer, rule) that cannot be combined.

    The first row of each temperature is plain decoding.  The kinds in `drafted` take the draft.

    Raises:
      ValueError: the target, the draft, the proposers, the rules and the prompts do not fit
        together; raised before anything is compiled.
    """
    target, undrafted_models = models.target, dataclasses.replace(models, draft=None)
    drafts, ids = [], encode(target, prompts)
    check_length("target", target, ids, arguments.max_new_tokens)
    for kind in dict.fromkeys(arguments.proposers):
        for numbers, branching in _variants(given(arguments), kind):
            gamma = number_of(numbers, "num_drafts")
            if isinstance(gamma, int) and gamma < 1:
                raise ValueError(
                    f"num_drafts={gamma}; it must be at least 1: plain decoding is measured anyway"
                )
            own = models if kind in drafted else undrafted_models
            drafter = make_drafter(kind, own, numbers)
            if drafter.reader is not None:
                check_length("draft", drafter.reader, ids, arguments.max_new_tokens)
            drafts.append(_Drafts(kind, drafter, branching))

    entries: list[_Entry] = []
    impossible: dict[tuple[str, str], None] = {}  # a set that keeps its order
    rules = {name: make_rule(arguments, name) for name in dict.fromkeys(arguments.rules)}
    plain = _Drafts("none", specjax.Drafter(specjax.NoProposer()), None)
    temperatures = arguments.temperature or (None,)
    for temperature in temperatures:
        options: Options = {
            **arguments.sampled(target, temperature),
            **arguments.processing(target),
        }
        used = target.settings(temperature=temperature)["temperature"]
        facts = plain.facts("match", specjax.Match(), used)
        undrafted: Options = {**options, "drafter": plain.drafter}
        entries.append(_Entry(target, prompts, undrafted, facts))
        for (name, rule), each in itertools.product(rules.items(), drafts):
            facts = each.facts(name, rule, used)
            if rule.chain_only and not each.drafter.proposer.is_chain:
                impossible[label(facts), name] = None
            elif (each.kind, name) != ("none", "match"):
                how: Options = {**options, "drafter": each.drafter, "rule": rule}
                entries.append(_Entry(target, prompts, how, facts))
    if len(entries) == len(temperatures) and impossible:
        raise ValueError(
            f"--rules {' '.join(rules)} supports chains only, and --proposers "
            f"{' '.join(arguments.proposers)} proposes trees: use another rule, such as match, "
            "or a proposer of chains, such as draft"
        )
    return entries, list(impossible)


def _variants(
    numbers: Mapping[str, Value], kind: str
) -> list[tuple[dict[str, Value], list[int] | None]]:
    """Returns the numbers for each number of drafts, or for each tree, with its branching."""
    if reads(kind, "num_drafts"):
        lookaheads = cast(Sequence[int], numbers.get("num_drafts", _LOOKAHEADS))
        return [({**numbers, "num_drafts": n}, None) for n in lookaheads]
    default = {**numbers, "num_drafts": number_of({}, "num_drafts")}
    if reads(kind, "branching"):
        trees = cast(
            Sequence[Sequence[int]], numbers.get("branching", [number_of({}, "branching")])
        )
        return [({**default, "branching": [*tree]}, [*tree]) for tree in trees]
    return [(default, None)]


def _measure(entries: list[_Entry], rounds: int) -> Measured:
    first_calls(entries)
    take_turns(entries, rounds)
    rows, plain = [], entries[0]
    for entry in entries:
        if not entry.facts["drafted"] and entry.facts["rule"] == "match":
            plain = entry
        rows.append(_row(entry, plain))
    return {
        "samples": sum(len(each) for entry in entries for each in entry.seconds),
        "dropped": sum(entry.dropped for entry in entries),
        "rows": rows,
    }


def _row(entry: _Entry, plain: _Entry) -> Row:
    outputs = [entry.outputs[item] for item in sorted(entry.outputs)]
    # Speeds are compared on the prompts for which both rows have an undisturbed sample.
    clean = [n for n in range(len(outputs)) if entry.seconds[n] and plain.seconds[n]]
    seconds, before = (medians([e.seconds[n] for n in clean]) for e in (entry, plain))
    rate = interval([outputs[n].stats.tokens for n in clean], seconds)
    speedup = interval(before, seconds)
    # Above temperature 0 only `match` promises the same tokens.
    comparable = entry.facts["rule"] == "match" or entry.facts["temperature"] == 0
    same = sum(output.tokens == plain.outputs[n].tokens for n, output in enumerate(outputs))
    figures = alpha_and_tau(PromptCounts.from_summaries(output.stats for output in outputs))
    return {
        **entry.facts,
        "alpha": figures["alpha"],
        "tau": figures["tau"],
        "tokens_per_second": rate and rate[0],
        "tokens_per_second_interval": rate and rate[1:],
        "speedup": speedup and speedup[0],
        "speedup_interval": speedup and speedup[1:],
        "speedup_median": statistics.median(b / s for b, s in zip(before, seconds, strict=True))
        if clean
        else None,
        "first_call_seconds": entry.first,
        "same_tokens": same if comparable else None,
    }
