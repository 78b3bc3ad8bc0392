"""Audit: checks that speculative decoding is lossless."""

from specjax.audit.auditing import audit
from specjax.audit.endpoint import Endpoint, Writer
from specjax.audit.foreign import Plan, audit_endpoint
from specjax.audit.report import POWER, Check, Distribution, Report

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
