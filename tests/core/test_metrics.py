"""The figures of speculation against counting, closed forms and simulation."""

import json

import numpy as np
import pytest

from specjax.decoding.stats import (
    Summary,
    acceptance_rate,
    expected_accepted_length,
    expected_speedup,
    mean_accepted_length,
    summarize,
)
from specjax.types import Stats


def stats(target_passes, emitted, accepted, tested, proposed=0, drafting=0):
    counts = (target_passes, emitted, accepted, tested, proposed, drafting)
    return Stats(*(np.array(x, np.int32) for x in counts))


TWO_ROWS = stats([4, 6], [10, 9], [6, 3], [9, 9], [16, 24], [4, 5])
NOTHING = stats([0, 0], [0, 0], [0, 0], [0, 0], [0, 0])


def simulate(alpha, num_drafts, steps=200_000, seed=0):
    """Speculation in which each draft is right with probability alpha, independently."""
    right = np.random.default_rng(seed).random((steps, num_drafts)) < alpha
    accepted = np.cumprod(right, axis=1).sum(1)
    tested = np.minimum(accepted + 1, num_drafts)
    return stats(
        [steps], [(accepted + 1).sum()], [accepted.sum()], [tested.sum()], [steps * num_drafts]
    )


def test_acceptance_rate_pools_rows():
    """Accepted over tested drafts, each summed before the division."""
    assert acceptance_rate(TWO_ROWS) == 9 / 18


def test_acceptance_rate_of_nothing():
    """If nothing was tested there is no rate."""
    assert acceptance_rate(NOTHING) is None


def test_acceptance_rate_of_refusals():
    """If all drafts are rejected the rate is 0, not None."""
    assert acceptance_rate(stats([3], [3], [0], [3])) == 0.0


def test_mean_accepted_length_pools_rows():
    """New tokens over passes, each summed before the division."""
    assert mean_accepted_length(TWO_ROWS) == 19 / 10


def test_mean_accepted_length_of_nothing():
    """Without passes there is no length."""
    assert mean_accepted_length(NOTHING) == 0.0


def test_summary():
    """`summarize` sums over rows."""
    assert summarize(TWO_ROWS, 19, 2.0) == Summary(
        0.5, 1.9, 10, 19, accepted=9, tested=18, seconds=2.0, proposed=40, drafting=9
    )
    assert summarize(TWO_ROWS, 19, 2.0).acceptance_length == 1 + 9 / 9
    assert summarize(NOTHING, 0, 1.0).acceptance_length is None


def test_summary_is_json():
    """`to_json` holds every figure, and JSON can encode it."""
    decoded = json.loads(json.dumps(summarize(TWO_ROWS, 19, 2.0).to_json()))
    assert decoded == {
        "acceptance_rate": 0.5,
        "mean_accepted_length": 1.9,
        "target_passes": 10,
        "tokens": 19,
        "accepted": 9,
        "tested": 18,
        "seconds": 2.0,
        "compile_seconds": 0.0,
        "hit_rate": None,
        "expected_hit_rate": None,
        "proposed": 40,
        "drafting": 9,
        "tokens_per_second": 9.5,
    }


CASES = [(alpha, gamma) for alpha in (0.0, 0.3, 0.8, 0.95) for gamma in (1, 4, 9)]


@pytest.mark.parametrize(("alpha", "gamma"), CASES)
def test_expected_accepted_length_is_the_closed_form(alpha, gamma):
    """The closed form is (1 - alpha^(gamma+1)) / (1 - alpha)."""
    assert expected_accepted_length(alpha, gamma) == pytest.approx(
        (1 - alpha ** (gamma + 1)) / (1 - alpha)
    )


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_accepted_length_of_a_perfect_draft(gamma):
    """At alpha 1, where the closed form is 0 / 0, it is all drafts and the bonus token."""
    assert expected_accepted_length(1.0, gamma) == gamma + 1


@pytest.mark.parametrize(("alpha", "gamma"), CASES)
def test_metrics_of_a_simulation(alpha, gamma):
    """With independent acceptances, the measured alpha and tau are the expected ones."""
    simulated = simulate(alpha, gamma)
    assert acceptance_rate(simulated) == pytest.approx(alpha, abs=0.01)
    assert mean_accepted_length(simulated) == pytest.approx(
        expected_accepted_length(alpha, gamma), rel=0.02
    )


@pytest.mark.parametrize(("alpha", "gamma"), CASES)
@pytest.mark.parametrize("cost", [0.0, 0.1, 1.0])
def test_expected_speedup_is_a_ratio_of_times(alpha, gamma, cost):
    """Tokens of the simulation over the time of its target passes and of gamma draft passes
    before each."""
    simulated = simulate(alpha, gamma)
    steps = int(simulated.target_passes[0])
    plain, speculative = int(simulated.emitted[0]) * 1.0, steps * (1.0 + gamma * cost)
    assert expected_speedup(alpha, gamma, cost) == pytest.approx(plain / speculative, rel=0.02)


def test_expected_speedup_of_the_paper():
    """Leviathan et al. 2022, theorem 3.8: (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))."""
    assert expected_speedup(0.75, 7, 0.02) == pytest.approx((1 - 0.75**8) / (0.25 * 1.14))


def test_useless_draft_slows_down():
    """A draft that is never right still costs its passes."""
    assert expected_speedup(0.0, 4, 0.25) == pytest.approx(0.5)
