"""python -m bench.adaptive: what is lost by choosing as one goes, against the best fixed setting.

The proposer `Adaptive` is run on texts whose acceptance is imposed: the draft of the token at a
position is right if a random number of that position is below the acceptance rate there.  The time
of a step comes from a model of costs instead of a clock, so the table is the same on every machine
and shows the choices alone:

    step = 1 + (k + 1) * batch * --token + k * c, in passes of the target over one token

for k drafts, whose draft model takes c passes each.  A draft model that was left out reads what it
missed, in chunks of 2 (depth + 1) tokens that cost c each.  A step is as dear as its deepest row.

Each cell compares the tokens/s of `Adaptive` with those of every fixed number of drafts on the same
texts.  The acceptance of a text is learned for the next one, as `generate` does.  The last rows are
texts that change: copied code, prose, then a list.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.command import Report, run
from specjax import Block, Proposal
from specjax.contract import Context, Proposer
from specjax.drafters import PRIOR, widths_of
from specjax.plot import new_figure
from specjax.proposers import MEASURED, Adaptive, AdaptiveParams
from specjax.tune import Learned
from specjax.types import ABSENT, Arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTH = 8
CHUNK = 2 * (DEPTH + 1)
CHANGES = ((0.95, 200), (0.15, 200), (0.7, 112))
"""Acceptance rates and lengths of the parts of a text that changes its nature."""


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


PROPOSER = Adaptive(None, Offers(), widths_of(DEPTH))


@functools.partial(jax.jit, static_argnums=0)
def decode(
    new: int,
    right: jax.Array,
    seconds: jax.Array,
    draft: jax.Array,
    prior: jax.Array,
    pause: jax.Array,
) -> tuple[Any, Any, Any]:
    """Decode B rows of `new` tokens.

    Args:
      new: tokens of each row.
      right: [B, new + DEPTH] bool, is the draft of the token at this position right?
      seconds: [O] of a step with each option; inf for options that are forbidden.
      draft: seconds of a pass of the draft model.
      prior, pause: [2], as in `AdaptiveParams`.

    Returns:
      The seconds of all steps, the steps with drafts as a share of all, and the last rates.
    """
    rows = len(right)
    params = AdaptiveParams(None, None, seconds, jnp.array(MEASURED, jnp.int32), prior, pause)
    depths = jnp.array([depth for _, depth in PROPOSER.options], jnp.int32)
    prompt = Block(jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1, 1)), jnp.ones(rows, int))
    state = PROPOSER.init(params, prompt, new + 2)

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
        _, state = PROPOSER.propose(params, state, context)
        offered = state.offered
        window = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (DEPTH,)))
        hits = jnp.cumprod(window(right, written), axis=1).sum(1)
        count = jnp.where(live, jnp.minimum(jnp.minimum(hits, offered) + 1, new - written), 0)
        tokens = jnp.zeros((rows, DEPTH + 1), jnp.int32)
        block = Block(tokens, tokens[..., None].astype(jnp.float32), count)
        state = PROPOSER.observe(params, state, block)
        deepest = offered.max()
        option = jnp.searchsorted(depths, deepest)
        late = jnp.where(deepest > 0, jnp.ceil(missed / CHUNK) * draft, 0.0)
        spent += seconds[option] + late
        missed = jnp.where(deepest > 0, 0, missed + count.max())
        return state, written + count, spent, missed, steps + 1, drafting + (deepest > 0)

    zero = jnp.zeros((), jnp.int32)
    carry = (state, jnp.zeros(rows, jnp.int32), jnp.float32(0), zero, zero, zero)
    state, _, spent, _, steps, drafting = jax.lax.while_loop(
        lambda carry: (carry[1] < new).any(), step, carry
    )
    assert state.drafter is not None
    return spent, drafting / steps, state.drafter.rates


def fixed(new: int, right: np.ndarray, depth: int, seconds: float) -> float:
    """Seconds of decoding with always `depth` drafts, by a loop over the positions."""
    written, spent = np.zeros(len(right), int), 0.0
    while (written < new).any():
        spent += seconds
        for row in np.flatnonzero(written < new):
            hits = right[row, written[row] : written[row] + depth]
            run = int(np.argmin(hits)) if not hits.all() else len(hits)
            written[row] += min(run + 1, new - written[row])
    return spent


def cell(batch: int, rates: np.ndarray, cost: float, token: float, seed: int) -> Report:
    """One cell, over several texts: acceptance by position [new], and the draft's cost."""
    new, texts = len(rates), max(1, 16 // batch)
    costs = [1 + (k + 1) * batch * token + k * cost for _, k in PROPOSER.options]
    seconds = np.array(costs, np.float32)
    rng, spent, best = np.random.default_rng(seed), 0.0, np.zeros(len(seconds))
    learned, shares = Learned(seconds, np.array(PRIOR), 0.0), []
    for _ in range(texts):
        coins = rng.random((batch, new + DEPTH))
        right = coins < np.pad(rates, (0, DEPTH), mode="edge")
        known = np.float32(learned.prior), np.int32(learned.pause)
        arrays = map(jnp.asarray, (right, seconds, np.float32(cost), *known))
        time, share, rates_ = decode(new, *arrays)
        learned.learn_rates(1, rates_)
        spent += float(time)
        shares.append(float(share))
        for index, (_, depth) in enumerate(PROPOSER.options):
            best[index] += fixed(new, right, depth, float(seconds[index]))
    fastest = int(best.argmin())
    return {
        "batch": batch,
        "acceptance": float(rates[0]) if len(set(rates)) == 1 else "changing",
        "draft_cost": cost,
        "best": PROPOSER.options[fastest][1],
        "over_best": float(best[fastest] / spent),
        "over_plain": float(best[0] / spent),
        "drafting": float(np.mean(shares)),
    }


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
    parser.add_argument("--seed", type=int, default=0)
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
    changing = np.concatenate([np.full(length, rate) for rate, length in CHANGES])
    texts = [np.full(arguments.new_tokens, alpha) for alpha in arguments.alpha] + [changing]
    cells = [
        cell(batch, rates, cost, arguments.token, arguments.seed)
        for batch in tqdm(arguments.batch, "batches")
        for rates in texts
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
        "| batch | acceptance | draft cost | best fixed | over the best | over plain | drafting |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c['batch']} | {c['acceptance']} | {c['draft_cost']:g} | {c['best'] or 'plain'} "
        f"| {c['over_best']:.3f} | {c['over_plain']:.3f} | {c['drafting']:.0%} |"
        for c in cells
    ]
    worst = min(cells, key=lambda c: c["over_best"])
    slowest = min(cells, key=lambda c: c["over_plain"])
    lines += [
        "",
        f"worst over the best fixed setting: {worst['over_best']:.3f} (batch {worst['batch']}, "
        f"acceptance {worst['acceptance']}, draft cost {worst['draft_cost']:g}); worst over plain: "
        f"{slowest['over_plain']:.3f}; cells below 0.98 of the best: "
        f"{sum(c['over_best'] < 0.98 for c in cells)} of {len(cells)}",
    ]
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
            steady = [c for c in mine if c["acceptance"] != "changing"]
            (line,) = axes.plot(
                [c["acceptance"] for c in steady], [c["over_best"] for c in steady],
                marker="o", label=f"draft cost {cost:g}",
            )  # fmt: skip
            for c in mine:
                if c["acceptance"] == "changing":
                    axes.axhline(c["over_best"], color=line.get_color(), linestyle=":")
        axes.axhline(0.98, color="grey", linewidth=0.8)
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("acceptance rate; dotted: texts that change")
    panels[0].set_ylabel("speed over the best fixed setting")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    run(main)
