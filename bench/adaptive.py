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

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from tqdm import tqdm

from bench.command import Report, run
from specjax import Block, Proposal
from specjax.contract import Context, Proposer
from specjax.drafters import PRIOR, widths_of
from specjax.plot import new_figure
from specjax.proposers import MEASURED, Adaptive, AdaptiveParams
from specjax.proposers.sources import AT_ONCE
from specjax.tune import Learned
from specjax.types import ABSENT, Arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTH = 8
CHUNK = AT_ONCE * (DEPTH + 1)
WIDTHS = widths_of(DEPTH)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a text: acceptance rates, and how often the lookup finds a match."""

    length: int
    drafter: float
    lookup: float = 0.0
    found: float = 0.0


CHANGES = (Section(200, 0.95), Section(200, 0.15), Section(112, 0.7))
BOTH_CHANGE = (
    Section(200, 0.7, lookup=0.95, found=0.95),  # copied code
    Section(200, 0.6, lookup=0.15, found=0.2),  # prose
    Section(112, 0.5, lookup=0.7, found=0.9),  # a list
)
"""Texts that change their nature, for a draft model alone and with prompt lookup beside it."""


@dataclasses.dataclass(frozen=True)
class Offers(Proposer):
    """As many drafts as it is asked for; what they are does not matter."""

    num_nodes: int = DEPTH + 1
    max_depth: int = DEPTH
    is_chain = True
    point_mass = True
    resumes = True

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return ()

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        tokens = jnp.broadcast_to(context.pending[:, None], (len(context.pending), self.num_nodes))
        index = jnp.arange(self.num_nodes)
        depth = self.max_depth if context.depth is None else context.depth
        parent = jnp.where((index > 0) & (index <= depth), index - 1, ABSENT)
        parent = jnp.broadcast_to(parent, tokens.shape).astype(jnp.int32)
        return Proposal(tokens, parent, point_mass=True), state

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return state

    def rest(self, state: Arrays) -> Arrays:
        return state

    def resume(
        self, params: Arrays, state: Arrays, text: Arrays, length: Arrays, wanted: Arrays
    ) -> Arrays:
        return state


@dataclasses.dataclass(frozen=True)
class Finds(Offers):
    """Drafts where there is a match: its parameters are [B, L] bool, its state the position [B]."""

    resumes = False

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return jnp.zeros(len(prompt.count), jnp.int32)

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        made, _ = super().propose(None, (), context)
        found = jnp.take_along_axis(params, state[:, None], axis=1)
        return dataclasses.replace(made, parent=jnp.where(found, made.parent, ABSENT)), state

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return state + block.count


ALONE = Adaptive(None, Offers(), WIDTHS)
BOTH = Adaptive(Finds(), Offers(), WIDTHS)


@struct.dataclass
class Coins:
    """What decides about the drafts of B texts, the same for every way to decode them."""

    right: Any  # [2, B, L] bool: would the draft of lookup, drafter for this position be right?
    found: Any  # [B, L] bool: does the lookup find a match here?

    @classmethod
    def toss(cls, rng: np.random.Generator, batch: int, sections: Sequence[Section]) -> Coins:
        """Those of texts of these sections, with DEPTH positions behind their end."""
        lengths = [each.length for each in sections]
        lengths[-1] += DEPTH

        def rate(name: str) -> np.ndarray:
            return np.repeat([getattr(each, name) for each in sections], lengths)

        right = [rng.random((batch, sum(lengths))) < rate(name) for name in ("drafter", "lookup")]
        found = rng.random((batch, sum(lengths))) < rate("found")
        return cls(np.stack(right[::-1]), found)


@struct.dataclass
class Costs:
    """What a step costs, in any unit."""

    options: Any  # [O] as the proposer expects it; inf for options that are forbidden
    reading: Any  # [W] of a pass of the target, for each of `WIDTHS`
    draft: Any  # [] of a pass of the draft model

    @classmethod
    def of(cls, proposer: Adaptive, batch: int, token: float, draft: float) -> Costs:
        """By the model of costs."""
        reading = np.array([1 + width * batch * token for width in WIDTHS], np.float32)
        options = [
            reading[WIDTHS.index(depth + 1)] + (name == "drafter") * depth * draft
            for name, depth in proposer.options
        ]
        return cls(np.array(options, np.float32), reading, np.float32(draft))


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode(
    proposer: Adaptive, new: int, coins: Coins, costs: Costs, prior: jax.Array, pause: jax.Array
) -> tuple[Any, Any, Any]:
    """Decode B rows of `new` tokens.

    Args:
      proposer: `ALONE` or `BOTH`.
      new: tokens of each row.
      coins, costs: of the texts and of a step.
      prior, pause: [2], as in `AdaptiveParams`.

    Returns:
      The seconds of all steps, the steps with drafts as a share of all, and the last state.
    """
    rows = coins.found.shape[0]
    params = AdaptiveParams(
        coins.found, None, costs.options, jnp.array(MEASURED, jnp.int32), prior, pause
    )
    prompt = Block(jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1, 1)), jnp.ones(rows, int))
    state = proposer.init(params, prompt, new + 2)

    def step(carry: Any) -> Any:
        state, written, spent, missed, steps, drafting = carry
        live = written < new
        context = Context(
            pending=jnp.zeros(rows, jnp.int32),
            draw=None,  # type: ignore[arg-type]
            warp=None,  # type: ignore[arg-type]
            shared_noise=True,
            wants_logits=False,
            cache=None,  # type: ignore[arg-type]
            num_drafts=jnp.where(live, DEPTH, 0),
            remaining=new - written,
            text_is_fixed=True,
        )
        _, state = proposer.propose(params, state, context)
        offered = state.offered
        window = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (DEPTH,)))
        right = jnp.where(state.drafted[:, None], coins.right[1], coins.right[0])
        hits = jnp.cumprod(window(right, written), axis=1).sum(1)
        count = jnp.where(live, jnp.minimum(jnp.minimum(hits, offered) + 1, new - written), 0)
        tokens = jnp.zeros((rows, DEPTH + 1), jnp.int32)
        block = Block(tokens, tokens[..., None].astype(jnp.float32), count)
        state = proposer.observe(params, state, block)
        passes = jnp.where(state.drafted, offered, 0).max()
        width = jnp.searchsorted(jnp.array(WIDTHS), offered.max() + 1)
        late = jnp.where(passes > 0, jnp.ceil(missed / CHUNK), 0.0)
        spent += costs.reading[width] + (passes + late) * costs.draft
        missed = jnp.where(passes > 0, 0, missed + count.max())
        return state, written + count, spent, missed, steps + 1, drafting + (offered.max() > 0)

    zero = jnp.zeros((), jnp.int32)
    carry = (state, jnp.zeros(rows, jnp.int32), jnp.float32(0), zero, zero, zero)
    state, _, spent, _, steps, drafting = jax.lax.while_loop(
        lambda carry: (carry[1] < new).any(), step, carry
    )
    return spent, drafting / steps, state


def fixed(option: tuple[str, int], coins: Coins, costs: Costs, start: int, end: int) -> float:
    """Seconds of decoding the positions from start to end with one option, by a loop over steps."""
    name, depth = option
    right = coins.right[1 if name == "drafter" else 0]
    runs = np.zeros((len(right), right.shape[1] + 1), int)  # right drafts in a row from a position
    for at in range(right.shape[1] - 1, -1, -1):
        runs[:, at] = np.where(right[:, at], runs[:, at + 1] + 1, 0)
    written, rows, spent = np.full(len(right), start), np.arange(len(right)), 0.0
    while (written < end).any():
        offered = np.where(written < end, depth, 0)
        if name == "lookup":
            offered = offered * coins.found[rows, written]
        spent += costs.reading[WIDTHS.index(offered.max() + 1)]
        spent += (name == "drafter") * depth * costs.draft
        written = np.minimum(written + np.minimum(runs[rows, written], offered) + 1, end)
    return spent


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adaptive", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="rows")
    parser.add_argument(
        "--alpha", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.85, 0.95],
        help="acceptance rates",
    )  # fmt: skip
    parser.add_argument(
        "--draft-cost", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.3],
        help="passes of the target that a draft takes",
    )  # fmt: skip
    parser.add_argument(
        "--token", type=float, default=0.01,
        help="passes of the target that another token of a row adds to a pass",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of a text")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="means over these")
    parser.add_argument("--json", help="write the cells to this file")
    parser.add_argument("--plot", help="draw the regret to this file")
    arguments = parser.parse_args(argv)
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
