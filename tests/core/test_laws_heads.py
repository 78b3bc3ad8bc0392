"""The laws of decoding for drafters that read features of the target, over a table model."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import HEADS, TableLaws


class TestHeads(TableLaws):
    PAIRS = HEADS
