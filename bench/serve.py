"""python -m bench.serve: an engine beside one request after the other and static batches.

    requests     prompts of a file, each with its own number of new tokens; nobody ends early
    one by one   specjax.generate for each of them, plain and with the draft model
    static       specjax.generate for `--slots` of them at once, until the longest has ended
    offline      the same, but all of them equally long: no row is ever idle
    engine       as many clients as slots, each sending its next request when its last one has ended
    transformers `generate_batch`, its continuous batching, with --peer (needs torch)

All contestants take turns, `--rounds` times, and the table has medians.  A token is counted once it
was asked for, so idle rows of a static batch count nothing.  Every other turn goes backwards, and
an engine is divided by the offline batch of the same turn, so what slows the machine for a while
slows both; behind the table stand the medians of these ratios with 95 % intervals.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import specjax
from bench.command import Report, run
from bench.prompts import SHIPPED
from specjax.generation import encode_file
from specjax.methods import BoundDrafter, Drafter
from specjax.options import fields
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.serve import Engine

Work = list[tuple[list[int], int]]
"""Prompts, and how many new tokens each one asks for."""


@dataclasses.dataclass
class Taken:
    """What one turn of a contestant took."""

    seconds: float
    tokens: int
    first: list[float] = dataclasses.field(default_factory=list)  # until the first token
    between: list[float] = dataclasses.field(default_factory=list)  # two pieces of a text
    host: float | None = None  # the host's share, of an engine


def main(argv: list[str] | None = None) -> None:
    arguments = parse(ServeOptions, argv, (__doc__ or "").split("\n")[0], "python -m bench.serve")
    for name in ("requests", "rounds", "slots", "num_drafts"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    report = measure(arguments)
    print(table(report))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1))


@dataclasses.dataclass(frozen=True)
class ServeOptions(fields.Options):
    """The options of `python -m bench.serve`."""

    target: str = fields.option(str(SHIPPED.parent / "target"), "folder of the target")
    draft: str = fields.option(str(SHIPPED.parent / "draft"), "folder of the draft")
    prompt_file: str = fields.option(str(SHIPPED), "file of the prompts")
    dtype: str | None = fields.option(None, "type of the weights")
    requests: int = fields.option(32, "number of requests")
    prompt_length: int = fields.option(96, "the last tokens of a prompt")
    new_tokens: tuple[int, int] = fields.option((16, 128), "tokens of a text")
    slots: int = fields.option(8, "requests that are decoded at once")
    num_drafts: int = fields.option(4, "draft tokens per step")
    temperature: float = fields.option(0.0, "sampling temperature; 0 is greedy")
    rounds: int = fields.option(3, "measured turns")
    cache_tokens: int | None = fields.option(
        None, "also engines with pages for N tokens", metavar="N"
    )
    only: str | None = fields.option(
        None, "only contestants that have this in their names, as offline", metavar="WORDS"
    )
    peer: bool = fields.option(False, "transformers' continuous batching, too")
    json: str | None = fields.option(None, "write the report to this file")


def measure(arguments: ServeOptions) -> Report:
    """The report of the chosen contestants."""
    chosen = contestants(arguments)
    target = specjax.load(arguments.target, arguments.dtype)
    draft = specjax.load(arguments.draft, arguments.dtype)
    drafter = specjax.make_drafter(target, draft, num_drafts=arguments.num_drafts)
    work = requests(arguments, target)
    longest = max(len(prompt) for prompt, _ in work) + arguments.new_tokens[1]
    room: dict[str, Any] = {"slots": arguments.slots, "capacity": longest, "waiting": len(work)}
    lookup = BoundDrafter(specjax.NGram(arguments.num_drafts))
    with contextlib.ExitStack() as stack:
        engines = {
            "bare": stack.enter_context(Engine(target, **room)),
            "drafting": stack.enter_context(
                Engine(target, {"draft": drafter, "lookup": lookup}, **room)
            ),
        }
        if arguments.cache_tokens is not None:
            pages = {**room, "cache_tokens": arguments.cache_tokens}
            engines["bare, pages"] = stack.enter_context(Engine(target, **pages))
            engines["drafting, pages"] = stack.enter_context(
                Engine(target, {"draft": drafter}, **pages)
            )
        even = [(prompt, arguments.new_tokens[1]) for prompt, _ in work]
        even = even[: len(even) // arguments.slots * arguments.slots]
        drafters: dict[str, Drafter | None] = {"none": None, "draft": drafter, "lookup": lookup}
        contests: dict[str, Callable[[], Taken]] = {}
        for name, one in chosen.items():
            asked = even if one.even else work
            if one.peer:
                contests[name] = batched(arguments, work)
            elif one.engine is None:
                contests[name] = generated(
                    arguments, target, asked, one.rows, drafters[one.drafter]
                )
            else:
                contests[name] = served(arguments, engines[one.engine], asked, one.drafter)
        turns: dict[str, list[Taken]] = {name: [] for name in contests}
        for turn in range(arguments.rounds + 1):
            for name in contests if turn % 2 else reversed(contests):
                say(f"turn {turn} of {arguments.rounds}: {name}")
                taken = contests[name]()
                if turn:  # the first turn compiles
                    turns[name].append(taken)
            if not turn:  # a full collection looks at all that was compiled, in anybody's turn
                gc.collect()
                gc.freeze()
        gc.unfreeze()
    rows = [row(name, taken) for name, taken in turns.items()]
    shares = {
        name: share(taken, turns[f"offline, {name.split(', ')[-1]}"])
        for name, taken in turns.items()
        if "as offline" in name and f"offline, {name.split(', ')[-1]}" in turns
    }
    given = {k: str(v) for k, v in vars(arguments).items()}
    return {"arguments": given, "rows": rows, "shares": shares}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Who does the work, and which."""

    drafter: str = "none"
    rows: int = 1  # at a time, of `specjax.generate`
    engine: str | None = None  # which one, in the place of `specjax.generate`
    even: bool = False  # all texts are equally long
    peer: bool = False  # transformers


