"""tau of drafts from several seeds of training: counts on disk, ratios with intervals, a table."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from specjax.contract import Arrays
from specjax.decoding import Decoder
from specjax.files import load, read_json
from specjax.measure import measure
from specjax.methods import DraftModel
from specjax.models import LanguageModel, LinenModel
from specjax.rules import Match
from specjax.training.corpus import Tokens
from specjax.training.material import held_out_prompts
from specjax.training.mixture import Mixture
from specjax.training.record import write
from specjax.training.written import Written
from specjax.types import Params

_NAMES = ("emitted", "passes")

Counts = dict[str, list[int]]
"""New tokens (`emitted`) and passes of the target (`passes`) of each prompt."""
ByHeat = dict[str, Counts]
"""Counts at temperatures 0 and 1."""
Draft = Callable[[], tuple[LinenModel, Arrays]]
"""Makes a draft and its parameters."""


class Sizes(Protocol):
    """How tau is measured."""

    @property
    def prompts(self) -> int: ...

    @property
    def new_tokens(self) -> int: ...


def prompts_of(options: Sizes, text: Tokens | Mixture | Written | pathlib.Path) -> list[list[int]]:
    """Prompts of 32 tokens from the text that a run has held out, or from that in its folder."""
    if isinstance(text, pathlib.Path):
        text = Tokens(text / "corpus" / "held_out.bin")
    return held_out_prompts(text, options.prompts, 32 + options.new_tokens, 32, 32)


def counted(
    options: Sizes,
    result: pathlib.Path,
    target: LanguageModel,
    draft: Draft,
    prompts: list[list[int]],
) -> ByHeat:
    """New tokens and passes of each prompt at temperatures 0 and 1, as kept in `result`.

    `draft` returns a model and its parameters.
    """
    if result.exists():
        return read_json(result)
    model, params = draft()
    room = max(map(len, prompts)) + options.new_tokens + 4
    decoder = Decoder(
        target.model, DraftModel(model, target.model.vocab_size, 4), Match(), target.eos, room
    )
    found = {}
    for temperature in (0.0, 1.0):
        settings = {"temperature": temperature}
        counts = measure(
            decoder, Params(target.params, params), prompts, options.new_tokens,
            batch=min(8, len(prompts)), settings=settings, seed=0,
        ).counts  # fmt: skip
        found[str(temperature)] = {name: vars(counts)[name].tolist() for name in _NAMES}
    result.parent.mkdir(parents=True, exist_ok=True)
    write(result, json.dumps(found) + "\n")
    return found


def loaded(folder: pathlib.Path) -> Draft:
    """A draft in a folder, for `counted`."""

    def read() -> tuple[LinenModel, Arrays]:
        draft = load(folder, "float32")
        return draft.model, draft.params

    return read


def ratio(
    over: Sequence[Counts], under: Sequence[Counts] | None, seed: int = 0
) -> tuple[float, float, float]:
    """tau of several seeds, or its ratio to another tau, with an interval.

    A resample draws seeds and prompts with replacement.  Both sides have the same prompts; each has
    seeds of its own.
    """
    rng, size = np.random.default_rng(seed), len(over[0]["passes"])
    sides = [np.array([[one[name] for name in _NAMES] for one in over])]
    if under is not None:
        sides.append(np.array([[one[name] for name in _NAMES] for one in under]))

    def value(parts: list[np.ndarray]) -> float:
        taus = [part[:, 0].sum() / part[:, 1].sum() for part in parts]
        return taus[0] / taus[1] if len(taus) == 2 else taus[0]

    drawn = []
    for _ in range(2000):
        columns = rng.integers(size, size=size)
        rows = [rng.integers(len(side), size=len(side)) for side in sides]
        drawn.append(
            value([side[row][:, :, columns] for side, row in zip(sides, rows, strict=True)])
        )
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(value(sides)), float(low), float(high)


def table(
    title: str,
    rows: Mapping[str, Sequence[ByHeat]],
    bases: Sequence[str],
    more: Mapping[str, str],
) -> str:
    """Each row's tau at temperatures 0 and 1, and its ratio to the bases."""
    names = [
        f"{what} at {t}" for t in (0, 1) for what in ("tau", *(f"over {base}" for base in bases))
    ]
    lines = [
        f"| {title} | {' | '.join(names)} | seeds | seconds |",
        "|" + "---|" * (3 + len(names)),
    ]
    for name, found in rows.items():
        parts = []
        for heat in ("0.0", "1.0"):
            own = [one[heat] for one in found]
            parts.append(_words(ratio(own, None)))
            for base in bases:
                there = None if base not in rows else [one[heat] for one in rows[base]]
                same = there is None or base == name
                parts.append("" if same or there is None else _words(ratio(own, there)))
        lines.append(f"| {name} | {' | '.join(parts)} | {len(found)} | {more.get(name, '')} |")
    return "\n".join(lines)


def _words(found: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*found)
