"""`specjax serve` offers OpenAI's API over HTTP, with speculation that each request chooses."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import os
import pathlib
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import specjax
from specjax._internal.checks import settle
from specjax.files import find_folder
from specjax.generation import plan_of
from specjax.methods import BoundDrafter
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.options.fields import Options, option
from specjax.options.models import DeviceOptions, ModelOptions, load_models
from specjax.options.processes import ProcessOptions
from specjax.options.synthetic import SyntheticOptions
from specjax.options.waiting import progress
from specjax.serve import (
    Engine,
    Fleet,
    ServerOptions,
    Slice,
    check_packages,
    check_traces,
    fleet_application,
    run_fleet,
    run_server,
)
from specjax.tuning import contexts_of

_KEY = "SPECJAX_API_KEY"


_TAKEN = ("draft", "mtp", "lookup", "medusa", "none", "auto")
"""Names that --drafter cannot give."""

_OF_FLEETS = (
    "most_replicas", "grow_after", "shrink_after", "slice", "router", "pin", "patience", "attempts",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ServedOptions(Options):
    """The models, of which requests choose a drafter by name."""

    group = "model"

    target: str | None = option(
        None, "folder of the target, or org/name on the Hub; default: the shipped target"
    )
    draft: str | None = option(
        None,
        'folder of a draft model, or org/name, for the drafter "draft"; default: the shipped '
        "draft, with the shipped target",
    )
    draft_window: int | None = option(
        None, "the draft model attends to so many of the last tokens only, and keeps no more"
    )
    drafter: tuple[str, ...] = option(
        (),
        "folder of a drafter that was trained for the target (EAGLE-3, DFlash, ...); repeat the "
        "option for more, each with a name",
        metavar="[NAME=]FOLDER",
        repeated=True,
    )
    adapter: tuple[str, ...] = option(
        (),
        'Medusa heads for the drafter "medusa", from which requests choose by name; repeat the '
        "option for more of the same sizes",
        metavar="NAME=FOLDER",
        repeated=True,
    )
    dtype: str | None = option(None, "float32, bfloat16, float16 or int4; default: as for generate")
    activations: str | None = option(None, "int8: as for generate")
    cache_dtype: str | None = option(None, "int8 or float8: as for generate")


@dataclasses.dataclass(frozen=True)
class DraftingOptions(SyntheticOptions):
    """The drafters that are offered, and the default."""

    group = "speculation"

    num_drafts: int | None = option(
        None, 'greatest depth of drafts of draft, mtp and lookup; default: 4, or by the plan',
        names=("--num-speculative-tokens",),
    )  # fmt: skip
    mtp: bool = option(False, 'offer the layer in the target\'s own folder, the drafter "mtp"')
    lookup: bool = option(True, 'leave out prompt lookup, the drafter "lookup"')
    default: str | None = option(
        None,
        'drafter of requests that name none, or two as "lookup+draft"; "none" is plain decoding, '
        '"auto" what a plan (specjax tune) says is fastest for so many slots, or plain decoding '
        "without a plan. Default: auto; if drafters or their numbers are given, the first of "
        "draft, mtp, those of --drafter, medusa, lookup",
        metavar="NAME",
    )


@dataclasses.dataclass(frozen=True)
class RoomOptions(Options):
    """The room for requests."""

    group = "room"

    slots: int = option(8, "requests that decode at once")
    capacity: int = option(2048, "tokens of a prompt with its output")
    cache_tokens: int | None = option(
        None, "tokens that all slots hold together, in pages; default: slots times capacity",
        metavar="N",
    )  # fmt: skip
    waiting: int = option(64, "requests that may wait for a slot")
    chunk: int = option(128, "tokens of a prompt that are read between two steps")
    logprobs: int = option(
        0, "record log-probabilities, and those of the N most probable tokens; -1 records none",
        metavar="N",
    )  # fmt: skip
    constraint_size: tuple[int, int] = option(
        (512, 256), "room for the automaton of a request's JSON schema; 0 0 refuses schemas",
        metavar="STATES CLASSES",
    )  # fmt: skip
    expected: int | None = option(
        None, "most drafts of a step from the text that a request expects or resumes; 0 for none; "
        "default: as deep as the drafters", metavar="N",
    )  # fmt: skip
    max_body: int = option(4 * 2**20, "bytes of a request")
    max_texts: int = option(16, "texts of a request")


@dataclasses.dataclass(frozen=True)
class FleetOptions(Options):
    """The replicas, if there are several, and how they stop."""

    group = "fleet"

    replicas: int | None = option(
        None, "serve with so many engines, each in a process, by Ray Serve; streams of one that "
        "dies go on at another", metavar="N",
    )  # fmt: skip
    most_replicas: int | None = option(
        None, "replicas at most; their number follows the requests; default: as many as --replicas",
        metavar="N",
    )  # fmt: skip
    grow_after: float = option(
        30.0, "seconds that more requests run and wait than there are slots, until there is a "
        "replica more", metavar="SECONDS",
    )  # fmt: skip
    shrink_after: float = option(
        600.0, "seconds that fewer replicas would do, until there is one less", metavar="SECONDS"
    )
    slice: str | None = option(
        None, "TPU slice of each replica, as v6e:4x4; its engine runs on all hosts of the slice",
        metavar="VERSION:TOPOLOGY",
    )  # fmt: skip
    router: str = option(
        "prefix", "how a request finds a replica: prefix prefers the one that has read the "
        "beginning of its prompt, spread the shorter queue", choices=("prefix", "spread"),
    )  # fmt: skip
    pin: bool = option(False, "bind replica k to core k")
    patience: float = option(
        120.0, "seconds that a request waits for a replica while none serves; then it gets 503",
        metavar="SECONDS",
    )  # fmt: skip
    attempts: int = option(
        8, "replicas that may end at a request in a row, without a new token; then it gets 503",
        metavar="N",
    )  # fmt: skip
    otlp_traces_endpoint: str | None = option(
        None, "collector of OpenTelemetry that gets a span for each text", metavar="URL"
    )
    drain: float = option(300.0, "seconds to finish accepted requests after SIGTERM")


@dataclasses.dataclass(frozen=True)
class ServeOptions(
    FleetOptions, RoomOptions, ProcessOptions, DeviceOptions, DraftingOptions, ServedOptions
):
    """The options of `specjax serve`."""

    group = "address"

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "0 takes any free port")
    admin: bool = option(
        False, "let a trainer pause the server, abort requests, release memory, and give it the "
        "weights of a folder of this machine",
    )  # fmt: skip
    api_key: str | None = option(
        None, f"requests have to send this key; default: the variable {_KEY}"
    )


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(ServeOptions, argv, prog=prog)
    _check(arguments)
    check_packages()
    key = _key(arguments)
    if arguments.host not in ("127.0.0.1", "::1", "localhost") and key is None:
        say(f"specjax serve: {arguments.host} may be open to others; --api-key sets a key")
    if arguments.replicas is not None:
        _run_fleet(arguments, key)
        return
    with progress("compiling"):
        engine = engine_of(arguments)
    options = ServerOptions(
        arguments.host, arguments.port, key, arguments.max_body, arguments.max_texts,
        arguments.drain, arguments.otlp_traces_endpoint, arguments.admin,
    )  # fmt: skip
    if engine.follows:  # it ends with process 0, which finishes its texts after SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.follow()
        return
    gc.collect()  # what was compiled stays: a collection would look at it, for up to 0.2 s
    gc.freeze()
    offered = ", ".join(["none", *(part.name for part in engine.drafters)])
    run_server(
        engine,
        options,
        lambda host, port: print(
            f"serving {engine.target.name} with the drafters {offered} on http://{host}:{port}",
            flush=True,
        ),
    )


def _check(arguments: ServeOptions) -> None:
    """Raises ValueError for options that cannot be, before anything is loaded."""
    drafters = [_named("drafter", text, "drafter") for text in arguments.drafter]
    for text in arguments.adapter:
        _named("adapter", text, None)
    port, names = arguments.port, [name for name, _ in drafters]
    alone, replicas = arguments.replicas is None, arguments.replicas or 1
    own = {field.name: field.default for field in dataclasses.fields(FleetOptions)}
    fleets = [
        name.replace("_", "-") for name in _OF_FLEETS if getattr(arguments, name) != own[name]
    ]
    most = replicas if arguments.most_replicas is None else arguments.most_replicas
    numbers = {
        "--max-body": arguments.max_body, "--max-texts": arguments.max_texts,
        "--slots": arguments.slots, "--replicas": 1 if alone else arguments.replicas,
        **({} if alone else {"--waiting": arguments.waiting, "--attempts": arguments.attempts}),
    }  # fmt: skip
    settle(
        (not 0 <= port <= 65535, f"--port {port} is not allowed; it must be 0 to 65535"),
        *(
            (
                names.count(name) > 1 or name in _TAKEN,
                f"--drafter {name}=... is taken: give each drafter another name",
            )
            for name in dict.fromkeys(names)
        ),
        *(
            (value < 1, f"{name} {value} is not allowed; it must be at least 1")
            for name, value in numbers.items()
        ),
        (
            alone and bool(fleets),
            f"--{', --'.join(fleets)} {'is' if len(fleets) == 1 else 'are'} of a fleet: add "
            "--replicas 2",
        ),
        (
            not alone and most < replicas,
            f"--most-replicas {most} is below --replicas {replicas}: pass {replicas} or more",
        ),
        (
            not alone and arguments.admin,
            "--admin is not for a fleet, of which a request reaches one replica: leave it out",
        ),
        (
            not alone and arguments.coordinator is not None,
            "--replicas starts processes that know nothing of each other, and --coordinator is of "
            "processes that share one model: leave one of them out",
        ),
        *(
            (
                not 0 <= value < math.inf,
                f"--{name} {value:g} is not allowed; it must be at least 0",
            )
            for name, value in (
                ("drain", arguments.drain),
                ("patience", arguments.patience),
                ("grow-after", arguments.grow_after),
                ("shrink-after", arguments.shrink_after),
            )
        ),
    )
    _slice(arguments.slice)
    if arguments.otlp_traces_endpoint is not None:
        check_traces(arguments.otlp_traces_endpoint)


def _key(arguments: ServeOptions) -> str | None:
    return arguments.api_key or os.environ.get(_KEY) or None


def fleet_of(given: Mapping[str, str]) -> Any:
    """Returns the application of Ray Serve for a cluster's file: `specjax.cli.serve:fleet_of`.

    Args:
      given: `options`, those of `specjax serve`, on one line.

    Raises:
      ValueError: there are no `options`, or they cannot be.
    """
    settle((
        "options" not in given,
        f"the arguments of the application are {sorted(given)}: pass options, those of specjax "
        "serve on one line",
    ))  # fmt: skip
    arguments = parse(ServeOptions, shlex.split(given["options"]), prog="specjax serve")
    _check(arguments)
    return fleet_application(_fleet(arguments, _key(arguments)))


def _slice(text: str | None) -> Slice | None:
    if text is None:
        return None
    version, separator, topology = text.partition(":")
    if not separator:
        raise ValueError(f"--slice {text}; it must look like v6e:4x4")
    return Slice(version, topology)


def _fleet(arguments: ServeOptions, key: str | None) -> Fleet:
    return Fleet(
        functools.partial(engine_of, arguments), arguments.replicas or 1, arguments.most_replicas,
        grow=arguments.grow_after, shrink=arguments.shrink_after, slots=arguments.slots,
        queue=arguments.waiting, drain=arguments.drain, patience=arguments.patience,
        attempts=arguments.attempts, router=arguments.router, slice=_slice(arguments.slice),
        pin=arguments.pin, api_key=key, body=arguments.max_body, texts=arguments.max_texts,
        traces=arguments.otlp_traces_endpoint,
    )  # fmt: skip


def _run_fleet(arguments: ServeOptions, key: str | None) -> None:
    for folder in (arguments.target, arguments.draft):
        if folder is not None:
            find_folder(folder)  # a replica that does not find it would be started again and again
    settle((
        arguments.slice is not None and not os.environ.get("RAY_ADDRESS"),
        f"--slice {arguments.slice} is of a cluster with TPUs: set RAY_ADDRESS to it, or name the "
        "options in the cluster's file, as examples/fleet/kuberay.yaml does",
    ))  # fmt: skip
    fleet = _fleet(arguments, key)
    say(f"specjax serve: starting {fleet.replicas} replicas, which compile their programs")
    run_fleet(
        fleet, arguments.host, arguments.port,
        lambda address: print(f"{fleet.replicas} replicas serve on {address}", flush=True),
    )  # fmt: skip


def engine_of(arguments: ServeOptions) -> Engine:
    """Returns the engine of these options.

    Raises:
      ValueError: options that do not go together, or with these models.
    """
    drafters = [_named("drafter", text, "drafter") for text in arguments.drafter]
    adapters = [_named("adapter", text, None) for text in arguments.adapter]
    drafted = arguments.draft is not None or arguments.target is None
    named = ModelOptions(
        arguments.target,
        arguments.draft,
        draft_window=arguments.draft_window,
        dtype=arguments.dtype,
        activations=arguments.activations,
        cache_dtype=arguments.cache_dtype,
    )
    kinds = ["draft"] if drafted else ["ngram"]
    keeps, devices = not arguments.admin, arguments.devices()
    models = load_models(named, kinds, devices=devices, keep_bfloat16=keeps)
    target, draft = models.target, models.draft
    first = arguments.default
    numbered = arguments.num_drafts is not None  # 0 is a number, too
    chosen = any((numbered, arguments.mtp, not arguments.lookup, drafters, adapters))
    if first == "auto" and chosen:
        raise ValueError(
            "--default auto chooses among lookup, a draft model and plain decoding, and how deep: "
            "leave --drafter, --adapter, --mtp, --no-lookup and --num-drafts out, or name a default"
        )
    limits = None
    if first == "auto" or (first is None and not chosen and arguments.draft is None):
        loaded, first = by_plan(target, draft, arguments.slots)
        limits = limits_by_plan(target, draft, arguments.slots, arguments.capacity, loaded)
    else:
        loaded = _given(arguments, target, draft, drafters, adapters)
        words = [] if first in (None, "none") else first.split("+")
        if not set(words) <= set(loaded):
            raise ValueError(f"--default {first}: there are {', '.join(loaded)}, and none")
        loaded = {word: loaded[word] for word in (*words, *loaded)}
    synthetic = arguments.synthetic()
    size = arguments.constraint_size if synthetic is None else (0, 0)
    expected = arguments.expected
    if expected is None and synthetic is None:
        expected = min(254, max([0, *(part.proposer.max_depth for part in loaded.values())]))
    if synthetic is not None:
        say(f"specjax serve: {synthetic} accepts drafts whatever they are: texts are worthless")
    return Engine(
        target,
        loaded,
        slots=arguments.slots,
        capacity=arguments.capacity,
        waiting=arguments.waiting,
        chunk=arguments.chunk,
        logprobs=None if arguments.logprobs < 0 else arguments.logprobs,
        default=first,
        constraint_size=size if any(size) else None,
        cache_tokens=arguments.cache_tokens,
        expected=expected or None,
        drafts_by_context=limits,
        synthetic_acceptance=synthetic,
    )


def _given(
    arguments: ServeOptions,
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel | None,
    drafters: Sequence[tuple[str, pathlib.Path | str]],
    adapters: Sequence[tuple[str, pathlib.Path | str]],
) -> dict[str, specjax.Drafter]:
    """Returns the drafters of the options, by name."""
    depth = 4 if arguments.num_drafts is None else arguments.num_drafts
    loaded: dict[str, specjax.Drafter] = {}
    if draft is not None:
        loaded["draft"] = specjax.make_drafter(target, draft, num_drafts=depth)
    if arguments.mtp:
        loaded["mtp"] = specjax.load_mtp(target, specjax.Chain, num_drafts=depth)
    for name, folder in drafters:
        loaded[name] = specjax.load_drafter(folder, target)
    if adapters:
        heads = {name: specjax.load_medusa(folder, target) for name, folder in adapters}
        loaded["medusa"] = specjax.MedusaBank.create(heads)
    if arguments.lookup:
        loaded["lookup"] = BoundDrafter(specjax.NGram(depth))
    return loaded


def by_plan(
    target: specjax.LanguageModel, draft: specjax.LanguageModel | None, slots: int
) -> tuple[dict[str, specjax.Drafter], str | None]:
    """Returns the drafters and the default that a saved plan found to be fastest.

    There are none if drafts do not pay, or without a plan: a default must not be slower than plain
    decoding, and every drafter of an engine makes all of its passes wider.
    """
    if not target.model.reads_trees:
        return {}, None
    temperature = target.defaults.get("temperature", 1.0)  # as for a request that names none
    plan = plan_of(target, draft, batch=slots, temperature=temperature)
    name, depth = ("plain", 0) if plan is None else plan.fixed()
    if not depth:
        known = "there is no plan for" if plan is None else "by the plan, drafts do not pay with"
        tuning = f"specjax tune --batch {slots} --temperature {temperature:g} --prompt-file FILE"
        say(
            f"specjax serve: {known} {slots} slots and these weights here, so requests decode "
            f"plainly. `{tuning}` makes a plan from prompts like yours; --default lookup or draft "
            "drafts in any case"
        )
        return {}, None
    loaded: dict[str, specjax.Drafter] = {"lookup": BoundDrafter(specjax.NGram(depth))}
    if name == "lookup":
        return loaded, "lookup"
    if draft is None:  # the plan's drafter is the target's own layer
        loaded["mtp"] = specjax.load_mtp(target, specjax.Chain, num_drafts=depth)
        return loaded, "lookup+mtp"
    loaded["draft"] = specjax.make_drafter(target, draft, num_drafts=depth)
    return loaded, "lookup+draft"


def limits_by_plan(
    target: specjax.LanguageModel, draft: specjax.LanguageModel | None, slots: int, capacity: int,
    loaded: Mapping[str, specjax.Drafter],
) -> dict[str, dict[int, int]]:  # fmt: skip
    """Returns the most drafts of each drafter by context, from the saved plans of longer texts.

    Without a plan for a context, that of the next longer one counts.  A drafter that once lost does
    not draft in longer texts, since it has not read them.
    """
    limits: dict[str, dict[int, int]] = {name: {} for name in loaded}
    temperature = target.defaults.get("temperature", 1.0)
    for context in contexts_of(capacity) if loaded else ():
        plan = plan_of(target, draft, batch=slots, temperature=temperature, context=context)
        if plan is None:
            continue
        name, depth = plan.fixed()
        for each, table in limits.items():
            uses = depth if each == "lookup" or name == "drafter" else 0
            table[context] = min([uses, *([0] if 0 in table.values() else [])])
    return {name: table for name, table in limits.items() if len(table) > 1}


def _named(option: str, text: str, default: str | None) -> tuple[str, pathlib.Path | str]:
    """Returns the name and the folder of NAME=FOLDER."""
    name, separator, folder = text.partition("=")
    if not separator and default is not None:
        return default, text
    if not separator or not name or not folder:
        raise ValueError(f"--{option} {text}; it must look like name=folder")
    return name, folder
