"""The three tiers of the tests as a pytest plugin: what each costs, and how a share is drawn.

    tests/core      what `pytest` runs: laws over tables, enumeration, refusals, front doors
    tests/product   parity with transformers, families, formats, real jobs, benchmarks, notebooks
    tests/process   subprocesses, meshes, kills, load, other versions, programs for a TPU

After a run it prints the seconds of CPU of each tier, and the files that cost most.  Where
`SPECJAX_TEST_BUDGET=1` is set, a run past its budget fails; elsewhere it says so, since computers
differ, and so does what else they do.  `tests/core/test_tiers.py` holds the costs that
`--write-costs` wrote to the budget, on every computer.  `--share 3/20` runs one of twenty shares of
what is collected, from 0/20 to 19/20.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import resource
import zlib

import pytest

HERE = pathlib.Path(__file__).parent
BUDGETS = {"core": 1440}
"""Seconds of CPU of a whole run of a tier, on two cores of the machines that CI runs on."""

COSTS = HERE / "costs.json"
"""Seconds of CPU of the groups of core, with which the longest are started first."""

START = "start"
"""The key of what no test took: imports and collection."""


def cpu() -> float:
    """Seconds of CPU of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def tier(path: pathlib.Path) -> str:
    """The tier of a file of tests."""
    return path.relative_to(HERE).parts[0]


def group(item: pytest.Item) -> str:
    """The tests that share compiled programs with a test: the group that it names, or its file."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else item.path.name


def unit(item: pytest.Item) -> str:
    """What a share takes or leaves as a whole: a named group, or a single test."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark and mark.args[0] != item.path.name else item.nodeid


def share(text: str) -> tuple[int, int]:
    """Returns the number of a share, and how many there are, of a text such as "3/20"."""
    number, _, shares = text.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and int(number) < int(shares)):
        raise argparse.ArgumentTypeError(f"{text!r}; pass a number and the shares, such as 3/20")
    return int(number), int(shares)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=share, help="run a share of the tests, from 0/N to N-1/N")
    parser.addoption(
        "--write-costs", action="store_true", help=f"write what this run took to {COSTS.name}"
    )


class Tiers:
    """Orders the tests, draws a share, and counts seconds of CPU by file."""

    def __init__(self, config: pytest.Config):
        self.config, self.spent = config, collections.Counter[str]()
        self.groups, self.seen = collections.Counter[str](), cpu()

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and before `slow` is left out
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if (drawn := config.getoption("--share")) is not None:
            number, shares = drawn
            kept = [item for item in items if zlib.crc32(unit(item).encode()) % shares == number]
            taken = set(kept)
            config.hook.pytest_deselected(items=[item for item in items if item not in taken])
            items[:] = kept
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.name))
        costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        items.sort(key=lambda item: -costs.get(group(item), 0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        before = cpu()
        self.spent[START] += before - self.seen
        result = yield
        self.seen = cpu()
        self.spent[str(item.path.relative_to(HERE))] += self.seen - before
        if tier(item.path) == "core":
            self.groups[group(item)] += self.seen - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:  # this process is a worker of xdist
            output["spent"], output["groups"] = dict(self.spent), dict(self.groups)
            return
        over = {name: self.total(name) for name in BUDGETS if self.total(name) > BUDGETS[name]}
        if over and os.environ.get("SPECJAX_TEST_BUDGET") == "1" and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.getoption("--write-costs"):
            costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
            costs |= {name: round(spent, 1) for name, spent in self.groups.items()}
            COSTS.write_text(json.dumps(dict(sorted(costs.items())), indent=1) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A worker of xdist has ended: `node.workeroutput` is what it counted."""
        output = getattr(node, "workeroutput", {})
        self.spent.update(output.get("spent", {}))
        self.groups.update(output.get("groups", {}))

    def total(self, name: str) -> float:
        """Seconds of CPU of a tier."""
        return sum(spent for file, spent in self.spent.items() if file.startswith(f"{name}/"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names = sorted({file.partition("/")[0] for file in self.spent} - {START})
        for name in names:
            budget = BUDGETS.get(name)
            more = f" of {budget}" if budget else ""
            over = " OVER BUDGET" if budget and self.total(name) > budget else ""
            terminalreporter.write_line(
                f"tests/{name}: {self.total(name):.0f} s of CPU{more}{over}", red=bool(over)
            )
        most = ", ".join(
            f"{file} {spent:.0f}" for file, spent in self.spent.most_common(9) if spent > 1
        )
        terminalreporter.write_line(f"most s of CPU: {most}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "tiers of tests")
