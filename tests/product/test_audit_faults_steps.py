"""The auditor finds each planted fault of a decoder's step, by the check that is meant for it.

Which decoder is wrong is data here, so that the faults share a program; the right one is among
them, and passes.
"""

import dataclasses

import audit_campaign
import pytest
from audit_campaign import CLEAN, FAULTS, Case
from audit_faults import (
    ROWS,
    STEPS,
    audit_together,
    check_found,
    suspicions_are_cheap,  # noqa: F401 - a fixture
)

from specjax import Decoder, Match, Rejection

pytestmark = pytest.mark.usefixtures("suspicions_are_cheap")


@pytest.mark.parametrize("name", STEPS)
def test_a_fault_is_found(name):
    check_found(name)


@pytest.mark.parametrize("name", [name for name in STEPS if "noise keyed" in name])
def test_the_sound_parts_pass_in_the_same_program(name):
    """Otherwise the faults might be found for what they share."""
    sound = Case(Match() if type(FAULTS[name].rule) is Match else Rejection())
    assert sound.decoder is Decoder
    report = audit_together(sound, 4096)
    assert report.passed, str(report)


def test_a_fault_is_not_any_failure():
    """The campaign counts a fault as found only if the named check fails."""
    case = FAULTS["end of text behind the block"]
    report = audit_together(case)
    assert not audit_campaign.found(CLEAN["match"], report)
    assert not audit_campaign.found(dataclasses.replace(case, check="figures"), report)


@pytest.mark.parametrize(("check", "passes"), [("ends", True), ("greedy", False)])
def test_the_campaign_fails_if_a_fault_is_missed(check, passes, capsys, monkeypatch):
    """Its exit status is 0 only if every repeat fails the named check."""
    fault = FAULTS["end of text behind the block"]
    monkeypatch.setattr(audit_campaign, "SAMPLES", ROWS)
    monkeypatch.setattr(audit_campaign, "ROWS", ROWS)
    monkeypatch.setattr(Case, "audit", Case.audit_together)
    monkeypatch.setitem(FAULTS, "one", dataclasses.replace(fault, check=check))
    monkeypatch.setattr(audit_campaign.jax, "clear_caches", lambda: None)
    with pytest.raises(SystemExit) as exit_:
        audit_campaign.main(["--repeats", "1", "--only", "one"])
    assert bool(exit_.value.code) is not passes
    assert f"one: found by {check} {int(passes)} of 1" in capsys.readouterr().out
