"""The laws of decoding for MTP layers of the target, over a table model."""

from laws import pytest_generate_tests  # noqa: F401 - pytest calls it
from table_laws import MTP, TableLaws


class TestMtpLayers(TableLaws):
    PAIRS = MTP
