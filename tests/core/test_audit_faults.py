"""The auditor finds each planted fault, by the check that is meant for it.

`python -m tests.audit_campaign --repeats 100` says how often.
"""

import audit_campaign
import pytest
from audit_campaign import CLEAN, FAULTS, SPEED, Case

from specjax import Match

FEWER = {"samples": 8192}
DISTRIBUTION = ("raw q reported", "siblings reversed", "penalties without drafted tokens")
FIRST = {case.check: name for name, case in reversed(FAULTS.items())}
"""The first fault of each check.  The other faults run the same checks, those of DISTRIBUTION
with the draft's logits, with a tree and with penalties."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in {*FIRST.values(), *DISTRIBUTION} else pytest.mark.slow
        )
        for name in FAULTS
    ],
)
def test_a_fault_is_found(name):
    case = FAULTS[name]
    report = case.audit(0, **FEWER)
    assert audit_campaign.found(case, report), str(report)
    assert not report.passed
    assert f"FAILED: {', '.join(report.failures)}" in str(report)
    if name in SPEED:  # then the texts are right
        assert set(report.failures) <= {"acceptance", "features"}


def test_a_fault_is_not_any_failure():
    """The campaign counts a fault as found only if the named check fails."""
    case = FAULTS["end of text behind the block"]
    report = case.audit(0, **FEWER)
    assert not audit_campaign.found(CLEAN["match"], report)
    assert not audit_campaign.found(Case(Match(), check="figures"), report)


@pytest.mark.parametrize(("check", "passes"), [("ends", True), ("greedy", False)])
def test_the_campaign_fails_if_a_fault_is_missed(check, passes, capsys, monkeypatch):
    """Its exit status is 0 only if every repeat fails the named check."""
    fault = FAULTS["end of text behind the block"]
    monkeypatch.setattr(audit_campaign, "SAMPLES", 8192)
    monkeypatch.setitem(FAULTS, "one", Case(fault.rule, decoder=fault.decoder, check=check))
    with pytest.raises(SystemExit) as exit_:
        audit_campaign.main(["--repeats", "1", "--only", "one"])
    assert bool(exit_.value.code) is not passes
    assert f"one: found by {check} {int(passes)} of 1" in capsys.readouterr().out
