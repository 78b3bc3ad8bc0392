"""Families with experts, with layers of several kinds, and with latent attention compute what
transformers computes."""

from stored_families import ROUTED, StoredFamilies, pytest_generate_tests  # noqa: F401 - pytest calls it


class TestRouted(StoredFamilies):
    GROUPS = ROUTED
