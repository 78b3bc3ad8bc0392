"""Published benchmarks: their files are read as they are, and answers are scored."""

import gzip
import json
import pathlib
import re

import benchmark_files
import pytest
from command_line import PAIR, failure

from specjax.cli.answers import passes, program, right_number, score
from specjax.cli.questions import DATASETS, PLACEHOLDER, read_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return benchmark_files.write(tmp_path_factory.mktemp("benchmarks"))


COUNTS = {"speed-bench": 6, "spec-bench": 2, "mt-bench": 1, "gsm8k": 2, "humaneval": 1}


@pytest.mark.parametrize("name", DATASETS)
def test_every_benchmark_is_read(folder, name):
    """From its folder, and from the file itself."""
    found = read_questions(name, str(folder / name))
    assert len(found) == COUNTS[name]
    (file,) = [f for f in (folder / name).rglob("*.*") if f.is_file() and "through" not in f.name]
    assert read_questions(name, str(file)) == found


def test_turns_and_categories(folder):
    """Of the published form and of the one that the prepare script writes; one of them alone."""
    rows = read_questions("speed-bench", str(folder / "speed-bench"))
    assert [len(q.turns) for q in rows] == [1, 2] * 3
    assert [q.category for q in rows] == ["coding"] * 2 + ["math"] * 2 + ["qa"] * 2
    prepared = read_questions("speed-bench", str(folder / "speed-bench"), "throughput_1k")
    assert [(q.name, q.turns) for q in prepared] == [(q.name, q.turns) for q in rows[:2]]
    some = read_questions("speed-bench", str(folder / "speed-bench"), categories=("math",))
    assert some == rows[2:4]
    tasks = [q.category for q in read_questions("spec-bench", str(folder / "spec-bench"))]
    assert tasks == ["multi-turn conversation", "retrieval-augmented generation"]
    (question,) = read_questions("mt-bench", str(folder / "mt-bench"))
    assert (question.name, question.turns) == ("81", ("import os", "def f("))


def test_parquet_is_read(folder, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [benchmark_files.speed_bench("coding", n) for n in range(3)]
    (tmp_path / "qualitative").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "qualitative/test-00000-of-00001.parquet")
    assert read_questions("speed-bench", str(tmp_path)) == [
        q
        for q in read_questions("speed-bench", str(folder / "speed-bench"))
        if q.category == "coding"
    ] + [q for q in read_questions("speed-bench", str(tmp_path)) if q.name == "coding-2"]


