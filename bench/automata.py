"""`python -m bench.automata`: sizes and build times of constraints over vocabularies of some sizes.

The smallest vocabulary is the shipped one.  Larger ones are made of it by joining random pairs of
its tokens, so real ones differ.  Automata are built anew in each run, without the cache.
Grammars are not built into tables: for them the report has the time of a mask on the host, over
random texts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import tempfile
import time
from typing import Any

import numpy as np
import tokenizers

import specjax
from bench.command import run
from bench.constraints import SCHEMA
from specjax._internal.bit_masks import words_of
from specjax.constraints import Constraint, automaton_of, matchers_of
from specjax.measure import describe
from specjax.options import fields
from specjax.options.command import parse

_LONGEST = 16  # letters of a joined token
_TEXTS, _TOKENS = 8, 64  # of random texts
SCHEMAS: dict[str, Constraint] = {
    "the log line, with optional spaces": specjax.JSONSchema(SCHEMA),
    "three numbers": specjax.JSONSchema(
        {
            "type": "object",
            "properties": {name: {"type": "number"} for name in "xyz"},
            "required": list("xyz"),
        }
    ),
    "a list of objects with lists": specjax.JSONSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "tags": {"type": "array", "items": {"enum": ["new", "old", "sold out"]}},
                },
                "required": ["name", "tags"],
            },
        }
    ),
    "20 choices": specjax.Choice([f"option {n} of {20 * n}" for n in range(20)]),
    "two times and a UUID": specjax.JSONSchema(
        {
            "type": "object",
            "properties": {
                "from": {"type": "string", "format": "date-time"},
                "to": {"type": "string", "format": "date-time"},
                "id": {"type": "string", "format": "uuid"},
            },
            "required": ["from", "to", "id"],
        }
    ),
}
GRAMMARS = {
    "sums in brackets": specjax.Grammar(
        'start: term (("+" | "*") term)*\nterm: /[0-9]{1,9}/ | "(" start ")"\n'
    ),
    "a recursive schema": specjax.Grammar(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    ),
}


@dataclasses.dataclass(frozen=True)
class _Sized:
    vocab_size: int


def grown(target: specjax.LanguageModel, size: int) -> Any:
    """What constraints read of a target, with a vocabulary of `size` tokens."""
    assert target.tokenizer is not None
    fields, drawn = json.loads(target.tokenizer.to_str()), random.Random(0)
    words, merges = fields["model"]["vocab"], fields["model"]["merges"]
    parts = [word for word in words if not word.startswith("<|")]
    while len(words) < size:
        left, right = drawn.choice(parts), drawn.choice(parts)
        if left + right not in words and len(left + right) <= _LONGEST:
            words[left + right] = len(words)
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    made = tokenizers.Tokenizer.from_str(json.dumps(fields))
    model: Any = _Sized(max(size, len(words)))
    return dataclasses.replace(target, model=model, tokenizer=made)


def built(target: Any, constraint: Constraint) -> str:
    """The size of an automaton, and the seconds to build it."""
    started = time.perf_counter()
    made = automaton_of(target, constraint)
    seconds = time.perf_counter() - started
    states, classes = made.next.shape
    return f"{states} x {classes}, {made.next.nbytes / 1024:.0f} KiB, {seconds:.2f} s"


def walked(target: Any, grammar: Constraint) -> str:
    """The seconds until a grammar's first matcher, and the median and greatest time of a mask."""
    started = time.perf_counter()
    made, _ = matchers_of(target, grammar, [list(target.eos)])
    assert made is not None and made[0] is not None
    matcher = made[0]()
    seconds, masks, drawn = time.perf_counter() - started, [], np.random.default_rng(0)
    words = np.zeros(words_of(target.model.vocab_size), np.uint32)
    for _ in range(_TEXTS):
        count = 0
        for count in range(_TOKENS + 1):
            begun = time.perf_counter()
            matcher.allowed(words)
            masks.append(1e3 * (time.perf_counter() - begun))
            ways = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not ways.size or count == _TOKENS:
                break
            matcher.push(int(drawn.choice(ways)))
        for _ in range(count):
            matcher.pop()
    return f"{seconds:.2f} s, {np.median(masks):.2f} ms, {max(masks):.2f} ms"


@dataclasses.dataclass(frozen=True)
class AutomataOptions(fields.Options):
    """The options of `python -m bench.automata`."""

    sizes: tuple[int, ...] = fields.option((4096, 32_000, 152_000), "vocabulary sizes")


def main(argv: list[str] | None = None) -> None:
    sizes = parse(AutomataOptions, argv, __doc__, "python -m bench.automata").sizes
    shipped = specjax.load(
        pathlib.Path(specjax.__file__).parent.parent / "checkpoints" / "pycode" / "target"
    )
    targets = [grown(shipped, size) for size in sizes]
    head = describe()
    print(f"{head['device']}, {head['cores']} cores\n")
    kept = os.environ.get("SPECJAX_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPECJAX_CACHE"] = folder
        try:
            for title, rows, cell in (
                ("schema: states x classes, table, seconds", SCHEMAS, built),
                ("grammar: seconds, median and longest mask", GRAMMARS, walked),
            ):
                print(f"| {title} |" + "".join(f" {size} |" for size in sizes))
                print("|---|" + "---|" * len(sizes))
                for name, constraint in rows.items():
                    cells = [cell(target, constraint) for target in targets]
                    print(f"| {name} | {' | '.join(cells)} |", flush=True)
                print()
        finally:
            if kept is None:
                del os.environ["SPECJAX_CACHE"]
            else:
                os.environ["SPECJAX_CACHE"] = kept


if __name__ == "__main__":
    run(main)
