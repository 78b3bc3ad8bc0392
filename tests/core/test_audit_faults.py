"""The auditor finds each planted fault of a rule or a chain, by the check that is meant for it.

Which rule or chain is wrong is data here, so that many faults share a program.  The other
`test_audit_faults_*.py` have the other faults, and `python -m tests.audit_campaign --repeats 100`
says how often each is found.
"""

import pytest
from audit_faults import DRAWS, check_found, suspicions_are_cheap  # noqa: F401 - a fixture


@pytest.mark.usefixtures("suspicions_are_cheap")
@pytest.mark.parametrize("name", DRAWS)
def test_a_fault_is_found(name):
    check_found(name)
