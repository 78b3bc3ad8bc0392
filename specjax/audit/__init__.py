"""Audit: checks that speculative decoding is lossless."""

from specjax.audit.auditing import Check, Report, audit
from specjax.audit.chisquare import detectable, statistic, survival

__all__ = [
    "Check",
    "Report",
    "audit",
    "detectable",
    "statistic",
    "survival",
]
