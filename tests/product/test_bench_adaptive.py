"""`bench.adaptive`: its decoding is a loop over positions, and its choices are near the best."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import adaptive
from specjax.drafters import PRIOR
from specjax.proposers import PAUSE

OPTIONS = [(adaptive.ALONE, index) for index in range(4)] + [(adaptive.BOTH, 1), (adaptive.BOTH, 3)]


@pytest.mark.parametrize(("proposer", "option"), OPTIONS)
def test_one_allowed_option_is_the_fixed_one(proposer, option):
    """The program and the loop over positions spend the same seconds on the same texts."""
    section = adaptive.Section(60, 0.6, lookup=0.8, found=0.4)
    coins = adaptive.Coins.toss(np.random.default_rng(option), 3, (section,))
    costs = adaptive.Costs.of(proposer, 3, 0.02, 0.25)
    allowed = np.full_like(costs.options, np.inf)
    allowed[option] = 1.5
    name, depth = proposer.options[option]
    if option:
        allowed[0] = 1e9  # no step without drafts
    spent, share, _ = adaptive.decode(
        proposer, 60, *jax.tree.map(jnp.asarray, (coins, costs.replace(options=allowed))),
        jnp.float32(PRIOR), jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip
    wanted = adaptive.fixed((name, depth), coins, costs, 0, 60)
    assert float(spent) == pytest.approx(wanted)
    if name == "lookup":
        assert 0.3 < float(share) < 1
    else:
        assert float(share) == (1.0 if depth else 0.0)


def test_the_bound_knows_the_best_of_each_section():
    """With a draft that is always right and then never, the best changes from 8 drafts to none."""
    sections = (adaptive.Section(90, 1.0), adaptive.Section(90, 0.0))
    made = adaptive.cell(adaptive.ALONE, 1, sections, 0.1, 0.0, 0)
    always, never = 10 * 1.8, 90 * 1.8
    best = min(always + never, 30 * 1.2 + 90 * 1.2, 18 * 1.4 + 90 * 1.4, 180)
    assert made["bound"] == pytest.approx(best / (always + 90), rel=1e-3)
    assert made["over_plain"] * best == pytest.approx(180 * made["over_best"], rel=1e-3)


def test_several_seeds_are_one_cell():
    """Their means, and the worst of them."""
    made = [
        {"best": str(k), "over_best": k, "over_plain": 2 * k, "bound": None, "drafting": 0.5}
        for k in (1.0, 0.5)
    ]
    assert adaptive.over_seeds(made) == {
        "best": "0.5 or 1.0", "over_best": 0.75, "over_plain": 1.5, "bound": None, "drafting": 0.5,
        "worst_over_best": 0.5, "worst_over_plain": 1.0,
    }  # fmt: skip


def test_the_command(tmp_path, capsys):
    """A clear case for drafts and one against: near the best of each, as figures and a plot."""
    cells, plot = tmp_path / "cells.json", tmp_path / "cells.png"
    adaptive.main(
        ["--batch", "2", "--alpha", "0.05", "0.95", "--draft-cost", "0.05", "--new-tokens", "256",
         "--json", str(cells), "--plot", str(plot)]
    )  # fmt: skip
    low, high, changing, both = json.loads(cells.read_text())
    assert low["best"] == "plain" and high["best"] == "8" and low["bound"] is None
    assert low["over_plain"] > 0.97 and low["drafting"] < 0.2
    assert high["over_best"] > 0.95 and high["over_plain"] > 2
    assert (changing["acceptance"], both["acceptance"]) == ("changing", "changing, with lookup")
    for text in (changing, both):
        assert text["over_plain"] > 1.2 and text["bound"] > 1
    assert "worst of all seeds over the best fixed option" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("wrong", [["--alpha", "1.5"], ["--draft-cost", "-1"], ["--batch", "0"]])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=wrong[0]):
        adaptive.main(wrong)
