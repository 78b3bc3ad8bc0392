"""The auditor finds each planted fault that needs a program of its own."""

import dataclasses

import audit_campaign
import faults
import pytest
from audit_campaign import FAULTS, ROWS, SOURCE, SPEED

from specjax.proposers import StaticTree

SMALLER = {
    "flat mask on a tree": StaticTree(SOURCE, (2, 1)),
    "siblings reversed": faults.ReversedSiblings(SOURCE, (3,)),
}
"""Trees that compile faster than those of the campaign."""


@pytest.mark.parametrize("name", [name for name, case in FAULTS.items() if not case.shares])
def test_a_fault_is_found(name):
    case = FAULTS[name]
    case = dataclasses.replace(case, proposer=SMALLER.get(name, case.proposer))
    report = case.audit(0, samples=4096 if case.check == "distribution" else ROWS)
    assert audit_campaign.found(case, report), str(report)
    assert not report.passed
    if name in SPEED:  # then the texts are right
        assert set(report.failures) <= {"acceptance", "features"}
