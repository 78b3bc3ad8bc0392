"""Reads and writes files: model folders, the Hub, Orbax."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.files.checkpoint import Outline, check_dtype, load, read_outline, save
    from specjax.files.config import read_config
    from specjax.files.folder import (
        CONFIG,
        INDEX,
        SINGLE,
        check_links,
        listed,
        named,
        read_json,
        refuse_pickled,
        refuse_quantised,
        refuse_weights,
        replacing,
        weight_files,
    )
    from specjax.files.headers import (
        KINDS,
        WHOLE,
        Stored,
        headers_once,
        open_tensors,
        read_header,
    )
    from specjax.files.hub import MEDUSA_WEIGHTS, TOKENIZER, find_folder
    from specjax.files.packed import forms, read_scheme
    from specjax.files.tensors import all_finite, read_rows, row_faults, rows_of, write_rows
    from specjax.files.tokenizer import read_tokenizer

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "CONFIG",
    "INDEX",
    "KINDS",
    "MEDUSA_WEIGHTS",
    "SINGLE",
    "TOKENIZER",
    "WHOLE",
    "Outline",
    "Stored",
    "all_finite",
    "check_dtype",
    "check_links",
    "find_folder",
    "forms",
    "headers_once",
    "listed",
    "load",
    "named",
    "open_tensors",
    "read_config",
    "read_header",
    "read_json",
    "read_outline",
    "read_rows",
    "read_scheme",
    "read_tokenizer",
    "refuse_pickled",
    "refuse_quantised",
    "refuse_weights",
    "replacing",
    "row_faults",
    "rows_of",
    "save",
    "weight_files",
    "write_rows",
]