LINE = '{"question_id": "1", "category": "qa", "turns": %s}'
BROKEN = {
    "no turns": ("mt-bench", LINE % "[]", r"line 1: turns is \[\]; it must be a list of texts"),
    "placeholder": ("mt-bench", LINE % f'["{PLACEHOLDER} ..."]', "own prepare script"),
    "no category": ("mt-bench", '{"turns": ["x"]}', "category is None; it must be a text"),
    "no answer": ("gsm8k", '{"question": "x", "answer": "7"}', "must end with #### and a number"),
    "no number": ("gsm8k", '{"question": "x", "answer": "#### 7 pears"}', "#### and a number"),
    "an empty turn": ("mt-bench", LINE % '["x", ""]', r"turns is \['x', ''\]; .* not empty"),
    "no test": ("humaneval", '{"prompt": "x", "entry_point": "f"}', "test is None"),
    "an assistant": (
        "mt-bench",
        '{"category": "qa", "messages": [{"role": "assistant", "content": "x"}]}',
        "turns of assistant, not of user alone",
    ),
    "no JSON": ("mt-bench", "{", "line 1"),
    "nothing": ("mt-bench", "", "holds no question of mt-bench"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_line(tmp_path, case):
    name, text, message = BROKEN[case]
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions(name, str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", "is damaged at its beginning .*: download it again"),
        (gzip.compress(b"\n" * 9)[:-9], "is damaged"),
        (gzip.compress(b"\xe9"), "is damaged at its beginning"),
        (gzip.compress(b"\n{\n"), "HumanEval.jsonl.gz, line 2: Expecting"),
        (gzip.compress(b"[]\n"), r"line 1: it is \[\], not an object"),
    ],
    ids=["no gzip", "cut", "other bytes", "no JSON", "a list"],  # an archive has a time in it
)
def test_a_damaged_archive_is_named(tmp_path, content, message):
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_questions("humaneval", str(tmp_path))


def test_a_missing_file_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file of gsm8k: looked for test.jsonl"):
        read_questions("gsm8k", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist: pass the folder"):
        read_questions("gsm8k", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="--category rag is none of speed-bench: it has coding"):
        read_questions("speed-bench", str(folder / "speed-bench"), categories=("rag",))
    for name in ("a", "b"):
        benchmark_files.lines(tmp_path / name / "test.jsonl", [benchmark_files.SUM])
    with pytest.raises(ValueError, match=r"holds test.jsonl in 2 folders"):
        read_questions("gsm8k", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "right"),
    [("1204", True), ("It is 1,204.", True), ("$1204.00 in all", True), ("7, so 1204", True),
     ("1204 or 7", False), ("", False), ("twelve", False)],
)  # fmt: skip
def test_the_last_number_counts(folder, text, right):
    question = read_questions("gsm8k", str(folder / "gsm8k"))[0]
    assert right_number(question, text) == right
    assert score(question, text, chat=False) == right


def test_programs_are_judged_by_their_tests(folder, tmp_path):
    """A right answer passes, plain and in a chat.  A wrong one does not, nor one that ends itself,
    loops, or writes into a file of ours."""
    (question,) = read_questions("humaneval", str(folder / "humaneval"))
    assert passes(question, "    return a + b\n\n\nprint(add(1, 2))\nassert False\n", chat=False)
    assert "assert False" not in program(question, "    return a\n\nassert False", chat=False)
    fenced = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    assert passes(question, fenced, chat=True)
    assert not passes(question, "    return a - b\n", chat=False)
    assert not passes(question, "    return a +\n", chat=False)
    ends = "```python\nimport os, sys\nos._exit(0)\n```"
    assert not passes(question, ends, chat=True)
    left = pathlib.Path(tmp_path / "left")
    writes = f"```python\nopen({str(left)!r}, 'w').write('x' * (1 << 21))\n```"
    assert not passes(question, writes, chat=True)
    assert not left.exists() or left.stat().st_size <= 1 << 20


def test_a_program_that_loops_is_ended(folder, monkeypatch):
    monkeypatch.setattr("specjax.cli.answers.SECONDS", 1.0)
    (question,) = read_questions("humaneval", str(folder / "humaneval"))
    assert not passes(question, "    while True:\n        pass\n", chat=False)


REFUSED = [
    (["--dataset", "gsm8k"], "needs --dataset-path"),
    (["--dataset-path", "x", "def f("], "--dataset-path is used with --dataset"),
    (["--dataset", "gsm8k", "--dataset-path", "x", "def f("], "either prompts or --dataset"),
    (["--dataset", "gsm8k", "--dataset-path", "x", "--subset", "throughput_1k"], "--subset"),
    (["--dataset", "mt-bench", "--dataset-path", "x", "--accuracy"], "has no answers to compare"),
    (["--dataset", "humaneval", "--dataset-path", "x", "--accuracy"], "add --run-code"),
    (["--dataset", "gsm8k", "--dataset-path", "x", "--run-code"], "--run-code is used with"),
    (["--dataset", "gsm8k", "--dataset-path", "x"], "does not exist: pass the folder"),
    (["def f(", "--save", "none/x.json"], "--save none/x.json: there is no folder"),
    (["--dataset", "gsm8k", "--dataset-path", "x", "--save-vllm", "none/x"], "there is no folder"),
    (["def f(", "--synthetic-acceptance", "1.5"], "rate=1.5 is not allowed"),
    (["def f(", "--synthetic-acceptance", "0.5", "--synthetic-acceptance-length", "2"],
     "say two things"),
    (["def f(", "--synthetic-acceptance", "0.5", "--rules", "rejection"], "both say which"),
    (["def f(", "--synthetic-acceptance-length", "4.5", "--num-drafts", "2"], "length=4.5 is more"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_the_command_refuses(capsys, arguments, message):
    assert message in failure(capsys, "bench", *PAIR, *arguments)


def test_a_conversation_fits_with_all_of_its_answers(capsys, tmp_path):
    """The target reads at most 256 tokens: 4 turns, and 4 answers."""
    row = {"category": "long", "turns": ["import os " * 7] * 4}
    (tmp_path / "question.jsonl").write_text(json.dumps(row) + "\n")
    asked = ["bench", *PAIR, "--dataset", "mt-bench", "--dataset-path", tmp_path]
    printed = failure(capsys, *asked, "--max-new-tokens", 60)
    (count,) = map(int, re.findall(r"question line 1 has (\d+) tokens", printed))
    assert f"in each of 4 turns make {count + 240}" in printed
    assert f"pass --max-new-tokens {(256 - count) // 4}\n" in printed


def test_options_of_the_template_are_checked(capsys, folder):
    """The tiny target has no chat template."""
    asked = ["bench", *PAIR, "--dataset", "gsm8k", "--dataset-path", folder / "gsm8k"]
    assert "has no chat template; pass --no-chat" in failure(capsys, *asked, "--chat")
    assert "is not used (--no-chat)" in failure(capsys, *asked, "--thinking", "on")
