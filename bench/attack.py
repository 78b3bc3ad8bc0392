"""python -m bench.attack: how much longer the worst text takes than plain decoding.

Prompts can be made so that drafts are rejected (Speedbumps, arXiv 2610.10929).  Here an attacker
decides for each position of a text whether drafts are right there: never, at first, in turns, or
at random.  Some of these patterns pay for a while, so that `auto` drafts, and then stop.  The time
of a step is by the cost model of `bench.adaptive`.  For each cost of a draft the table has the
worst of all patterns, for drafting always and for `auto`, and for an `auto` whose earlier texts
went well.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bench.adaptive_model import ALONE, BOTH, DEPTH, Coins, Costs, decode, fixed
from bench.command import Report, run
from specjax.options import fields
from specjax.options.command import parse
from specjax.proposers import PAUSE

BOUND = 1.05
"""The most time of `auto`, over plain decoding, on any pattern."""

_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
_PRIORS = {"no texts before": (0.5, PAUSE), "earlier drafts were right": (0.95, 64)}


def patterns(new: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns bool [new + DEPTH] by name: are drafts right at this position?"""
    at, rng = np.arange(new + DEPTH), np.random.default_rng(seed)
    made = {"never right": at < 0}
    for length in _LENGTHS:
        made[f"right in the first {length}"] = at < length
    for right, wrong in itertools.product(_LENGTHS, _LENGTHS):
        made[f"{right} right, {wrong} wrong"] = at % (right + wrong) < right
    for rate in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        made[f"right at a rate of {rate}"] = rng.random(len(at)) < rate
    return made


def worst(new: int, draft: float, token: float, seed: int = 0) -> dict[str, tuple[float, str]]:
    """Returns the worst time over plain decoding, and its pattern, for each way to decode.

    Args:
      new: tokens of a text.
      draft: passes of the target that a draft takes.
      token: passes of the target that another token adds to a pass.
    """
    named = patterns(new, seed)
    names, right = list(named), np.stack(list(named.values()))
    found = {}
    # The lookup is right where the drafter is, and finds a match everywhere.
    coins = Coins(np.stack([right[:, None]] * 2, axis=1), np.ones((len(names), 1, right.shape[1])))
    coins = dataclasses.replace(coins, found=coins.found > 0)
    for kind, proposer in (("auto with a draft", ALONE), ("auto with lookup too", BOTH)):
        costs = Costs.of(proposer, 1, token, draft)
        for when, (prior, pause) in _PRIORS.items():
            known = np.full(2, prior, np.float32), np.full(2, pause, np.int32)

            def spend(own: Coins, known: tuple = known, proposer=proposer, costs=costs):
                return decode(proposer, new, own, jax.tree.map(jnp.asarray, costs), *known)[0]

            spent = np.asarray(jax.vmap(spend)(jax.tree.map(jnp.asarray, coins)))
            plain = new * float(costs.reading[0])
            index = int(spent.argmax())
            found[f"{kind}, {when}"] = float(spent[index]) / plain, names[index]
    costs = Costs.of(ALONE, 1, token, draft)
    for option in ALONE.options[1:]:
        each = [
            fixed(option, Coins(coins.right[n], coins.found[n]), costs, 0, new)
            for n in range(len(names))
        ]
        index = int(np.argmax(each))
        found[f"always {option[1]}"] = (
            float(each[index]) / (new * float(costs.reading[0])),
            names[index],
        )
    return found


@dataclasses.dataclass(frozen=True)
class AttackOptions(fields.Options):
    """The options of `python -m bench.attack`."""

    draft_cost: tuple[float, ...] = fields.option(
        (0.02, 0.05, 0.1, 0.3), "passes of the target that a draft takes"
    )
    token: float = fields.option(0.01, "passes of the target that another token adds to a pass")
    new_tokens: int = fields.count(512, "tokens of a text")
    json: str | None = fields.option(None, "write the figures to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(AttackOptions, argv, __doc__, "python -m bench.attack")
    cells: list[Report] = []
    print("| draft cost | way | worst time over plain | by the pattern |\n|---|---|---|---|")
    for cost in arguments.draft_cost:
        for way, (ratio, name) in worst(arguments.new_tokens, cost, arguments.token).items():
            cells.append({"draft_cost": cost, "way": way, "ratio": ratio, "pattern": name})
            print(f"| {cost:g} | {way} | {ratio:.3f} | {name} |")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
