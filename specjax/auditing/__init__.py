"""Audits a decoder: checks that speculative decoding is lossless."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.auditing.auditing import audit
    from specjax.auditing.endpoint import Endpoint, Writer
    from specjax.auditing.foreign import Plan, audit_endpoint
    from specjax.auditing.report import POWER, Check, Distribution, Report

__getattr__ = lazily(__name__, __file__)

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
