"""Audit: checks that speculative decoding is lossless."""

from specjax.audit.auditing import audit
from specjax.audit.report import POWER, Check, Distribution, Report

__all__ = ["POWER", "Check", "Distribution", "Report", "audit"]
