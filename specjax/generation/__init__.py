"""Text in, text out: a request is prepared on the host, warmed up and decoded."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.generation.padding import pad_rows
    from specjax.generation.prepared import Prepared, capacity_for, check_length, prepare
    from specjax.generation.prompts import (
        bad_word_ids,
        conversations,
        documents_of,
        encode,
        encode_file,
        ends_of,
        expected_of,
        padded_length,
        read_file,
        read_lines,
        read_records,
        read_text,
        text_ids,
    )
    from specjax.generation.request import Options, Request, load_named
    from specjax.generation.run import Output, TextStream, decode, generate
    from specjax.generation.session import Session
    from specjax.generation.tuning import plan_of, tune
    from specjax.generation.warmup import Ready, place, warm_up

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Options",
    "Output",
    "Prepared",
    "Ready",
    "Request",
    "Session",
    "TextStream",
    "bad_word_ids",
    "capacity_for",
    "check_length",
    "conversations",
    "decode",
    "documents_of",
    "encode",
    "encode_file",
    "ends_of",
    "expected_of",
    "generate",
    "load_named",
    "pad_rows",
    "padded_length",
    "place",
    "plan_of",
    "prepare",
    "read_file",
    "read_lines",
    "read_records",
    "read_text",
    "text_ids",
    "tune",
    "warm_up",
]
