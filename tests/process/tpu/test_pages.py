"""A TPU reads and writes pages of keys and values where they lie; compiled without a TPU."""

from __future__ import annotations

import pytest
from paged_steps import (
    CONFIG,
    LATENT,
    OF_A_SLOT,
    compiled_with_pages,
    copied_pools,
    gathered_pages,
)

from bench.compiled.chips import chip
from bench.tpu.slices import devices_of
from specjax import kernels

DEVICES = devices_of(chip("v5e"), 1)


@pytest.mark.parametrize(("page", "dtype"), [(64, "bfloat16"), (16, "float32")])
def test_no_program_gathers_pages_into_main_memory(page, dtype):
    text = compiled_with_pages("none", DEVICES, page, dtype)
    assert gathered_pages(text, page) == []
    assert "few_queries_of_pages" in text and "write_pages" in text
    if dtype == "bfloat16":  # so few pages of float32 are brought to on-chip memory, once a call
        assert copied_pools(text, page) == []


ROUNDED = {"int8": CONFIG.num_kv_heads * (CONFIG.head_dim + 4), "float8": OF_A_SLOT}
"""The numbers of a token's keys in pages of 8 bits."""


@pytest.mark.parametrize("cache_dtype", ROUNDED)
def test_pages_of_8_bits_are_not_gathered(cache_dtype):
    text = compiled_with_pages("none", DEVICES, 64, "bfloat16", cache_dtype)
    assert gathered_pages(text, 64, ROUNDED[cache_dtype]) == []
    if cache_dtype == "int8":  # as above, so few pages of float8 are brought to on-chip memory
        assert copied_pools(text, 64, ROUNDED[cache_dtype]) == []
    assert "few_queries_of_pages" in text and "write_pages" in text


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_pages_of_latent_vectors_are_not_gathered(cache_dtype):
    text = compiled_with_pages("none", DEVICES, 64, "bfloat16", cache_dtype, latent=True)
    for size in (LATENT.kv_rank, LATENT.rope_dim):
        stored = size + 4 * (cache_dtype == "int8")
        assert gathered_pages(text, 64, stored) == [] == copied_pools(text, 64, stored)
    assert "few_queries_of_pages" in text and "write_pages" in text


@pytest.mark.slow
def test_a_tree_is_verified_over_pages():
    """Its mask is an argument of the same kernel."""
    assert gathered_pages(compiled_with_pages("tree", DEVICES, 64, "bfloat16"), 64) == []


def test_planted_pages_that_are_gathered_or_copied_are_found(monkeypatch):
    """Without the kernels XLA gathers the pages of each row, and copies all pages to write some."""
    for name in ("takes_pages_on_tpu", "writes_pages_on_tpu"):
        monkeypatch.setattr(kernels, name, lambda *_: False, raising=False)
    text = compiled_with_pages("none", DEVICES, 64, "bfloat16")
    assert len(gathered_pages(text, 64)) >= 4  # keys and values of two layers
    assert copied_pools(text, 64) != []
    for cache_dtype, latent, size in (
        ("int8", False, ROUNDED["int8"]), ("float8", False, OF_A_SLOT), (None, True, LATENT.kv_rank)
    ):  # fmt: skip
        text = compiled_with_pages("none", DEVICES, 64, "bfloat16", cache_dtype, latent)
        assert len(gathered_pages(text, 64, size)) >= 2
