"""The laws of decoding for draft models and stored texts, over a table model."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import DRAFTS, TableLaws


class TestDrafts(TableLaws):
    PAIRS = DRAFTS
