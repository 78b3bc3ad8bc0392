"""Reads files with a row for each document: JSON lines, parquet, and Hugging Face's arrow files.

A folder that `datasets.Dataset.save_to_disk` has written holds arrow files, and a dataset that was
cloned from the Hub holds parquet or JSON lines.  The column with a text or a conversation is found
by its name, or named with --column.

Columns of parquet files often hold a conversation as JSON text.  Such a text is parsed.  Fields
without a value are left out of the objects in parquet and arrow files, since these formats give
every object the fields of all others.
"""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from specjax._internal.checks import reworded
from specjax._internal.extras import imported

_LINES = (".jsonl", ".ndjson")
_COLUMNS = (".parquet", ".arrow")
_CHATS, _TEXTS = ("messages", "conversations"), ("text", "content")
NAMES = _CHATS + _TEXTS
"""Columns that are read by default; the first of them that is there."""

_JSON = re.compile(r"\s*(\{|\[\s*[\]{])")
"""Matches the beginning of a JSON text with an object or a list of objects, but not `[INST]`."""

Fields = dict[str, Any]


def has_rows(path: pathlib.Path) -> bool:
    """Returns whether a file has rows, by its suffix; `datasets` caches in such files, too."""
    return path.suffix in _LINES + _COLUMNS and not path.name.startswith("cache-")


def read_rows(path: pathlib.Path) -> Iterator[tuple[str, Fields]]:
    """Yields the rows of a file, each with its position for messages, such as "line 3".

    Raises:
      ValueError: a row is not an object, the file is damaged, or a package is missing.
      OSError: the file cannot be read.
    """
    if path.suffix in _LINES:
        for number, line in _lines(path):
            with reworded(f"{path}, line {number}: ", kinds=(ValueError, RecursionError)):
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError(
                        "it must be an object like "
                        '{"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}'
                    )
            yield f"line {number}", fields
        return
    number = 0
    for batch in _batches(path):
        for fields in batch.to_pylist():
            number += 1
            yield f"row {number}", {name: _without_nulls(value) for name, value in fields.items()}


def column_of(path: pathlib.Path, fields: Fields, asked: str | None) -> str:
    """Returns the column with a text or a conversation, of a file whose first row is `fields`.

    Without `--column` (`asked`) it is the first of `NAMES` that is there.
    """
    there = f"{path} has the columns {', '.join(fields)}"
    if asked is None:
        found = next((name for name in NAMES if name in fields), None)
        if found is None:
            raise ValueError(f"{there}, and none of {', '.join(NAMES)}: name one with --column")
        return found
    if asked not in fields:
        near = difflib.get_close_matches(asked, fields, 1, cutoff=0.5)
        raise ValueError(
            f"--column {asked}: {there}" + "".join(f"; the nearest one is {name}" for name in near)
        )
    return asked


def parsed(value: object) -> object:
    """Returns the value of a field, or the value of its JSON text; other texts are unchanged."""
    if not isinstance(value, str) or not _JSON.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def holds_conversations(path: pathlib.Path, asked: str | None) -> bool:
    """Returns whether the column of a file has conversations and not texts, by its first row.

    A conversation is a list of turns, or the JSON text of such a list.  An empty file holds texts.
    """
    for _, fields in read_rows(path):
        name = column_of(path, fields, asked)
        return _is_conversation(name, fields[name])
    return False


def _is_conversation(column: str, value: object) -> bool:
    if not isinstance(value, str):
        return isinstance(value, list) or column in _CHATS
    if column in _CHATS:  # a damaged JSON text is not learned
        return _JSON.match(value) is not None
    turns = None if column in _TEXTS else parsed(value)  # a text may be the content of a JSON file
    return (
        isinstance(turns, list)
        and bool(turns)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
    )


def read_texts(path: pathlib.Path, asked: str | None) -> Iterator[tuple[str, str]]:
    """Yields the texts of a file, each with its position."""
    column = None
    for where, fields in read_rows(path):
        column = column or column_of(path, fields, asked)
        text = fields.get(column)
        is_chat = column in _CHATS and _is_conversation(column, text)
        if isinstance(text, str) and not is_chat:
            yield where, text
            continue
        fault = (
            "a conversation as JSON text, and the first row holds a text that is no JSON: keep "
            "each kind in a file of its own"
        )
        if not isinstance(text, str):
            fault = (
                f"{type(text).__name__}; it must be a text: correct the row, or name another "
                "column with --column"
            )
        raise ValueError(f"{path}, {where}: {column} holds {fault}")


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file that are not blank, with their numbers from 1.

    Only a newline ends a line: JSON texts may hold other characters that separate lines.
    """
    with reworded(f"{path} is not UTF-8 text (", "); save it as UTF-8", (UnicodeDecodeError,)):
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line


def _batches(path: pathlib.Path) -> Iterator[Any]:
    """Yields the record batches of a parquet or arrow file one after the other."""
    message = f"reading {path} needs the package pyarrow: pip install pyarrow"
    names = ("pyarrow", "pyarrow.ipc", "pyarrow.parquet")
    arrow, ipc, parquet = (imported(name, message) for name in names)
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches()
            return
        with arrow.memory_map(str(path)) as source:
            yield from ipc.open_stream(source)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise ValueError(f"{path} cannot be read ({error}): write or download it again") from None
