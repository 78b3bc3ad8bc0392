"""`bench.adaptive`: its decoding is a loop over positions, and its choices are near the best."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench import adaptive
from specjax.drafters import PRIOR
from specjax.proposers import PAUSE


@pytest.mark.parametrize("option", range(len(adaptive.PROPOSER.options)))
def test_one_allowed_option_is_the_fixed_setting(option):
    """The program and the loop over positions spend the same seconds on the same texts."""
    rng = np.random.default_rng(option)
    right = rng.random((3, 60 + adaptive.DEPTH)) < 0.6
    depth = adaptive.PROPOSER.options[option][1]
    seconds = np.full(len(adaptive.PROPOSER.options), np.inf, np.float32)
    seconds[option] = 1.5
    if option:
        seconds[0] = 1e9  # no step without drafts
    spent, share, _ = adaptive.decode(
        60, jnp.asarray(right), jnp.asarray(seconds), jnp.float32(0), jnp.float32(PRIOR),
        jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip
    assert float(spent) == pytest.approx(adaptive.fixed(60, right, depth, 1.5))
    assert float(share) == (1.0 if depth else 0.0)


def test_the_command(tmp_path, capsys):
    """A clear case for drafts and one against: near the best of each, as figures and a plot."""
    cells, plot = tmp_path / "cells.json", tmp_path / "cells.png"
    adaptive.main(
        ["--batch", "2", "--alpha", "0.05", "0.95", "--draft-cost", "0.05", "--new-tokens", "256",
         "--json", str(cells), "--plot", str(plot)]
    )  # fmt: skip
    low, high, changing = json.loads(cells.read_text())
    assert low["best"] == 0 and high["best"] == 8 and changing["acceptance"] == "changing"
    assert low["over_plain"] > 0.97 and low["drafting"] < 0.2
    assert high["over_best"] > 0.95 and high["over_plain"] > 2
    assert changing["over_plain"] > 1.2
    assert "worst over the best fixed setting" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("wrong", [["--alpha", "1.5"], ["--draft-cost", "-1"], ["--batch", "0"]])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=wrong[0]):
        adaptive.main(wrong)
