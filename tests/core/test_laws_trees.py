"""The laws of decoding for trees that choose their nodes, over a table model."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import TREES, TableLaws


class TestTrees(TableLaws):
    PAIRS = TREES
