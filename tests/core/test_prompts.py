"""Prompts for measurements: which files are used, and where they are cut."""

from __future__ import annotations

import json
import pathlib

import pytest

from specjax.training.corpus import held_out_texts
from specjax.training.jobs import prompts

SHIPPED = pathlib.Path(__file__).parents[2] / "checkpoints" / "pycode" / "prompts.jsonl"
FILE = "".join(f"def number_{n}(x):\n    value = {n}\n    return value + x\n\n\n" for n in range(9))


def corpus(folder, files=600):
    """Different files in a package, and which of them the corpus holds out."""
    (folder / "site-packages" / "package").mkdir(parents=True)
    texts = {f"package/file_{n:03}.py": FILE + f"# {n}\n" for n in range(files)}
    for name, text in texts.items():
        (folder / "site-packages" / name).write_text(text)
    held_out = held_out_texts(list(texts.values()))
    return str(folder / "site-packages"), [name for name, text in texts.items() if text in held_out]


def write(capsys, *arguments):
    prompts.main([*map(str, arguments)])
    out = arguments[arguments.index("--out") + 1]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_held_out_files_alone_and_the_same_again(tmp_path, capsys):
    """All held-out files in order, some of them evenly spaced, or those that another prompt file
    names."""
    folder, held_out = corpus(tmp_path)
    assert len(held_out) > 2
    lines = write(capsys, "--data", folder, "--out", tmp_path / "all.jsonl", "--characters", 60)
    assert [line["source"] for line in lines] == held_out
    two = write(
        capsys, "--data", folder, "--out", tmp_path / "two.jsonl", "--characters", 60, "--count", 2
    )
    assert [line["source"] for line in two] == [held_out[0], held_out[len(held_out) // 2]]
    like = ["--like", tmp_path / "two.jsonl"]
    again = write(
        capsys, "--data", folder, "--out", tmp_path / "again.jsonl", "--characters", 60, *like
    )
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert again == two


def test_cut_ends_behind_the_header_nearest_to_the_middle():
    """The cut begins with a line, at least that many characters before its end."""
    text = prompts.cut(FILE, 60)
    assert text.endswith("def number_4(x):\n")
    assert FILE.count(text) == 1
    first = "def number_3(x):\n"
    assert text.startswith(first)
    assert len(text) - len(first) < 60 <= len(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nb\nc\nd\n", "b\nc\n"),
        ("no line at all", "no line at all"),
        ("def f():\n    pass\n", "def f():\n"),
    ],
)
def test_files_without_a_header_or_too_short(text, wanted):
    """Files are cut behind the middle line, kept whole if there is none, and begin at the start
    if it is near."""
    assert prompts.cut(text, 3) == wanted or prompts.cut(text, 30) == wanted


def test_the_shipped_prompts_are_of_this_kind():
    """Each shipped prompt is found again by this rule: whole lines, its length and its header."""
    for line in SHIPPED.read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        file = "#\n" + prompt + "#" * len(prompt)
        assert prompts.cut(file, 500) == (prompt if len(prompt) >= 500 else "#\n" + prompt)


def test_files_that_are_not_held_out_are_refused(tmp_path, capsys):
    """The error names the files; and only one way to choose may be given."""
    folder, _ = corpus(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"source": "package/nowhere.py"}\n')
    out = ["--out", str(tmp_path / "out.jsonl")]
    with pytest.raises(
        ValueError, match=r"names 1 files that are not held out of --data, package/nowhere.py"
    ):
        prompts.main(["--data", folder, *out, "--like", str(tmp_path / "other.jsonl")])
    with pytest.raises(SystemExit):
        prompts.main(["--data", folder, *out, "--count", "2", "--like", "x"])
    assert "--count 2 and --like x both choose files" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="0 different UTF-8 texts"):
        prompts.main(["--data", str(tmp_path / "empty"), *out])
