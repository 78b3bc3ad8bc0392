"""The command line, as a user types it, on the tiny checkpoint."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import specjax
from specjax.commands import COMMANDS, inputs, main

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny"
PAIR = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
SHORT = ["--max-new-tokens", "24"]


def run(capsys, *arguments):
    main([str(a) for a in arguments])
    return capsys.readouterr()


def failure(capsys, *arguments):
    """What a user reads on stderr when a command cannot go on."""
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "Traceback" not in found.err
    return found.err


def test_generate_prints_text_and_table(capsys):
    """The prompt and its continuation, then what speculation gained."""
    out = run(capsys, "generate", "def main(", *PAIR, *SHORT).out
    text = specjax.generate(specjax.load(TINY / "target"), "def main(", max_new_tokens=24).text[0]
    assert out.startswith("def main(" + text)
    for name in ("tokens/s without speculation", "tokens/s with speculation", "speed-up", "(alpha)", "(tau)"):
        assert name in out
    assert [line.split()[-1] for line in out.splitlines() if "same tokens" in line] == ["yes"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("proposer", [["--proposer", "draft", *PAIR[2:]], ["--proposer", "ngram"]])
def test_json_is_one_object(capsys, temperature, proposer):
    """Every field that is promised, nothing else on stdout, and the same tokens as plain decoding."""
    arguments = ["--json", "--temperature", temperature, "--seed", 3, *SHORT]
    found = run(capsys, "generate", "import os\n", "class A", *PAIR[:2], *proposer, *arguments)
    result = json.loads(found.out)
    assert set(result) == {"text", "tokens", "finish", "exact", "stats"}
    assert {
        "acceptance_rate", "mean_accepted_length", "target_passes", "tokens", "seconds", "tokens_per_second",
        "baseline_tokens_per_second", "speedup", "same_tokens",
    } <= set(result["stats"])  # fmt: skip
    assert result["stats"]["same_tokens"] is True
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))
    plain = specjax.generate(
        specjax.load(TINY / "target"), ["import os\n", "class A"], max_new_tokens=24, temperature=temperature, seed=3
    )
    assert (result["text"], result["tokens"], result["finish"]) == (plain.text, plain.tokens, plain.finish)


def test_no_compare(capsys):
    """Plain decoding is not run, and what depends on it is null."""
    stats = json.loads(run(capsys, "generate", "x", *PAIR, *SHORT, "--json", "--no-compare").out)["stats"]
    assert (stats["baseline_tokens_per_second"], stats["speedup"], stats["same_tokens"]) == (None, None, None)


def test_num_speculative_tokens_is_num_drafts(capsys):
    """The name that users of other engines know."""
    one, two = (
        json.loads(run(capsys, "generate", "x", *PAIR, *SHORT, "--json", "--no-compare", name, 2).out)["stats"]
        for name in ("--num-drafts", "--num-speculative-tokens")
    )
    assert one["target_passes"] == two["target_passes"]


def test_rejection_says_what_it_keeps(capsys):
    """Other tokens at temperature 1 are no fault of a rule that keeps the distribution; the table says so."""
    arguments = ["--rule", "rejection", "--temperature", 1, "--max-new-tokens", 48]
    out = run(capsys, "generate", "def main(", *PAIR, *arguments).out
    assert "lossless rule                  yes" in out
    assert "keeps the distribution, not the tokens" in out


def test_prompt_file(capsys, tmp_path):
    """A text file is one prompt, JSON lines are a batch."""
    (tmp_path / "one.txt").write_text("def f(\n")
    (tmp_path / "two.jsonl").write_text('{"prompt": "def f("}\n\n{"prompt": "class A"}\n')
    for name, count in (("one.txt", 1), ("two.jsonl", 2)):
        out = run(capsys, "generate", "--prompt-file", tmp_path / name, *PAIR, *SHORT, "--json", "--no-compare").out
        assert len(json.loads(out)["text"]) == count


def test_bench(capsys):
    """A row for plain decoding, and one for every proposer and number of drafts; the tokens are the same."""
    arguments = ["--num-drafts", 1, 3, "--rounds", 1, "--json"]
    report = json.loads(run(capsys, "bench", "def f(", "import ", *PAIR, *SHORT, *arguments).out)
    names = [(row["proposer"], row["num_drafts"]) for row in report["rows"]]
    assert names == [("plain", 0), ("draft", 1), ("ngram", 1), ("draft", 3), ("ngram", 3)]
    assert all(row["same_tokens"] == 2 for row in report["rows"])
    assert report["rows"][0]["mean_accepted_length"] == 1.0
    text = run(capsys, "bench", "def f(", *PAIR, *SHORT, *arguments[:-1]).out
    assert text.count("\n| ") == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["prompt", "--prompt-file"]),
        (["x", "--prompt-file", "y"], ["not both"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
        (["x", "--target", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", "--target", str(TINY / "target"), "--proposer", "draft"], ["--draft", "ngram"]),
        (["x", *PAIR, "--proposer", "ngram"], ["--draft is not used"]),
        (["x", *PAIR, "--num-drafts", "0"], ["num_drafts=0", "at least 1"]),
        (["x", *PAIR, "--temperature", "-1"], ["temperature=-1"]),
        (["x", *PAIR, "--temperature", "nan"], ["temperature=nan"]),
        (["x", *PAIR, "--top-p", "0"], ["top_p=0", "(0, 1]"]),
        (["x", *PAIR, "--max-new-tokens", "5000"], ["5000", "256", "shorten"]),
        (["x", *PAIR, "--dtype", "int4"], ["int4", "bfloat16"]),
        (["", *PAIR], ["prompt 0 is empty"]),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, words):
    """What is wrong, its value, and the cure."""
    message = failure(capsys, "generate", *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_a_bad_line_in_a_prompt_file(capsys, tmp_path):
    """JSON lines that are none are named."""
    (tmp_path / "bad.jsonl").write_text('"just a text"\n')
    assert "bad.jsonl: every line must be an object" in failure(
        capsys, "generate", "--prompt-file", tmp_path / "bad.jsonl", *PAIR
    )


def test_without_the_shipped_checkpoint(capsys, monkeypatch, tmp_path):
    """An installed package has no checkpoint: say what to pass."""
    monkeypatch.setattr(inputs, "_SHIPPED", tmp_path / "nowhere")
    assert "pass --target" in failure(capsys, "generate", "x")


def test_the_shipped_pair_is_the_default(capsys):
    """Without --target the shipped target and draft are used."""
    stats = json.loads(run(capsys, "generate", "def fibonacci(n):", *SHORT, "--json").out)["stats"]
    assert stats["acceptance_rate"] is not None
    assert stats["same_tokens"] is True


def test_every_command_has_help(capsys):
    """`--help` names each option of each command."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        assert "--target" in capsys.readouterr().out


def test_python_m_specjax():
    """The module runs, and progress stays off a stderr that is no terminal."""
    command = [sys.executable, "-m", "specjax", "generate", "x", *PAIR, *SHORT, "--json", "--no-compare"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["tokens"][0]) <= 24


def test_x64_changes_no_token(capsys):
    """A process that runs JAX with 64-bit types gets the same text for the same key."""
    arguments = ["generate", "import os\n", *PAIR, *SHORT, "--temperature", "1", "--json", "--no-compare"]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "specjax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == json.loads(run(capsys, *arguments).out)["tokens"]
