"""A GPU reads pages of keys and values where they lie; compiled without a GPU."""

from __future__ import annotations

from paged_steps import compiled_with_pages, gathered_pages

from bench.compiled.chips import chip
from bench.gpu.described import devices_of
from specjax import kernels

DEVICES = devices_of(chip("h100"), 1)


def test_no_program_gathers_pages_into_main_memory():
    assert gathered_pages(compiled_with_pages("none", DEVICES, 64, "bfloat16"), 64) == []


def test_planted_pages_that_are_gathered_are_found(monkeypatch):
    """Without the kernel XLA gathers the pages of each row."""
    monkeypatch.setattr(kernels, "takes_attention_on_gpu", lambda *_: False, raising=False)
    assert len(gathered_pages(compiled_with_pages("none", DEVICES, 64, "bfloat16"), 64)) >= 4
