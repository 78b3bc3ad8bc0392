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
        file_of,
        listed,
        named,
        read_json,
        refuse_pickled,
        refuse_quantised,
        refuse_weights,
        replacing,
        weight_files,
    )
    from specjax.files.gguf import tensors_of
    from specjax.files.headers import (
        KINDS,
        WHOLE,
        Stored,
        headers_once,
        open_tensors,
        read_header,
    )
    from specjax.files.hub import MEDUSA_WEIGHTS, TOKENIZER, find_folder
    from specjax.files.orbax import is_orbax, restore_part, stored_shapes
    from specjax.files.packed import (
        Packed,
        Scales,
        check_rounded_shards,
        forms,
        group_for,
        read_scheme,
        refuse_shards,
        rounded,
        rounded_leaf,
        scales_for,
    )
    from specjax.files.tensors import (
        all_finite,
        read_rows,
        rounded_rows,
        row_faults,
        rows_of,
        write_rows,
    )
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
    "Packed",
    "Scales",
    "Stored",
    "all_finite",
    "check_dtype",
    "check_links",
    "check_rounded_shards",
    "file_of",
    "find_folder",
    "forms",
    "group_for",
    "headers_once",
    "is_orbax",
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
    "refuse_shards",
    "refuse_weights",
    "replacing",
    "restore_part",
    "rounded",
    "rounded_leaf",
    "rounded_rows",
    "row_faults",
    "rows_of",
    "save",
    "scales_for",
    "stored_shapes",
    "tensors_of",
    "weight_files",
    "write_rows",
]
