"""`python -m bench.packed` on tiny matrices, with an engine of its own form."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from bench import command, packed
from bench.peers import products

TINY = ["--sizes", "tiny", "--rows", "1", "5", "--rounds", "2"]


def test_a_report_has_every_number_of_rows(tmp_path, capsys):
    out = tmp_path / "rows.json"
    packed.main([*TINY, "--json", str(out)])
    report = json.loads(out.read_text())
    cells = [(row["codes"], row["rows"]) for row in report["rows"]]
    assert cells == [(codes, n) for codes in packed.CODES for n in (1, 5)]
    assert all(len(row["seconds"]["specjax"]) == 2 for row in report["rows"])
    assert "| tiny | int8-packed | 5 |" in capsys.readouterr().out


def test_an_engine_takes_turns_and_is_the_base():
    """A stand-in for a process, whose products take a known time."""

    class Engine:
        name = "still"

        def seconds(self, key):
            return 60.0 + key[-1]

    both = "int4-rounded", "int4"
    options = packed.PackedOptions(sizes=("tiny",), codes=both, rows=(1, 5), rounds=2)
    rows = packed.measured(options, [Engine()])
    assert all(row["over_fastest"] is None for row in rows[2:]), "it computes otherwise"
    del rows[2:]
    assert [row["seconds"]["still"] for row in rows] == [[61.0] * 2, [65.0] * 2]
    assert all(row["fastest"] == "still" and row["over_fastest"][0] > 1 for row in rows)


def test_the_process_answers_in_lines(monkeypatch, capsys):
    """A chain is made once for equal requests, and each answer has the seconds of all runs."""
    made = []

    class Engine:
        version = "1"

        def __init__(self, threads):
            assert threads == 2

        def chain(self, *key):
            made.append(key)
            return lambda: None

    monkeypatch.setitem(products.ENGINES, "still", Engine)
    monkeypatch.setattr(sys, "stdin", ["[8, 16, 1, 4, 1]\n"] * 2 + ["[8, 16, 1, 8, 1]\n"])
    products.main("still", "2")
    first, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"version": "1"} and made == [(8, 16, 1, 4, 1), (8, 16, 1, 8, 1)]
    assert [len(answer["seconds"]) for answer in answers] == [products.RUNS] * 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rows", "0"], ["rows", "0"]),
        (["--rounds", "0"], ["rounds", "0"]),
        (["--sizes", "2t"], ["2t"]),
        (["--engines", "openvino", "--engine-python", "/nowhere"], ["/nowhere", "--engine-python"]),
        (["--engines", "openvino", "--engine-python", shutil.which("false") or ""],
         ["engine openvino does not run", "Install openvino and xllamacpp"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(argv, words, capsys):
    with pytest.raises(SystemExit):
        command.run(lambda: packed.main([*TINY, *argv]))
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
