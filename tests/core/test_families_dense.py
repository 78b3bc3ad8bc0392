"""Families of dense layers compute what transformers computes, and every family is held to it."""

import small_families
from stored_families import DENSE, StoredFamilies, pytest_generate_tests  # noqa: F401 - pytest calls it

import specjax


class TestDense(StoredFamilies):
    GROUPS = DENSE


def test_every_family_is_here():
    assert {family for family, _ in small_families.CONFIGS.values()} == set(specjax.FAMILIES)
