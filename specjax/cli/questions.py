"""Reads the questions of published benchmarks from their files; nothing is downloaded.

    name         file in the folder                      fields
    speed-bench  SUBSET.jsonl, SUBSET/*.parquet          question_id, category, turns or messages
    spec-bench   question.jsonl                          question_id, category, turns
    mt-bench     question.jsonl, *.parquet               question_id, category, turns or prompt
    gsm8k        test.jsonl, test-*.parquet              question, answer ("... #### 42")
    humaneval    HumanEval.jsonl(.gz), test-*.parquet    task_id, prompt, test, entry_point

Files are looked for in the folder and in the folders inside of it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from specjax._internal.checks import reworded, shown
from specjax.training.rows import read_rows

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""The beginning of a turn whose text SPEED-Bench may not give on; its own script fetches it."""

SUBSETS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
"""The parts of SPEED-Bench."""

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of one or more turns.

    Attributes:
      name: its id in the file.
      category: its category, or the name of the benchmark if that has none.
      turns: what the user says, one text a turn.
      plain: the turn as a text without a chat template; None: the turns, joined by blank lines.
      system: a system message before the first turn.
      answer: the number that GSM8K wants.
      test, entry: HumanEval's test, and the function that it calls.
    """

    name: str
    category: str
    turns: tuple[str, ...]
    plain: str | None = None
    system: str | None = None
    answer: str | None = None
    test: str | None = None
    entry: str | None = None


Row = dict[str, Any]


def read_questions(
    name: str, folder: str, subset: str = SUBSETS[0], categories: tuple[str, ...] = ()
) -> list[Question]:
    """Returns the questions of a benchmark, in the order of its file.

    Args:
      name: one of `DATASETS`.
      folder: has the published files, at any depth; or one such file.
      subset: of SPEED-Bench.
      categories: only these; () is all.

    Raises:
      ValueError: no such file, several of them, a row without a field, an unknown category, or a
        turn whose text was left out of the published file.
      OSError: the folder or a file cannot be read.
    """
    patterns, made = DATASETS[name]
    path = pathlib.Path(folder)
    patterns = tuple(pattern.format(subset=subset) for pattern in patterns)
    questions = []
    for file in _files(name, path, patterns):
        for where, row in _rows(file):
            with reworded(f"{file}, {where}: ", f" (of {name})", (ValueError,)):
                questions.append(made(row, where))
    if not questions:
        raise ValueError(f"--dataset-path {path} holds no question of {name}")
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories:
        if category not in known:
            raise ValueError(f"--category {category} is none of {name}: it has {', '.join(known)}")
    return [q for q in questions if not categories or q.category in categories]


def _files(name: str, path: pathlib.Path, patterns: tuple[str, ...]) -> list[pathlib.Path]:
    if not path.exists():
        raise FileNotFoundError(
            f"--dataset-path {path} does not exist: pass the folder into which you have downloaded "
            f"{name}"
        )
    if path.is_file():
        return [path]
    for pattern in patterns:
        found = sorted(path.rglob(pattern))
        folders = {file.parent for file in found}
        if len(folders) > 1:
            raise ValueError(
                f"--dataset-path {path} holds {pattern} in {len(folders)} folders, "
                f"{', '.join(map(str, sorted(folders)))}: pass one of them"
            )
        if found:
            return found
    raise FileNotFoundError(
        f"--dataset-path {path} has no file of {name}: looked for {', '.join(patterns)}"
    )


def _rows(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file, with their positions."""
    if path.suffix != ".gz":
        yield from read_rows(path)
        return
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    with reworded(f"{path}, line {number}: "):
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise ValueError(f"it is {shown(row)}, not an object")
                    yield f"line {number}", row
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, zlib.error) as error:
        where = f"after line {number}" if number else "at its beginning"
        raise ValueError(f"{path} is damaged {where} ({error}): download it again") from None


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} is {shown(value)}; it must be a text")
    return value


def _category(row: Row) -> str:
    return _text(row, "category")


def _name(row: Row, field: str, where: str) -> str:
    value = row.get(field, where)
    return value if isinstance(value, str) else str(value)


def _conversation(row: Row, where: str) -> Question:
    """Returns a question with a category and turns."""
    system = None
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"messages is {shown(messages)}; it must be a list of turns")
        if messages and messages[0].get("role") == "system":
            system, messages = _text(messages[0], "content"), messages[1:]
        others = {str(message.get("role")) for message in messages} - {"user"}
        if others:
            raise ValueError(
                f"messages has turns of {', '.join(sorted(others))}, not of user alone"
            )
        turns: object = [message.get("content") for message in messages]
    else:
        turns = row.get("turns", row.get("prompt"))
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise ValueError(f"turns is {shown(turns)}; it must be a list of texts that are not empty")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise ValueError(
            "the text of this turn was left out of the published file: run SPEED-Bench's own "
            "prepare script, which writes it, and pass the folder that it wrote"
        )
    return Question(_name(row, "question_id", where), _category(row), tuple(turns), None, system)


def _of_a_group(row: Row, where: str) -> Question:
    """Returns a question of Spec-Bench, whose tables have a row for each task."""
    made = _conversation(row, where)
    return dataclasses.replace(made, category=GROUPS.get(made.category, made.category))


GROUPS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        "multi-turn conversation",
    ),
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""The task of each category of Spec-Bench (Xia et al. 2024, arXiv 2401.07851); `translation` is its
own.
"""


def _gsm8k(row: Row, where: str) -> Question:
    question, answer = _text(row, "question"), _text(row, "answer")
    wanted = answer.rpartition("####")[2].strip().replace(",", "")
    # Another text would count every answer as wrong.
    if "####" not in answer or not _NUMBER.fullmatch(wanted):
        raise ValueError(f"answer is {shown(answer)}; it must end with #### and a number")
    asked = f"{question}\nEnd your answer with the number alone."
    plain = f"Question: {question}\nAnswer:"
    return Question(where, "gsm8k", (asked,), plain, answer=wanted)


def _humaneval(row: Row, where: str) -> Question:
    prompt, test, entry = (_text(row, field) for field in ("prompt", "test", "entry_point"))
    asked = f"Complete this function. Answer with all of its code.\n\n```python\n{prompt}```"
    name = _name(row, "task_id", where)
    return Question(name, "humaneval", (asked,), prompt, test=test, entry=entry)


DATASETS: dict[str, tuple[tuple[str, ...], Callable[[Row, str], Question]]] = {
    "speed-bench": (
        ("{subset}.jsonl", "{subset}/*.jsonl", "{subset}/*.parquet", "{subset}*.parquet"),
        _conversation,
    ),
    "spec-bench": (("question.jsonl",), _of_a_group),
    "mt-bench": (("question.jsonl", "*.parquet"), _conversation),
    "gsm8k": (("test.jsonl", "test-*.parquet"), _gsm8k),
    "humaneval": (("HumanEval.jsonl", "HumanEval.jsonl.gz", "test-*.parquet"), _humaneval),
}
"""The patterns of the files of a benchmark, of which the first that is there counts, and the
function that reads a row."""
