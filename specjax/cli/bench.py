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
from specjax.cli import answers
from specjax.cli.asking import Asking, DatasetOptions
from specjax.cli.entries import Entry, Work
from specjax.cli.report import Facts, Measured, Row, label, print_categories, print_report
from specjax.cli.result_files import write_aiperf, write_vllm
from specjax.contract import Rule
from specjax.drafters import on_demand
from specjax.generation import Options, check_length, encode
from specjax.measure import (
    PromptCounts,
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
from specjax.options.synthetic import SyntheticOptions
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


@dataclasses.dataclass(frozen=True)
class ComparedOptions(NumberOptions, RuleNumbers, SyntheticOptions):
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
    DatasetOptions, PromptOptions,
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
    limit_prompts: int = option(
        0, "use at most this many prompts, or questions of each category; 0 uses all"
    )
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
    _check_places(arguments)
    if arguments.plot:
        plot.new_figure()  # without matplotlib this raises before the measurement, not after it
    if arguments.dataset is not None and (arguments.prompt or arguments.prompt_file):
        raise ValueError("pass either prompts or --dataset, not both")
    prompts = None if arguments.dataset else arguments.prompts()
    # As for `generate`, `auto` has a draft model only if one is passed.
    drafted = DRAFTED if arguments.draft is None else (*DRAFTED, "auto")
    models = load_models(arguments, arguments.proposers, arguments.rules, arguments.devices())
    target, asking = models.target, None
    if prompts is None:
        new = arguments.max_new_tokens
        asking = Asking.of(arguments, target, arguments.limit_prompts, new)
        work = _questions(asking)
    else:
        some = prompts[: arguments.limit_prompts or len(prompts)]
        work = _prompts(target, some, arguments.max_new_tokens)
    entries, impossible = _entries(arguments, models, drafted, work)
    report = {
        **describe(),
        "dtype": target.model.dtype.name,
        "prompts": work.items,
        "max_new_tokens": arguments.max_new_tokens,
        "impossible": impossible,
    }
    if asking is not None:
        chosen = dataclasses.asdict(arguments)
        named = ("dataset", "subset", "seed", "thinking")
        report |= {name: chosen[name] for name in named} | {"chat": asking.chat}
    if synthetic := arguments.synthetic():
        report["synthetic_acceptance"] = str(synthetic)
    scored = asking if arguments.accuracy else None
    measured = _measure(entries, arguments.rounds, work, scored)
    if asking is not None and leader():
        drafting = [entry for entry in entries if entry.facts["drafted"]]
        if arguments.save_vllm:
            write_vllm(pathlib.Path(arguments.save_vllm), asking, drafting, report)
        if arguments.save_aiperf:
            dataset = f"speed_bench_{arguments.subset}"
            if arguments.dataset != "speed-bench":
                dataset = f"spec_al_{(arguments.dataset or '').replace('-', '')}"
            write_aiperf(pathlib.Path(arguments.save_aiperf), dataset, asking, drafting)
    if arguments.save and leader():
        text = json.dumps({**report, **measured}, indent=1)
        pathlib.Path(arguments.save).write_text(text + "\n")
    if arguments.plot and leader():
        plot.bench(measured).savefig(arguments.plot)
    if arguments.json:
        print(json.dumps({**report, **measured}))
    else:
        print_report(report, impossible, measured)
        print_categories(measured)


def _check_places(arguments: BenchOptions) -> None:
    """Raises ValueError if a file cannot be written after the measurement."""
    for name in ("save", "plot", "save_vllm"):
        file = getattr(arguments, name)
        if file is not None and not (folder := pathlib.Path(file).absolute().parent).is_dir():
            raise ValueError(f"--{name.replace('_', '-')} {file}: there is no folder {folder}")


def _prompts(target: specjax.LanguageModel, prompts: list[str], new: int) -> Work:
    def run(item: int, options: Options, thinking: str | None) -> list[specjax.Output]:
        return [specjax.generate(target, prompts[item], **options)]

    ids = encode(target, prompts)
    return Work(len(prompts), run, lambda role, model: check_length(role, model, ids, new), {})


def _questions(asking: Asking) -> Work:
    categories: dict[str, list[int]] = {}
    for item, question in enumerate(asking.questions):
        categories.setdefault(question.category, []).append(item)
    return Work(len(asking.questions), asking.ask, asking.check, categories)


def _temperatures(arguments: BenchOptions, target: specjax.LanguageModel) -> Sequence[float | None]:
    """Returns the temperatures: by default the target's, and 0 before it for a dataset."""
    if arguments.temperature or arguments.dataset is None:
        return arguments.temperature or (None,)
    own = target.settings()["temperature"]
    return (0.0, own) if own else (0.0,)


def _entries(
    arguments: BenchOptions, models: Models, drafted: Sequence[str], work: Work
) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Returns the rows to measure, and the pairs (proposer, rule) that cannot be combined.

    The first row of each temperature is plain decoding.  The kinds in `drafted` take the draft.

    Raises:
      ValueError: the target, the draft, the proposers, the rules and the prompts do not fit
        together; raised before anything is compiled.
    """
    target, undrafted_models = models.target, dataclasses.replace(models, draft=None)
    drafts = []
    work.check("target", target)
    for kind in dict.fromkeys(arguments.proposers):
        for numbers, branching in _variants(given(arguments), kind):
            gamma = number_of(numbers, "num_drafts")
            if isinstance(gamma, int) and gamma < 1:
                raise ValueError(
                    f"num_drafts={gamma}; it must be at least 1: plain decoding is measured anyway"
                )
            own = models if kind in drafted else undrafted_models
            drafter = on_demand(make_drafter(kind, own, numbers), False)
            if drafter.reader is not None:
                work.check("draft", drafter.reader)
            drafts.append(_Drafts(kind, drafter, branching))

    entries: list[Entry] = []
    impossible: dict[tuple[str, str], None] = {}  # a set that keeps its order
    rules = {name: make_rule(arguments, name) for name in dict.fromkeys(arguments.rules)}
    synthetic = arguments.synthetic()
    if synthetic is not None:
        if arguments.rules != ("match",):
            raise ValueError(
                f"--rules {' '.join(arguments.rules)} and synthetic acceptance both say which "
                "drafts are accepted: leave one of them out"
            )
        for each in drafts:
            synthetic.check_depth(each.drafter.proposer.max_depth)
        rules = {"synthetic": synthetic}
    plain = _Drafts("none", specjax.Drafter(specjax.NoProposer()), None)
    temperatures = _temperatures(arguments, target)
    kinds = list(itertools.product(temperatures, arguments.thinking or (None,)))
    for temperature, thinking in kinds:
        options: Options = {
            **arguments.sampled(target, temperature),
            **arguments.processing(target),
        }
        if synthetic is not None:  # texts end at their limit, whatever tokens were accepted
            options["eos"] = []
        used = target.settings(temperature=temperature)["temperature"]
        facts = _thinking(plain.facts("match", specjax.Match(), used), thinking)
        undrafted: Options = {**options, "drafter": plain.drafter}
        entries.append(Entry(work, undrafted, facts))
        for (name, rule), each in itertools.product(rules.items(), drafts):
            facts = _thinking(each.facts(name, rule, used), thinking)
            if rule.chain_only and not each.drafter.proposer.is_chain:
                impossible[label(facts), name] = None
            elif (each.kind, name) != ("none", "match"):
                how: Options = {**options, "drafter": each.drafter, "rule": rule}
                entries.append(Entry(work, how, facts))
    if len(entries) == len(kinds) and impossible:
        raise ValueError(
            f"--rules {' '.join(rules)} supports chains only, and --proposers "
            f"{' '.join(arguments.proposers)} proposes trees: use another rule, such as match, "
            "or a proposer of chains, such as draft"
        )
    return entries, list(impossible)


def _thinking(facts: Facts, thinking: str | None) -> Facts:
    """Adds to the facts whether the chat template's enable_thinking is on."""
    if thinking is not None:
        facts["thinking"] = thinking
    return facts


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


def _measure(
    entries: list[Entry], rounds: int, work: Work, scored: Asking | None = None
) -> Measured:
    first_calls(entries)
    take_turns(entries, rounds)
    rows, by_category, plain = [], list[Row](), entries[0]
    for entry in entries:
        if not entry.facts["drafted"] and entry.facts["rule"] == "match":
            plain = entry
        rows.append(_row(entry, plain, range(work.items), scored))
        for name, items in work.categories.items():
            by_category.append({**_row(entry, plain, items, scored), "category": name})
    return {
        "categories": by_category,
        "samples": sum(len(each) for entry in entries for each in entry.seconds),
        "dropped": sum(entry.dropped for entry in entries),
        "rows": rows,
    }


def _row(entry: Entry, plain: Entry, items: Sequence[int], scored: Asking | None) -> Row:
    """Returns the figures of an entry on these items, which are compared with plain decoding."""
    outputs = {item: entry.outputs[item] for item in items}
    stats = {item: [output.stats for output in each] for item, each in outputs.items()}
    # Speeds are compared on the prompts for which both rows have an undisturbed sample.
    clean = [n for n in items if entry.seconds[n] and plain.seconds[n]]
    seconds, before = (medians([e.seconds[n] for n in clean]) for e in (entry, plain))
    rate = interval([sum(s.tokens for s in stats[n]) for n in clean], seconds)
    speedup = interval(before, seconds)
    # Above temperature 0 only `match` promises the same tokens.
    comparable = entry.facts["rule"] == "match" or entry.facts["temperature"] == 0
    comparable = comparable and entry.facts["rule"] != "synthetic"
    same = sum(
        [o.tokens for o in each] == [o.tokens for o in plain.outputs[n]]
        for n, each in outputs.items()
    )
    each_prompt = [PromptCounts.from_summaries(summaries) for summaries in stats.values()]
    figures = alpha_and_tau(PromptCounts.summed(each_prompt))
    accepted, drafting = (
        [sum(getattr(s, name) for s in each) for each in stats.values()]
        for name in ("accepted", "drafting")
    )
    more = interval(accepted, drafting)
    made: Row = {
        **entry.facts,
        "prompts": len(items),
        "acceptance_length": None if more is None else (1 + more[0], 1 + more[1], 1 + more[2]),
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
    if scored is not None:
        right = [
            answers.score(scored.questions[n], each[-1].text[0], scored.chat)
            for n, each in outputs.items()
        ]
        made["accuracy"] = interval([bool(r) for r in right], [1] * len(right))
    return made
