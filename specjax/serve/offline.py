"""`write_texts`: one text for each row of a file, by one engine or by several workers.

A row's seed is a hash of the run's seed and the row's name.  So a row that is written twice, since
its worker died or the run was started again, has one text, and rows may come in any order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from specjax._internal.checks import settle
from specjax.generation import Request, conversations, encode
from specjax.serve.engine import Engine
from specjax.serve.handle import Busy
from specjax.types import Json

Row = dict[str, Json]
"""The name of a row, `row`, and its prompt, `prompt`: a text or the messages of a conversation.

What was made of it has its name, `text`, `tokens`, `finish` and `seed`."""


class Pool(Protocol):
    """Gives parts of the rows to workers, and yields what they made as it comes."""

    def __call__(
        self, make: Callable[[], Callable[[list[Row]], list[Row]]], parts: Sequence[list[Row]]
    ) -> Iterator[list[Row]]: ...


def row_seed(seed: int, row: object) -> int:
    """Returns the seed of a row of a run: 32 bits of a hash of both.

    Example:
      >>> row_seed(0, 5) == row_seed(0, 5) != row_seed(1, 5)
      True
    """
    text = json.dumps([seed, row], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


@dataclasses.dataclass(frozen=True)
class RowWriter:
    """Writes texts with an engine.

    Attributes:
      engine: it.
      settings: the fields of each row's `Request`, without its prompt and seed.
      seed: of the run.
    """

    engine: Engine
    settings: Mapping[str, object]
    seed: int

    def __call__(self, rows: list[Row]) -> list[Row]:
        """Returns the rows with `text`, `tokens`, `finish` and `seed`."""
        handles = []
        for row in rows:
            prompt, target = row["prompt"], self.engine.target
            try:
                ids = (
                    encode(target, [prompt]) if isinstance(prompt, str)
                    else conversations(target, None, [prompt])
                )  # fmt: skip
                request = self.engine.checker.admit(Request(**{
                    **self.settings, "prompts": ids, "seed": row_seed(self.seed, row["row"])
                }))  # fmt: skip
            except ValueError as error:
                raise ValueError(f"row {row['row']!r}: {error}") from None
            while True:
                try:
                    handles.append(self.engine.submit(request))
                    break
                except Busy:
                    waiting = [one for one in handles if not one.done()]
                    if waiting:
                        waiting[0].result()
        made = []
        for row, handle in zip(rows, handles, strict=True):
            served = handle.result()
            made.append({
                "row": row["row"], "prompt": row["prompt"], "text": served.text,
                "tokens": served.tokens,
                "finish": served.finish, "seed": served.seed,
            })  # fmt: skip
        return made


def here(
    make: Callable[[], Callable[[list[Row]], list[Row]]], parts: Sequence[list[Row]]
) -> Iterator[list[Row]]:
    """The pool of one worker, which is this process."""
    worker = make() if parts else None
    for part in parts:
        assert worker is not None
        yield worker(part)


def write_texts(
    out: pathlib.Path,
    rows: Sequence[Row],
    run: str,
    make: Callable[[], RowWriter],
    pool: Pool = here,
    part: int = 32,
) -> int:
    """Writes a file of JSON lines with the text of each row, or goes on with one.

    Args:
      out: the file, in the order of `rows` at the end.  While it grows it has the name OUT.part.
      rows: with different names.
      run: what the texts depend on, apart from the rows; a file of another run is refused.
      make: makes the writer of a worker, in its process.
      pool: the workers.
      part: rows that a worker gets at once.

    Returns:
      How many rows were known before.

    Raises:
      ValueError: the file is of another run or of something else, or two rows have one name.
    """
    names = [json.dumps(row["row"]) for row in rows]
    settle((len(set(names)) < len(names), "two rows have one name: give each line its own"))
    growing = out.with_name(out.name + ".part")
    known = {**_read(out, run), **_read(growing, run)}
    for name, row in zip(names, rows, strict=True):
        if name in known and known[name]["prompt"] != row["prompt"]:
            raise ValueError(
                f"row {name} has another prompt in {out}: delete the file, or write to another one"
            )
    left = [row for name, row in zip(names, rows, strict=True) if name not in known]
    before = len(rows) - len(left)
    # Written anew, since the last line of a run that was killed may be cut off.
    _write(growing, run, known.values())
    with open(growing, "a") as file:
        parts = [left[start : start + part] for start in range(0, len(left), part)]
        for made in pool(make, parts):
            for row in made:
                known[json.dumps(row["row"])] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    _write(out, run, (known[name] for name in names))
    growing.unlink()
    return before


def _write(path: pathlib.Path, run: str, rows: Iterable[Row]) -> None:
    """Writes a file atomically."""
    partial = path.with_name(path.name + ".partial")
    lines = ({"run": run}, *rows)
    partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    partial.replace(path)


def _read(path: pathlib.Path, run: str) -> dict[str, Row]:
    """Returns the rows of a file by their names; a line that was cut off is no row."""
    if not path.exists():
        return {}
    try:
        first, *lines = map(json.loads, path.read_text().split("\n")[:-1])
        run_of_file, rows = first["run"], {json.dumps(row["row"]): row for row in lines}
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"{path} is no file of texts that a run has begun: delete it, or write to another file"
        ) from None
    settle((
        run_of_file != run,
        f"{path} has texts of another run ({run_of_file}, now {run}): delete it, or write to "
        "another file",
    ))  # fmt: skip
    return rows
