"""The laws of decoding for a chain and a static tree, under every rule, over a table model."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import CHAINS, TableLaws


class TestChains(TableLaws):
    PAIRS = CHAINS
