"""The laws of decoding over a table model for plain decoding, lookups and wrappers."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import OTHERS, TableLaws


class TestOthers(TableLaws):
    PAIRS = OTHERS
