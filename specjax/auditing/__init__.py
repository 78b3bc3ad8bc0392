"""Audits a decoder: checks that speculative decoding is lossless."""

from specjax.auditing.auditing import audit
from specjax.auditing.endpoint import Endpoint, Writer
from specjax.auditing.foreign import Plan, audit_endpoint
from specjax.auditing.report import POWER, Check, Distribution, Report

__all__ = [
    "POWER",
    "Check",
    "Distribution",
    "Endpoint",
    "Plan",
    "Report",
    "Writer",
    "audit",
    "audit_endpoint",
]
