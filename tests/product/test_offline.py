"""Texts of a file: whoever writes a row, and however often, it has one text."""

from __future__ import annotations

import functools
import json

import pytest
import serving
from command_line import TINY, failure, run
from table_pair import stand_in

from specjax.serve import RowWriter, row_seed, write_texts

pytestmark = pytest.mark.xdist_group("offline")  # a share takes all of them, or none

SETTINGS = {"max_new_tokens": 12, "temperature": 1.0, "eos": []}


@functools.cache
def writer() -> RowWriter:
    return RowWriter(serving.engine(), SETTINGS, 7)


def rows(count: int = 30) -> list[dict]:
    return [{"row": f"r{n}", "prompt": f"def name_{n % 7}("} for n in range(count)]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "out.jsonl"
    assert write_texts(out, rows(), "run", writer) == 0
    return read(out)


def test_a_row_has_a_seed_of_its_own(whole):
    """Of the run and its name: rows of one prompt differ, and `generate` writes each alone."""
    assert whole[0] == {"run": "run"} and [row["row"] for row in whole[1:]] == [
        row["row"] for row in rows()
    ]
    by_prompt: dict[str, list] = {}
    for row in whole[1:]:
        assert row["seed"] == row_seed(7, row["row"]) != row_seed(8, row["row"])
        by_prompt.setdefault(row["prompt"], []).append(row["text"])
    assert all(len(set(texts)) == len(texts) for texts in by_prompt.values())


@pytest.mark.parametrize("part", [1, 7, 32])
def test_workers_that_die(tmp_path, whole, part):
    """In any order, parts twice, a run that ends in the middle of a line and goes on."""
    out = tmp_path / "out.jsonl"

    def dies(make, parts):
        worker = make()
        for number, some in enumerate(reversed(parts)):
            if number == len(parts) // 2:
                raise RuntimeError("killed")
            yield worker(some)

    def twice(make, parts):
        worker = make()
        for some in [*parts, *parts]:
            yield worker(some)

    with pytest.raises(RuntimeError, match="killed"):
        write_texts(out, rows(), "run", writer, dies, part)
    assert not out.exists()
    with open(tmp_path / "out.jsonl.part", "a") as file:
        file.write('{"row": "r3", "te')  # the last line of a process that was killed
    known = write_texts(out, rows(), "run", writer, twice, part)
    assert known == {1: 15, 7: 9, 32: 0}[part]
    assert read(out) == whole and sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
    assert write_texts(out, rows(), "run", writer, dies, part) == 30  # nothing is left to do


def test_what_is_refused(tmp_path, whole):
    out = tmp_path / "out.jsonl"
    write_texts(out, rows(3), "run", writer)
    with pytest.raises(ValueError, match="texts of another run"):
        write_texts(out, rows(3), "other", writer)
    changed = [{**row, "prompt": "import os"} for row in rows(3)]
    with pytest.raises(ValueError, match='row "r0" has another prompt'):
        write_texts(out, changed, "run", writer)
    with pytest.raises(ValueError, match="two rows have one name"):
        write_texts(out, [*rows(2), *rows(1)], "run", writer)
    with pytest.raises(ValueError, match="row 'long': "):
        long = [{"row": "long", "prompt": "a b " * 4000}]
        write_texts(tmp_path / "new.jsonl", long, "run", writer)
    assert read(out) == [whole[0], *whole[1:4]]
    for text in ("", "def f(\n", "[1]\n", '{"prompt": "a"}\n', '{"run": "run"}\n{"prompt": "a"}\n'):
        (tmp_path / "mine").write_text(text)
        with pytest.raises(ValueError, match="mine is no file of texts"):
            write_texts(tmp_path / "mine", rows(3), "run", writer)
        assert (tmp_path / "mine").read_text() == text


def test_a_command_writes_a_file(capsys, tmp_path, monkeypatch):
    """With names of the lines where they have some; it goes on where it was."""
    stand_in(monkeypatch, TINY)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "def f(", "id": "a"}, {"prompt": "import "}, {"prompt": "def f("}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["generate", "--target", TINY / "target", "--proposer", "ngram", "--max-new-tokens", 8,
             "--temperature", 1, "--prompt-file", prompts, "--out", out, "--capacity", 64,
             "--slots", 2]  # fmt: skip
    assert "3 texts, of which 0 were there" in run(capsys, *given).out
    first = read(out)
    assert [row["row"] for row in first[1:]] == ["a", 1, 2]
    assert "3 texts, of which 3 were there" in run(capsys, *given).out
    assert read(out) == first
    for more, words in (
        (["--json"], "--json is not for a file"), (["--logprobs", "0"], "--logprobs is not for"),
        (["--rule", "typical"], "with the rule match"),
        (["--ray-workers", "0"], "--ray-workers 0 must be at least 1"),
        (["--seed", "3"], "texts of another run"),
    ):  # fmt: skip
        assert words in failure(capsys, *given, *more)
