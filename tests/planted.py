"""Plants every fault of the project, one after the other, and says which test finds it:

    python -m tests.planted
    python -m tests.planted --only constraints --only matchers

A fault is planted by the test that is meant to find it, which fails if it does not; so this runs
these tests by their node ids, and prints a line for each fault.  The exit status is 1 if a fault is
missed, or if no test plants it.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Collection, Sequence

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS / "core"), str(TESTS / "product")]


def _auditor() -> Collection[str]:
    import audit_campaign

    return audit_campaign.FAULTS


def _samples() -> Collection[str]:
    import distributions

    return distributions.WRONG


def _processors() -> Collection[str]:
    import processor_laws

    return processor_laws.FAULTS


def _constraints() -> Collection[str]:
    import constraint_laws

    return constraint_laws.FAULTS


def _matchers() -> Collection[str]:
    import guided_laws

    return guided_laws.FAULTS


def _properties() -> Collection[str]:
    import test_properties_faults

    return test_properties_faults.FAULTS


@dataclasses.dataclass(frozen=True)
class Suite:
    """Faults of one kind.

    Attributes:
      files: of a tier, with the tests that plant them.
      test: the name of these tests.
      parameter: of these tests, which names the fault.
      faults: returns the names of all; None if the tests themselves are the list.
    """

    files: tuple[str, ...]
    test: str
    parameter: str
    faults: Callable[[], Collection[str]] | None = None


SUITES = {
    "auditor": Suite(
        ("test_audit_faults.py", "test_audit_faults_alone.py", "test_audit_faults_steps.py",
         "test_audit_faults_targets.py"),
        "test_a_fault_is_found", "name", _auditor,
    ),
    "samples": Suite(
        ("test_distribution_policies.py",), "test_wrong_rules_are_caught", "mistake", _samples
    ),
    "processors": Suite(
        ("test_processor_faults.py",), "test_deliberate_faults_are_caught", "fault", _processors
    ),
    "constraints": Suite(
        ("test_constraint_laws.py",), "test_deliberate_faults_are_caught", "fault", _constraints
    ),
    "matchers": Suite(
        ("test_guided.py",), "test_deliberate_faults_are_caught", "fault", _matchers
    ),
    "properties": Suite(
        ("test_properties_faults.py",), "test_a_planted_fault_breaks_its_law", "name", _properties
    ),
    "models": Suite(("test_adapters.py",), "test_the_check_finds_what_is_wrong", "mistake"),
    "best first": Suite(("test_best_first.py",), "test_values_of_tokens_would_be_biased", "name"),
}  # fmt: skip


class Planted:
    """A plugin of pytest that runs the tests of some suites, and notes which fault each found."""

    def __init__(self, suites: dict[str, Suite]) -> None:
        self.suites = suites
        self.fault_of: dict[str, tuple[str, str]] = {}
        self.outcomes: dict[tuple[str, str], list[tuple[str, bool]]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept = []
        for item in items:
            for name, suite in self.suites.items():
                given = getattr(item, "callspec", None)
                if item.path.name in suite.files and item.originalname == suite.test and given:
                    self.fault_of[item.nodeid] = name, str(given.params[suite.parameter])
                    kept.append(item)
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """No dots among the lines."""
        return report.outcome, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            fault = self.fault_of[report.nodeid]
            self.outcomes.setdefault(fault, []).append((report.nodeid, report.passed))
            kind, name = fault
            word = "found" if report.passed else "MISSED"
            print(f"{word}  {kind}: {name}  by {report.nodeid}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SUITES, help="a kind of faults")
    asked = parser.parse_args(arguments)
    suites = {name: suite for name, suite in SUITES.items() if name in (asked.only or SUITES)}
    plugin = Planted(suites)
    names = [name for suite in suites.values() for name in suite.files]
    files = [str(path) for name in names for path in TESTS.glob(f"*/{name}")]
    options = ["-n", "0", "-p", "no:cacheprovider", "--no-header", "--no-summary", "-m", ""]
    status = pytest.main([*options, *files], plugins=[plugin])
    wanted = {
        (name, fault)
        for name, suite in suites.items()
        if suite.faults is not None
        for fault in suite.faults()
    }
    unplanted = sorted(wanted - set(plugin.outcomes))
    for kind, name in unplanted:
        print(f"MISSED  {kind}: {name}  no test plants it")
    missed = [
        fault for fault, runs in plugin.outcomes.items() if not all(passed for _, passed in runs)
    ]
    bare = [name for name in suites if not any(kind == name for kind, _ in plugin.outcomes)]
    for name in bare:
        print(f"MISSED  {name}: no test was run")
    count = len(plugin.outcomes) + len(unplanted)
    print(f"{count} faults, {len(missed) + len(unplanted)} missed")
    return int(bool(status or missed or unplanted or bare))


if __name__ == "__main__":
    sys.exit(main())