def contestants(arguments: ServeOptions) -> dict[str, Contestant]:
    """Returns the contestants by name, in the order of the table.

    Raises:
      ValueError: none of them has the words of `only` in its name.
    """
    slots, paged = arguments.slots, arguments.cache_tokens is not None
    found = {
        "one by one, plain": Contestant(),
        "one by one, draft": Contestant("draft"),
        "static batches, plain": Contestant("none", slots),
        "static batches, draft": Contestant("draft", slots),
        "engine without drafters": Contestant(engine="bare"),
        "engine, none": Contestant(engine="drafting"),
        "engine, lookup": Contestant("lookup", engine="drafting"),
        "engine, draft": Contestant("draft", engine="drafting"),
    }
    if paged:
        found |= {
            "engine with pages, without drafters": Contestant(engine="bare, pages"),
            "engine with pages, draft": Contestant("draft", engine="drafting, pages"),
        }
    if arguments.requests >= slots:
        for name, drafter, engine in (
            ("plain", "none", "bare"), ("draft", "draft", "drafting"),
            ("lookup", "lookup", "drafting"),
        ):  # fmt: skip
            found[f"offline, {name}"] = Contestant(drafter, slots, even=True)
            found[f"engine, as offline, {name}"] = Contestant(drafter, engine=engine, even=True)
        for name, drafter, engine in (("plain", "none", "bare"), ("draft", "draft", "drafting")):
            if paged:
                found[f"engine with pages, as offline, {name}"] = Contestant(
                    drafter, engine=f"{engine}, pages", even=True
                )
    if arguments.peer:
        found["transformers, generate_batch"] = Contestant(peer=True)
    named = {name: one for name, one in found.items() if (arguments.only or "") in name}
    if not named:
        raise ValueError(f"--only {arguments.only}: there are {'; '.join(found)}")
    return named


def requests(arguments: ServeOptions, target: specjax.LanguageModel) -> Work:
    prompts = encode_file(target, pathlib.Path(arguments.prompt_file))
    drawn = np.random.default_rng(0)
    least, most = arguments.new_tokens
    if not 1 <= least <= most:
        raise ValueError(f"--new-tokens {least} {most}; pass the least and the most, from 1 on")
    chosen = itertools.islice(itertools.cycle(prompts), arguments.requests)
    return [
        (prompt[-arguments.prompt_length :], int(drawn.integers(least, most + 1)))
        for prompt in chosen
    ]


def generated(
    arguments: ServeOptions,
    target: specjax.LanguageModel,
    work: Work,
    rows: int,
    drafter: Drafter | None,
) -> Callable[[], Taken]:
    """`specjax.generate` for `rows` requests at a time."""
    how: dict[str, Any] = {"proposer": "none"} if drafter is None else {"drafter": drafter}
    most = max(new for _, new in work)

    def contest() -> Taken:
        began, tokens = time.perf_counter(), 0
        for at in range(0, len(work), rows):
            part = work[at : at + rows]
            # One shape for all batches: the last one is filled up, and alone a text may be shorter.
            filled = (part * rows)[:rows]
            new = most if rows > 1 else part[0][1]
            specjax.generate(
                target, [prompt for prompt, _ in filled], max_new_tokens=new, eos=[],
                temperature=arguments.temperature, **how,
            )  # fmt: skip
            tokens += sum(new for _, new in part)
        return Taken(time.perf_counter() - began, tokens)

    return contest


