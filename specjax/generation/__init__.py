"""Text in, text out: a request is checked, compiled and decoded."""

from specjax.generation.call import Call, check, check_length, pad_rows
from specjax.generation.prompts import (
    bad_word_ids,
    conversations,
    encode,
    encode_file,
    ends_of,
    read_file,
    read_lines,
    read_text,
    text_ids,
)
from specjax.generation.request import Options, Request
from specjax.generation.run import (
    Output,
    TextStream,
    compile_first,
    decode,
    generate,
    params_of,
    prepared,
)
from specjax.generation.tuning import plan_of, tune

__all__ = [
    "Call",
    "Options",
    "Output",
    "Request",
    "TextStream",
    "bad_word_ids",
    "check",
    "check_length",
    "compile_first",
    "conversations",
    "decode",
    "encode",
    "encode_file",
    "ends_of",
    "generate",
    "pad_rows",
    "params_of",
    "plan_of",
    "prepared",
    "read_file",
    "read_lines",
    "read_text",
    "text_ids",
    "tune",
]
