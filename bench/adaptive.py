"""python -m bench.adaptive: what is lost by choosing as one goes, against the best fixed setting.

The proposer `Adaptive` is run on texts whose acceptance is imposed: the draft of the token at a
position is right if a random number of that position is below the acceptance rate there.  The time
of a step comes from a model of costs instead of a clock, so the table is the same on every machine
and shows the choices alone:

    step = 1 + (k + 1) * batch * --token + k * c, in passes of the target over one token

for k drafts, whose draft model takes c passes each.  A draft model that was left out reads what it
missed, in chunks of 2 (depth + 1) tokens that cost c each.  A step is as dear as its deepest row.

Each cell compares the tokens/s of `Adaptive` with those of every fixed option on the same texts.
The acceptance of a text is learned for the next one, as `generate` does.

The last rows are texts that change: copied code, prose, then a list.  Some have a draft model
alone, and some prompt lookup beside it.  Their bound is what somebody would reach who knew the best
fixed option of each part of the text, over the best single one.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.adaptive_model import ALONE, BOTH, Coins, Costs, Section, decode, fixed
from bench.command import Report, run
from specjax.drafters import PRIOR
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure
from specjax.proposers import Adaptive
from specjax.tuning import Learned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGES = (Section(200, 0.95), Section(200, 0.15), Section(112, 0.7))
BOTH_CHANGE = (
    Section(200, 0.7, lookup=0.95, found=0.95),  # copied code
    Section(200, 0.6, lookup=0.15, found=0.2),  # prose
    Section(112, 0.5, lookup=0.7, found=0.9),  # a list
)
"""Texts that change their nature, for a draft model alone and with prompt lookup beside it."""


def cell(
    proposer: Adaptive,
    batch: int,
    sections: Sequence[Section],
    cost: float,
    token: float,
    seed: int,
) -> Report:
    """One cell, over several texts."""
    costs, ends = Costs.of(proposer, batch, token, cost), np.cumsum([s.length for s in sections])
    rng, spent, shares = np.random.default_rng(seed), 0.0, []
    by_section = np.zeros((len(proposer.options), len(sections)))
    whole = np.zeros(len(proposer.options))
    learned = Learned(costs.options, np.array(PRIOR), 0.0)
    for _ in range(max(1, 16 // batch)):
        coins = Coins.toss(rng, batch, sections)
        known = np.float32(learned.prior), np.int32(learned.pause)
        time, share, state = decode(
            proposer, int(ends[-1]), *jax.tree.map(jnp.asarray, (coins, costs, *known))
        )
        learned.learn(SimpleNamespace(proposer=state))  # type: ignore[arg-type]
        spent += float(time)
        shares.append(float(share))
        for index, option in enumerate(proposer.options):
            whole[index] += fixed(option, coins, costs, 0, ends[-1])
            if len(sections) > 1:
                by_section[index] += [
                    fixed(option, coins, costs, end - each.length, end)
                    for each, end in zip(sections, ends, strict=True)
                ]
    fastest, steady = int(whole.argmin()), len(sections) == 1
    name, depth = proposer.options[fastest]
    kind = "changing" if proposer is ALONE else "changing, with lookup"
    return {
        "batch": batch,
        "acceptance": sections[0].drafter if steady else kind,
        "draft_cost": cost,
        "best": name if not depth else f"{depth}" if proposer is ALONE else f"{name} {depth}",
        "over_best": float(whole[fastest] / spent),
        "over_plain": float(whole[0] / spent),
        "bound": None if steady else float(whole[fastest] / by_section.min(0).sum()),
        "drafting": float(np.mean(shares)),
    }


def over_seeds(cells: Sequence[Report]) -> Report:
    """The same cell with several seeds: means, and the worst."""
    first = dict(cells[0])
    for name in ("over_best", "over_plain", "bound", "drafting"):
        if first[name] is not None:
            first[name] = float(np.mean([each[name] for each in cells]))
    first["best"] = " or ".join(sorted({each["best"] for each in cells}))
    for name in ("over_best", "over_plain"):
        first[f"worst_{name}"] = min(each[name] for each in cells)
    return first


@dataclasses.dataclass(frozen=True)
class AdaptiveOptions(fields.Options):
    """The options of `python -m bench.adaptive`."""

    batch: tuple[int, ...] = fields.option((1, 4, 16), "rows")
    alpha: tuple[float, ...] = fields.option((0.1, 0.3, 0.5, 0.7, 0.85, 0.95), "acceptance rates")
    draft_cost: tuple[float, ...] = fields.option(
        (0.02, 0.05, 0.1, 0.3), "passes of the target that a draft takes"
    )
    token: float = fields.option(
        0.01, "passes of the target that another token of a row adds to a pass"
    )
    new_tokens: int = fields.option(512, "tokens of a text")
    seed: tuple[int, ...] = fields.option((0,), "means over these")
    json: str | None = fields.option(None, "write the cells to this file")
    plot: str | None = fields.option(None, "draw the regret to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(AdaptiveOptions, argv, __doc__, "python -m bench.adaptive")
    for name, values in (("--alpha", arguments.alpha), ("--draft-cost", arguments.draft_cost)):
        if not all(0 <= value <= 1 for value in values):
            raise ValueError(f"{name} {' '.join(map(str, values))}; each must be in [0, 1]")
    if min(arguments.batch) < 1 or arguments.new_tokens < 1:
        raise ValueError("--batch and --new-tokens must be at least 1")
    if arguments.plot:
        new_figure()  # fails now, not after the table, if matplotlib is missing
    steady = [(ALONE, (Section(arguments.new_tokens, alpha),)) for alpha in arguments.alpha]
    cells = [
        over_seeds([cell(*text, cost, arguments.token, seed) for seed in arguments.seed])
        for batch in tqdm(arguments.batch, "batches")
        for text in [
            (proposer, batch, sections)
            for proposer, sections in [*steady, (ALONE, CHANGES), (BOTH, BOTH_CHANGE)]
        ]
        for cost in arguments.draft_cost
    ]
    print(table(cells))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=1) + "\n")
    if arguments.plot:
        draw(cells).savefig(arguments.plot)


def table(cells: list[Report]) -> str:
    """The cells as Markdown, and the worst of them."""
    lines = [
        "| batch | acceptance | draft cost | best fixed | over the best | bound | over plain "
        "| drafting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c['batch']} | {c['acceptance']} | {c['draft_cost']:g} | {c['best']} "
        f"| {c['over_best']:.3f} | {'' if c['bound'] is None else format(c['bound'], '.3f')} "
        f"| {c['over_plain']:.3f} | {c['drafting']:.0%} |"
        for c in cells
    ]
    lines.append("")
    for name, words in (("over_best", "the best fixed option"), ("over_plain", "plain decoding")):
        worst = min(cells, key=lambda c: c[f"worst_{name}"])
        lines.append(
            f"worst of all seeds over {words}: {worst[f'worst_{name}']:.3f} (batch "
            f"{worst['batch']}, acceptance {worst['acceptance']}, draft cost "
            f"{worst['draft_cost']:g}); cells with a mean below 0.98: "
            f"{sum(c[name] < 0.98 for c in cells)} of {len(cells)}, with a seed below: "
            f"{sum(c[f'worst_{name}'] < 0.98 for c in cells)}"
        )
    open_cells = [c for c in cells if c["bound"] is not None and c["bound"] >= 1.1]
    reached = sum(c["over_best"] >= 1.1 for c in open_cells)
    lines.append(
        f"texts that change whose bound is at least 1.1: {len(open_cells)}; {reached} reach it"
    )
    return "\n".join(lines)


def draw(cells: list[Report]) -> Figure:
    """Regret by acceptance rate; a panel for each batch, a line for each draft cost."""
    batches = list(dict.fromkeys(c["batch"] for c in cells))
    costs = list(dict.fromkeys(c["draft_cost"] for c in cells))
    figure = new_figure(1 + 4 * len(batches), 4)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for cost in costs:
            mine = [c for c in cells if (c["batch"], c["draft_cost"]) == (batch, cost)]
            steady = [c for c in mine if c["bound"] is None]
            (line,) = axes.plot(
                [c["acceptance"] for c in steady], [c["over_best"] for c in steady],
                marker="o", label=f"draft cost {cost:g}",
            )  # fmt: skip
            for c in mine:
                if c["bound"] is not None:
                    style = ":" if c["acceptance"] == "changing" else "--"
                    axes.axhline(c["over_best"], color=line.get_color(), linestyle=style)
        axes.axhline(0.98, color="grey", linewidth=0.8)
        axes.set_title(f"batch {batch}")
        axes.set_xlabel(
            "acceptance rate; lines: texts that change\n(dotted: no lookup, dashed: with lookup)"
        )
    panels[0].set_ylabel("speed over the best fixed setting")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    run(main)