def served(
    arguments: ServeOptions, engine: Engine, work: Work, drafter: str
) -> Callable[[], Taken]:
    """An engine with as many clients as slots."""

    def client(index: int) -> tuple[float, list[float], int]:
        prompt, new = work[index]
        began = time.perf_counter()
        handle = engine.submit(
            specjax.Request(
                prompts=[prompt], max_new_tokens=new, eos=[], proposer=drafter,
                temperature=arguments.temperature, seed=index,
            )
        )  # fmt: skip
        moments, count = [], 0
        for increment in handle:
            if increment.tokens:
                moments.append(time.perf_counter())
                count += len(increment.tokens)
        between = [after - before for before, after in itertools.pairwise(moments)]
        return moments[0] - began, between, count

    def contest() -> Taken:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(arguments.slots) as pool:
            made = list(pool.map(client, range(len(work))))
        seconds = time.perf_counter() - began
        between = [gap for _, gaps, _ in made for gap in gaps]
        tokens = sum(count for *_, count in made)
        first = [first for first, *_ in made]
        return Taken(seconds, tokens, first, between, engine.load().host_share)

    return contest


def batched(arguments: ServeOptions, work: Work) -> Callable[[], Taken]:
    """transformers' continuous batching on the same weights; all texts get the longest length."""
    import torch
    import transformers

    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.target, dtype=getattr(torch, arguments.dtype or "float32"),
        attn_implementation="sdpa",
    )  # fmt: skip
    model.generation_config.eos_token_id = -1
    model.generation_config.do_sample = arguments.temperature > 0

    def contest() -> Taken:
        began = time.perf_counter()
        tokens = 0
        # It takes one length for all texts of a call.  The manager stays, so that the turns after
        # the first one do not start it again.
        made = model.generate_batch(
            [prompt for prompt, _ in work],
            max_new_tokens=max(new for _, new in work),
            persistent_manager=True,
        )
        for (_, new), output in zip(work, made.values(), strict=True):
            tokens += min(new, len(output.generated_tokens))
        return Taken(time.perf_counter() - began, tokens)

    return contest


def row(name: str, taken: list[Taken]) -> Report:
    """Medians over turns; percentiles over all requests of all turns."""
    first = [second for one in taken for second in one.first]
    between = [second for one in taken for second in one.between]

    def at(seconds: list[float], percent: float) -> float | None:
        return 1e3 * float(np.percentile(seconds, percent)) if seconds else None

    hosts = [one.host for one in taken if one.host is not None]
    return {
        "contestant": name,
        "tokens_per_second": float(np.median([one.tokens / one.seconds for one in taken])),
        "first_p50_ms": at(first, 50),
        "first_p99_ms": at(first, 99),
        "between_p50_ms": at(between, 50),
        "between_p99_ms": at(between, 99),
        "host_share": float(np.median(hosts)) if hosts else None,
    }


def share(engine: list[Taken], offline: list[Taken]) -> tuple[float, float, float]:
    """The median, over turns, of an engine's tokens a second in those of the offline batch.

    Returns:
      It, and the ends of its 95 % interval, by a bootstrap of turns.
    """
    pairs = zip(engine, offline, strict=True)
    ratios = np.array([a.tokens / a.seconds / (b.tokens / b.seconds) for a, b in pairs])
    drawn = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def table(report: Report) -> str:
    lines = [
        "| | tokens/s | first token, ms, p50 | p99 | between pieces, ms, p50 | p99 | host |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in report["rows"]:
        cells = [f"{entry['tokens_per_second']:.1f}"]
        for name in ("first_p50_ms", "first_p99_ms", "between_p50_ms", "between_p99_ms"):
            cells.append("" if entry[name] is None else f"{entry[name]:.1f}")
        share = entry["host_share"]
        cells.append("" if share is None else f"{share:.3f}")
        lines.append(f"| {entry['contestant']} | {' | '.join(cells)} |")
    for name, (middle, low, high) in report.get("shares", {}).items():
        lines.append(f"{name}: {middle:.2f} of the offline batch ({low:.2f} to {high:.2f})")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
