"""Costs that are measured choose the widths of `generate`; `tests/core/test_cost_aware.py` has the
choice."""

import dataclasses

from toys import TRANSFORMERS as toys

import specjax

INNER = toys.CASES["best first"]


def test_costs_are_measured_and_used():
    """One number for each width, ascending, and a drafter that `generate` takes."""
    target = specjax.LanguageModel(toys.model(), toys.weights(), name="toy")
    drafter = specjax.Drafter(INNER[0], INNER[1], name="heads")
    config = dataclasses.replace(toys.model().module.config, max_positions=256)
    model = specjax.LinenModel(specjax.Transformer(config))
    long = specjax.LanguageModel(model, toys.weights(), name="toy")
    costs = specjax.step_costs(long, drafter, (1, 4, 9), rounds=1)
    assert list(costs) == [1, 4, 9]
    assert 0 < costs[1] <= costs[4] <= costs[9]
    aware = specjax.cost_aware(drafter, {1: 1.0, 4: 1.01, 9: 50.0})
    prompts = [[1, 2, 3], [4, 5]]
    wanted = specjax.generate(target, prompts, max_new_tokens=12)
    for one in (aware, drafter):
        assert specjax.generate(target, prompts, max_new_tokens=12, drafter=one).tokens == (
            wanted.tokens
        )
    few = specjax.generate(target, prompts, max_new_tokens=12, drafter=aware).stats
    many = specjax.generate(target, prompts, max_new_tokens=12, drafter=drafter).stats
    assert few.tested < many.tested
