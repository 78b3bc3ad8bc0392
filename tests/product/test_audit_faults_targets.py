"""The auditor finds each planted fault of a target."""

import pytest
from audit_faults import TARGETS, check_found, suspicions_are_cheap  # noqa: F401 - a fixture

pytestmark = pytest.mark.xdist_group("audit faults targets")  # a share takes all of them, or none


@pytest.mark.usefixtures("suspicions_are_cheap")
@pytest.mark.parametrize("name", TARGETS)
def test_a_fault_is_found(name):
    check_found(name)
