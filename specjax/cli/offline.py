"""`specjax generate --out FILE`: a text for each line of a file, by one process or by several."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from specjax._internal.checks import settle
from specjax.cli.generate_options import GenerateOptions
from specjax.generation import read_records
from specjax.options.models import choose, load_models, make_drafter
from specjax.options.speculation import given
from specjax.options.waiting import progress
from specjax.serve import Engine, RowWriter, ray_pool, write_texts
from specjax.training.dataset import model_hashes

_OWN = "own"
"""The name of the drafter in the engine."""

_LEFT_OUT = ("json", "colour", "plot", "draft_mesh", "coordinator", "logprobs")
"""Options that a file of texts has no place for."""

_OF_PLACES = {
    "out", "ray_workers", "slots", "capacity", "compare", "prompt_file", "prompt", "seed", "draft",
    "drafter", "proposer", "num_drafts", "mesh", "target",
}  # fmt: skip
"""Options on which no text depends, or whose values are looked at by themselves."""


def write_file(arguments: GenerateOptions, out: str) -> None:
    """Writes the file.

    Raises:
      ValueError: options that a file has no place for, or that an engine does not have.
    """
    workers = arguments.ray_workers
    settle(
        *(
            (getattr(arguments, name) is not None and getattr(arguments, name) is not False,
             f"--{name.replace('_', '-')} is not for a file of texts: leave it out, or --out")
            for name in _LEFT_OUT
        ),
        (arguments.rule != "match",
         f"--rule {arguments.rule}: a file of texts is written with the rule match; leave it out"),
        (workers is not None and workers < 1, f"--ray-workers {workers} must be at least 1"),
        (arguments.slots < 1, f"--slots {arguments.slots} must be at least 1"),
        (not pathlib.Path(out).absolute().parent.is_dir(),
         f"--out {out}: there is no folder {pathlib.Path(out).absolute().parent}"),
    )  # fmt: skip
    if arguments.prompt_file and not arguments.prompt:
        records = read_records(pathlib.Path(arguments.prompt_file))
    else:
        records = [(prompt, {}) for prompt in arguments.prompts()]
    rows = [
        {"row": fields.get("id", number), "prompt": _asked(arguments, prompt)}
        for number, (prompt, fields) in enumerate(records)
    ]
    make = functools.partial(writer_of, arguments)
    if workers is None:
        with progress("generating"):
            known = write_texts(pathlib.Path(out), rows, _run(arguments), make)
    else:
        with progress("generating"):
            known = write_texts(pathlib.Path(out), rows, _run(arguments), make, ray_pool(workers))
    print(f"wrote {out}: {len(rows)} texts, of which {known} were there", flush=True)


def _asked(arguments: GenerateOptions, prompt: Any) -> Any:
    chats = arguments.chat and isinstance(prompt, str)
    return [{"role": "user", "content": prompt}] if chats else prompt


def writer_of(arguments: GenerateOptions) -> RowWriter:
    """Returns what writes rows in a process, with models and an engine of its own."""
    kind = choose(arguments)
    models = load_models(arguments, [kind], devices=arguments.devices())
    target = models.target
    drafters = {_OWN: make_drafter(kind, models, given(arguments))}
    constraint = arguments.constraint()
    settings: dict[str, Any] = {
        **arguments.sampled(target, arguments.temperature), **arguments.processing(target),
    }  # fmt: skip
    if constraint is not None:
        settings["constraint"] = constraint
    engine = Engine(
        target, drafters, slots=arguments.slots, capacity=arguments.capacity,
        waiting=2 * arguments.slots,
        constraint_size=None if constraint is None else (1024, 512),
    )  # fmt: skip
    seed = settings.pop("seed")
    return RowWriter(engine, settings, seed)


def _run(arguments: GenerateOptions) -> str:
    """Returns a hash of what the texts depend on apart from their prompts."""
    fields = {
        name: value for name, value in dataclasses.asdict(arguments).items()
        if name not in _OF_PLACES
    }  # fmt: skip
    import specjax

    target = arguments.target or specjax.shipped("pycode/target")
    parts = {"settings": fields, "seed": arguments.seed, **model_hashes(target)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
