"""The auditor finds each planted fault, by the check that is meant for it.

Which rule, chain or decoder is wrong is data here, so that many faults share a program; the sound
parts are among them, and pass.  `test_audit_faults_alone.py` has the faults that share none, and
`python -m tests.audit_campaign --repeats 100` says how often each is found.
"""

import dataclasses
import importlib

import audit_campaign
import pytest
from audit_campaign import CLEAN, FAULTS, Case

from specjax import Decoder, Match, Rejection

TOGETHER = [name for name, case in FAULTS.items() if case.shares]
ROWS, SAMPLES = 256, 2048
FAINT = {
    "residual drawn with the draft's noise": 8192,
    **dict.fromkeys(
        ("step key halved", "residual drawn with the acceptance bits",
         "a residual draw after full acceptance"), 4096,
    ),
}  # fmt: skip
"""Faults of the distribution that more samples than `SAMPLES` show."""
NOISE = {"residual drawn with the draft's noise": 0.6}
"""Of a draft with which fewer samples than the campaign's show the fault."""


@pytest.fixture(autouse=True)
def _suspicions_are_cheap(monkeypatch):
    """As many fresh samples confirm one as raised it."""
    monkeypatch.setattr(importlib.import_module("specjax.audit.auditing"), "_AGAIN", 1)


def audit(case, samples=ROWS):
    return case.audit_together(0, samples=samples, rows=ROWS)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_fault_is_found(name):
    case = FAULTS[name]
    case = dataclasses.replace(case, noise=NOISE.get(name, case.noise))
    in_samples = case.check == "distribution"
    report = audit(case, FAINT.get(name, SAMPLES) if in_samples else ROWS)
    assert audit_campaign.found(case, report), str(report)
    assert not report.passed
    assert f"FAILED: {', '.join(report.failures)}" in str(report)


@pytest.mark.parametrize("name", [name for name in TOGETHER if "noise keyed" in name])
def test_the_sound_parts_pass_in_the_same_program(name):
    """Otherwise the faults might be found for what they share."""
    sound = Case(Match() if type(FAULTS[name].rule) is Match else Rejection())
    assert sound.decoder is Decoder
    report = audit(sound, 4096)
    assert report.passed, str(report)


def test_a_fault_is_not_any_failure():
    """The campaign counts a fault as found only if the named check fails."""
    case = FAULTS["end of text behind the block"]
    report = audit(case)
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
