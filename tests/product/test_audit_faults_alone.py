"""The auditor finds each planted fault that needs a program of its own over a right target."""

import pytest
from audit_faults import OTHERS, check_found, suspicions_are_cheap  # noqa: F401 - a fixture

pytestmark = pytest.mark.xdist_group("audit faults alone")  # a share takes all of them, or none


@pytest.mark.usefixtures("suspicions_are_cheap")
@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_is_found(name):
    check_found(name)
