"""Core stays short: the costs that are written down keep its budget."""

import json

from tiers import BUDGETS, COSTS, HERE

COST = json.loads(COSTS.read_text())
FILES = {path.name for path in (HERE / "core").glob("test_*.py")}


def test_every_file_of_core_has_a_cost():
    """The laws over tables have groups of their own, which share programs."""
    for name in FILES:
        written = name in COST or name.startswith("test_laws_")
        assert written, f"no cost: run pytest -n 0 --write-costs tests/core/{name}"


def test_costs_are_of_files_that_exist():
    assert {name for name in COST if name.endswith(".py")} <= FILES


def test_the_budget_is_kept():
    """What is beyond it goes to tests/product, of which each run takes a tenth."""
    assert sum(COST.values()) <= BUDGETS["core"]
