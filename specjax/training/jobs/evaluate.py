"""specjax train evaluate: measure speculation with a target and a proposer on prompts.

alpha            acceptance rate: accepted drafts / verified drafts; drafts after a rejected one do
                 not count
alpha_by_depth   the same for each depth k, over the steps whose first k - 1 drafts were accepted
N                accepted drafts per pass of the target
tau              mean accepted length: new tokens per pass of the target.  This is N + 1, or less
                 where an EOS or a limit ends a step early.

Each figure has a 95 % interval from a bootstrap over prompts, and tokens/s over batches, whose
prompts are timed together.  A single prompt or batch has no interval.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from specjax.generation import encode_file
from specjax.measure import Measured, interval, measure
from specjax.models import LanguageModel
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, count, option
from specjax.parallel import leader
from specjax.training.curves import pyplot
from specjax.training.dataset import model_hashes
from specjax.training.record import versions
from specjax.training.speculation import SpeculationOptions, load_speculation


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(SpeculationOptions):
    """The models, the prompts, and the output files."""

    group = "measurement"

    prompts: str = option(REQUIRED, 'JSON lines, {"prompt": "..."} or {"messages": [...]}')
    limit_prompts: int = count(0, "use only this many first prompts; 0: all", 0)
    batch_size: int = count(1, "prompts decoded at once")
    out: str | None = option(None, "a .json file for the figures")
    plot: str | None = option(None, "a .png or .svg file for alpha by depth (needs matplotlib)")


Figure = tuple[float, float | None, float | None]
"""A value and the ends of its interval, which are None if there is no interval."""


class Figures(TypedDict):
    """The results, named as in the `--out` file; None where there was nothing to count."""

    alpha: Figure | None
    alpha_by_depth: list[Figure | None]
    accepted_per_pass: Figure | None
    tau: Figure | None
    tokens_per_second: Figure | None
    new_tokens: int
    target_passes: int


def summarise(measured: Measured) -> Figures:
    """Returns the figures of all prompts together."""
    c = measured.counts
    emitted, seconds = (np.bincount(measured.batch, x) for x in (c.emitted, measured.seconds))
    return {
        "alpha": figure(c.accepted.sum(1), c.tested.sum(1)),
        "alpha_by_depth": [figure(a, t) for a, t in zip(c.accepted.T, c.tested.T, strict=True)],
        "accepted_per_pass": figure(c.accepted.sum(1), c.passes),
        "tau": figure(c.emitted, c.passes),
        "tokens_per_second": figure(emitted, seconds),
        "new_tokens": int(c.emitted.sum()),
        "target_passes": int(c.passes.sum()),
    }


def figure(above: ArrayLike, below: ArrayLike) -> Figure | None:
    """Returns `measure.interval`, without ends for a single sample, which has no variance."""
    made = interval(above, below)
    return made if made is None or np.size(below) > 1 else (made[0], None, None)


def table(figures: Figures) -> str:
    """Returns the figures as Markdown."""

    def row(name: str, value: Figure | None, digits: int) -> str:
        if value is None:
            return f"| {name} | | |"
        if value[1] is None:
            return f"| {name} | {value[0]:.{digits}f} | none: a single sample |"
        middle, low, high = (f"{x:.{digits}f}" for x in value)
        return f"| {name} | {middle} | {low} to {high} |"

    lines = [row("acceptance rate (alpha)", figures["alpha"], 3)]
    for k, value in enumerate(figures["alpha_by_depth"], start=1):
        lines.append(row(f"alpha of draft {k}", value, 3))
    lines.append(row("accepted drafts per target pass (N)", figures["accepted_per_pass"], 2))
    lines.append(row("tokens per target pass (tau)", figures["tau"], 2))
    lines.append(row("tokens/s", figures["tokens_per_second"], 0))
    return "\n".join(["| | value | 95 % interval |", "|---|---|---|", *lines])


def plot(figures: Figures, path: str) -> None:
    """Draws alpha by depth."""
    plt = pyplot()
    points = [(k, *v) for k, v in enumerate(figures["alpha_by_depth"], start=1) if v is not None]
    depth, value, low, high = np.array(points, float).reshape(-1, 4).T
    drawing, panel = plt.subplots(figsize=(5, 3.2))
    ends = None if np.isnan(low).any() else [value - low, high - value]
    panel.errorbar(depth, value, yerr=ends, marker="o", capsize=3)
    panel.set(xlabel="depth of the draft", ylabel="alpha", ylim=(0, 1), xticks=depth)
    panel.grid(alpha=0.3)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def main(argv: list[str] | None = None) -> None:
    options = parse(EvaluateOptions, argv, __doc__)
    if options.plot is not None:
        pyplot()  # fails before the measurement if matplotlib is missing

    def read(target: LanguageModel) -> list[list[int]]:
        prompts = encode_file(target, pathlib.Path(options.prompts))
        return prompts[: options.limit_prompts or len(prompts)]

    _, decoder, params, prompts = load_speculation(options, read)
    rows = min(options.batch_size, len(prompts))

    def evaluate(prompts: list[list[int]]) -> Measured:
        return measure(
            decoder,
            params,
            prompts,
            options.max_new_tokens,
            batch=rows,
            settings=options.settings,
            seed=options.seed,
        )

    evaluate([max(prompts, key=len)] * rows)  # warm-up, which compiles
    figures = summarise(evaluate(prompts))
    print(table(figures), flush=True)
    if options.out is not None and leader():
        facts = {
            "options": dataclasses.asdict(options),
            "hashes": model_hashes(options.target, options.lora),
            "versions": versions(),
        }
        pathlib.Path(options.out).write_text(
            json.dumps({**figures, "prompts": len(prompts), **facts}, indent=2) + "\n"
        )
    if options.plot is not None and leader():
        plot(figures, options.plot)
