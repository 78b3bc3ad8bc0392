"""The audits of planted faults in the tests: smaller than those of `audit_campaign.py`."""

from __future__ import annotations

import dataclasses
import importlib

import audit_campaign
import faults
import pytest
from audit_campaign import FAULTS, SOURCE, SPEED, Case

from specjax import Match, Rejection, Report
from specjax.proposers import Chain, StaticTree

ROWS, SAMPLES = 256, 2048
FAINT = {
    "a token of one in a hundred texts": 8192,
    "residual drawn with the draft's noise": 8192,
    **dict.fromkeys(
        ("step key halved", "residual drawn with the acceptance bits",
         "a residual draw after full acceptance"), 4096,
    ),
}  # fmt: skip
"""Faults that more samples than `SAMPLES` show."""
NOISE = {"residual drawn with the draft's noise": 0.6}
"""Of a draft with which fewer samples than the campaign's show the fault."""
SMALLER = {
    "flat mask on a tree": StaticTree(SOURCE, (2, 1)),
    "siblings reversed": faults.ReversedSiblings(SOURCE, (3,)),
}
"""Trees that compile faster than those of the campaign."""


def is_of_a_step(case: Case) -> bool:
    """Whether the decoder is wrong, and not its rule or its chain."""
    return (
        type(case.proposer) is Chain
        and issubclass(case.decoder, faults.Faulty)
        and (type(case.rule) in (Rejection, Match))
    )


TOGETHER = [name for name, case in FAULTS.items() if case.shares]
STEPS = [name for name in TOGETHER if is_of_a_step(FAULTS[name])]
DRAWS = [name for name in TOGETHER if name not in STEPS]
ALONE = [name for name, case in FAULTS.items() if not case.shares]
TARGETS = [name for name in ALONE if FAULTS[name].target is not audit_campaign.NET]
OTHERS = [name for name in ALONE if name not in TARGETS]
"""The faults by what they share; each list has a file of tests."""


@pytest.fixture
def suspicions_are_cheap(monkeypatch):
    """As many fresh samples confirm one as raised it."""
    monkeypatch.setattr(importlib.import_module("specjax.auditing.auditing"), "_AGAIN", 1)


def audit_together(case: Case, samples: int = ROWS) -> Report:
    return case.audit_together(0, samples=samples, rows=ROWS)


def check_found(name: str) -> None:
    """The named check finds the fault."""
    case = FAULTS[name]
    samples = FAINT.get(name, SAMPLES if case.check == "distribution" else ROWS)
    if case.shares:
        case = dataclasses.replace(case, noise=NOISE.get(name, case.noise))
        report = audit_together(case, samples)
    else:
        case = dataclasses.replace(case, proposer=SMALLER.get(name, case.proposer))
        report = case.audit(0, samples=samples, rows=ROWS)
    assert audit_campaign.found(case, report), str(report)
    assert not report.passed
    assert f"FAILED: {', '.join(report.failures)}" in str(report)
    if name in SPEED:  # then the texts are right
        assert set(report.failures) <= {"acceptance", "features"}
