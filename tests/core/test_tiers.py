"""Core stays short: the costs that are written down keep its budget."""

import argparse
import json

import pytest
from tiers import BUDGETS, COSTS, HERE, share

COST = json.loads(COSTS.read_text())
FILES = {path.name for path in (HERE / "core").glob("test_*.py")}


def test_every_file_of_core_has_a_cost():
    """The laws over tables have groups of their own, which share programs."""
    for name in FILES:
        written = name in COST or name.startswith("test_laws_")
        assert written, f"no cost: run pytest -n 0 --write-costs tests/core/{name}"


def test_costs_are_of_files_that_exist():
    assert {name for name in COST if name.endswith(".py")} <= FILES


def test_a_share_is_a_number_below_their_count():
    assert share("0/20") == (0, 20) and share("19/20") == (19, 20)
    for wrong in ("20/20", "3", "-1/20", "3/", "a/b", "0/0"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}'; pass a number"):
            share(wrong)


def test_the_budget_is_kept():
    """What is beyond it goes to tests/product, of which each run takes a share."""
    assert sum(COST.values()) <= BUDGETS["core"]
