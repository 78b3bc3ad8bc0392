"""The command line, as a user types it, on the tiny checkpoint."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import specjax
from specjax.commands import COMMANDS, main
from specjax.flags import inputs

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
    for name in (
        "tokens/s without speculation",
        "tokens/s with speculation",
        "speed-up",
        "(alpha)",
        "(tau)",
    ):
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
        specjax.load(TINY / "target"),
        ["import os\n", "class A"],
        max_new_tokens=24,
        temperature=temperature,
        seed=3,
    )
    assert (result["text"], result["tokens"], result["finish"]) == (
        plain.text,
        plain.tokens,
        plain.finish,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["tree", *PAIR[2:], "--branching", 2, 1],
        ["dynamic-tree", *PAIR[2:], "--num-drafts", 2, "--width", 2, "--num-nodes", 4],
        ["early-exit", "--exit-layer", 1, "--num-drafts", 2],
        ["first-of", *PAIR[2:], "--num-drafts", 2, "--confidence-threshold", 0.3],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_proposers(capsys, arguments):
    """They find their weights, guess, and change no token."""
    found = run(
        capsys, "generate", "import os\n", *PAIR[:2], "--json", *SHORT, "--proposer", *arguments
    )
    stats = json.loads(found.out)["stats"]
    assert stats["same_tokens"] is True
    assert stats["tested"] > 0


def test_audit_of_medusa_heads(capsys, tmp_path):
    """One adapter serves all rows of a batch."""
    target = specjax.load(TINY / "target")
    specjax.save_medusa(tmp_path / "heads", specjax.MedusaAdapter.create(target, 2), "target")
    sizes = ["--samples", 16, "--rows", 16, "--num-tokens", 1, "--max-new-tokens", 8]
    found = run(
        capsys, "audit", *PAIR[:2], "--proposer", "medusa", "--adapter", tmp_path / "heads", *sizes
    )
    assert "passed" in found.out


def test_medusa_and_its_picture(capsys, tmp_path):
    """Heads from a folder give the same text, and their tree is drawn."""
    target = specjax.load(TINY / "target")
    specjax.save_medusa(tmp_path / "heads", specjax.MedusaAdapter.create(target, 2), "target")
    picture = tmp_path / "tree.png"
    arguments = ["--adapter", tmp_path / "heads", "--plot", picture, "--json", *SHORT]
    result = json.loads(run(capsys, "generate", "import os\n", *PAIR[:2], *arguments).out)
    assert result["stats"]["same_tokens"] is True
    assert result["stats"]["acceptance_rate"] is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_compare(capsys):
    """Plain decoding is not run, and what depends on it is null."""
    stats = json.loads(run(capsys, "generate", "x", *PAIR, *SHORT, "--json", "--no-compare").out)[
        "stats"
    ]
    assert (stats["baseline_tokens_per_second"], stats["speedup"], stats["same_tokens"]) == (
        None,
        None,
        None,
    )


def test_the_whole_sampler(capsys):
    """Every setting of `generate` has an option, and log-probabilities are printed as JSON."""
    arguments = [
        "--repetition-penalty", 1.5, "--presence-penalty", 0.2, "--frequency-penalty", 0.1, "--min-new-tokens", 9,
        "--logit-bias", "5=-2.5", "--logit-bias", "9=1", "--bad-word", "self", "--stop", "xyz", "--logprobs", 2,
    ]  # fmt: skip
    found = json.loads(
        run(
            capsys, "generate", "import os\n", *PAIR, *SHORT, *arguments, "--json", "--no-compare"
        ).out
    )
    settings = {
        "repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.1, "min_new_tokens": 9,
        "logit_bias": {5: -2.5, 9: 1.0}, "bad_words": ["self"], "stop": "xyz", "logprobs": 2,
    }  # fmt: skip
    wanted = specjax.generate(
        specjax.load(TINY / "target"), "import os\n", max_new_tokens=24, **settings
    )
    assert found["tokens"] == wanted.tokens
    row = found["logprobs"][0]
    assert [len(row[name]) for name in ("raw", "warped", "top_ids", "top")] == [
        len(wanted.tokens[0])
    ] * 4
    assert (
        max(abs(a - b) for a, b in zip(row["raw"], wanted.logprobs[0].raw.tolist(), strict=True))
        < 1e-3
    )


def test_num_speculative_tokens_is_num_drafts(capsys):
    """The name that users of other engines know."""
    one, two = (
        json.loads(
            run(capsys, "generate", "x", *PAIR, *SHORT, "--json", "--no-compare", name, 2).out
        )["stats"]
        for name in ("--num-drafts", "--num-speculative-tokens")
    )
    assert one["target_passes"] == two["target_passes"]


@pytest.mark.parametrize("proposer", ["draft", "ngram"])
def test_no_drafts_is_plain_decoding(capsys, proposer):
    """For every proposer that reads the number."""
    arguments = [
        *PAIR[: 4 if proposer == "draft" else 2],
        "--proposer",
        proposer,
        "--num-drafts",
        0,
    ]
    stats = json.loads(run(capsys, "generate", "x", *arguments, *SHORT, "--json").out)["stats"]
    assert (stats["acceptance_rate"], stats["same_tokens"]) == (None, True)


def test_rejection_says_what_it_keeps(capsys):
    """Other tokens at temperature 1 are no fault of a rule that keeps the distribution; the table says so."""
    arguments = ["--rule", "rejection", "--temperature", 1, "--max-new-tokens", 48]
    out = run(capsys, "generate", "def main(", *PAIR, *arguments).out
    assert "lossless rule                  yes" in out
    assert "keeps the distribution, not the tokens" in out


def test_an_inexact_rule_says_so(capsys):
    """In the table, in both forms of the output, and in what stands above the figures; its numbers are options."""
    arguments = ["--rule", "threshold", "--threshold", "0.05", "--mean", "--temperature", 1, *SHORT]
    out = run(capsys, "generate", "def main(", *PAIR, *arguments).out
    assert "lossless rule                  no" in out
    assert "this rule changes the distribution" in out
    assert (
        json.loads(
            run(capsys, "generate", "def main(", *PAIR, *arguments, "--json", "--no-compare").out
        )["exact"]
        is False
    )
    bench = ["--num-drafts", 4, "--rounds", 1, "--proposers", "draft"]
    assert (
        "| threshold (exact=False) |"
        in run(capsys, "bench", "def main(", *PAIR, *arguments, *bench).out
    )


AUDIT = [*PAIR, "--samples", 128, "--max-new-tokens", 8]


def test_audit(capsys):
    """A table, and no exit status but 0 where nothing is broken."""
    out = run(capsys, "audit", *AUDIT).out
    lines = [line.split()[:3] for line in out.splitlines()]
    for name in (
        ["figures", "pass"],
        ["greedy", "pass"],
        ["same", "key", "pass"],
        ["same", "bits", "pass"],
    ):
        assert name in [line[: len(name)] for line in lines]
    assert "passed: no claim is broken" in out
    assert "would have been found with probability 0.95" in out


def test_audit_fails_with_status_1(capsys, monkeypatch):
    """A rule that claims what it does not keep."""
    boastful = type("Boastful", (specjax.Threshold,), {"exact": True})
    monkeypatch.setitem(specjax.RULES, "threshold", boastful)
    with pytest.raises(SystemExit) as exit_:
        run(capsys, "audit", *AUDIT, "--rule", "threshold", "--threshold", "0.02")
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    assert "FAILED: " in out
    assert "same key" in out.split("FAILED: ")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "0"], ["temperature=0", "greater than 0"]),
        (["--samples", "3"], ["samples=3", "64"]),
        (["--rule", "threshold", "--threshold", "1.5"], ["threshold=1.5", "[0, 1]"]),
        (["--rule", "typical", "--posterior-alpha", "nan"], ["posterior_alpha=nan", "[0, 1]"]),
        (["--threshold", "0.5"], ["--threshold is not used by --rule match", "--rule threshold"]),
        (["--max-new-tokens", "5000"], ["5000", "256"]),
        (["--max-new-tokens", "0"], ["num_tokens=3", "max_new_tokens=0"]),
    ],
)
def test_audit_refuses_mistakes(capsys, arguments, words):
    """In one line, before anything is compiled."""
    message = failure(capsys, "audit", *AUDIT, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_prompt_file(capsys, tmp_path):
    """A text file is one prompt, JSON lines are a batch."""
    (tmp_path / "one.txt").write_text("def f(\n")
    (tmp_path / "two.jsonl").write_text('{"prompt": "def f("}\n\n{"prompt": "class A"}\n')
    for name, count in (("one.txt", 1), ("two.jsonl", 2)):
        out = run(
            capsys,
            "generate",
            "--prompt-file",
            tmp_path / name,
            *PAIR,
            *SHORT,
            "--json",
            "--no-compare",
        ).out
        assert len(json.loads(out)["text"]) == count


def test_bench(capsys):
    """A row for plain decoding, and one for every proposer and number of drafts; the tokens are the same."""
    arguments = ["--num-drafts", 1, 3, "--rounds", 1, "--json"]
    report = json.loads(run(capsys, "bench", "def f(", "import ", *PAIR, *SHORT, *arguments).out)
    names = [(row["proposer"], row["num_drafts"]) for row in report["rows"]]
    assert names == [("none", 0), ("draft", 1), ("draft", 3), ("ngram", 1), ("ngram", 3)]
    assert all(row["same_tokens"] == 2 for row in report["rows"])
    assert (report["rows"][0]["alpha"], report["rows"][0]["tau"]) == (None, [1.0, 1.0, 1.0])
    text = run(capsys, "bench", "def f(", *PAIR, *SHORT, *arguments[:-1]).out
    assert text.count("\n| ") == 6


def test_bench_of_trees_rules_and_temperatures(capsys, tmp_path):
    """A table a temperature; what cannot be paired is named; tokens are compared where they must be the same."""
    picture, file = tmp_path / "bars.png", tmp_path / "report.json"
    arguments = [
        "--proposers", "tree", "--branching", 1, "--branching", 3, "--rules", "rejection", "block",
        "--temperatures", 0, 1, "--max-new-tokens", 8, "--rounds", 0, "--save", file, "--plot", picture,
    ]  # fmt: skip
    out = run(capsys, "bench", "def f(", "import ", *PAIR, *arguments).out
    assert "not possible: tree 3 with block, which judges chains only" in out
    assert [line for line in out.splitlines() if line.startswith("temperature")] == [
        "temperature 0",
        "temperature 1",
    ]
    assert len({line.count("|") for line in out.splitlines() if line.startswith("|")}) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    names = [(row["proposer"], row.get("branching"), row["guesses"], row["rule"]) for row in rows]
    assert (
        names == [("none", None, 0, "match"), *(("tree", [n], n, "rejection") for n in (1, 3))] * 2
    )
    for row in rows:
        comparable = row["rule"] == "match" or row["temperature"] == 0
        assert row["same_tokens"] == (2 if comparable else None)
        assert (row["tokens_per_second"], row["speedup"]) == (None, None)
        if row["proposer"] != "none":
            value, low, high = row["alpha"]
            assert 0 <= low <= value <= high <= 1


@pytest.mark.filterwarnings("default:the draft .* speaks other tokens")
def test_bench_of_a_draft_with_other_tokens(capsys):
    """It is translated, and its acceptance is measured without timing."""
    draft = ROOT / "checkpoints" / "pycode" / "draft"
    arguments = [
        "--proposers",
        "draft",
        "--num-drafts",
        2,
        "--rounds",
        0,
        "--max-new-tokens",
        6,
        "--json",
    ]
    found = run(capsys, "bench", "import os\n", *PAIR[:2], "--draft", draft, *arguments)
    _, row = json.loads(found.out)["rows"]
    assert "speaks other tokens" in found.err
    assert (row["proposer"], row["same_tokens"], row["speedup"]) == ("draft", 1, None)
    assert row["alpha"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--proposers", "tree", "--rules", "block"],
            ["block judges chains only", "a proposer of chains"],
        ),
        (
            ["--proposers", "draft", "--branching", "2"],
            ["--branching is not used by --proposer draft", "tree"],
        ),
        (
            ["--rules", "match", "block", "--threshold", "0.5"],
            ["--threshold is not used by --rule match, block"],
        ),
        (["--proposers", "draft", "medusa"], ["--proposer medusa needs --adapter"]),
        (["--rounds", "-1"], ["--rounds -1", "0 or more"]),
        (["--num-drafts", "1", "0"], ["num_drafts=0", "at least 1"]),
        (["--max-new-tokens", "5000"], ["5000", "256", "shorten"]),
    ],
)
def test_bench_refuses_mistakes(capsys, arguments, words):
    """In one line, before anything is compiled."""
    message = failure(capsys, "bench", "def f(", *PAIR, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["prompt", "--prompt-file"]),
        (["x", "--prompt-file", "y"], ["not both"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
        (["x", "--target", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", "--target", str(TINY / "target"), "--proposer", "draft"], ["--draft", "ngram"]),
        (["x", *PAIR, "--proposer", "ngram"], ["--draft is not used"]),
        (["x", *PAIR[:2], "--proposer", "medusa"], ["--adapter", "trained for this target"]),
        (["x", *PAIR[:2], "--proposer", "ngram", "--adapter", "y"], ["--adapter is not used"]),
        (["x", *PAIR[:2], "--adapter", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", *PAIR, "--plot", "x.png"], ["--plot", "--proposer medusa"]),
        (["x", *PAIR, "--num-drafts", "-1"], ["num_drafts=-1", "0 (plain) or greater"]),
        (["x", *PAIR, "--confidence-threshold", "2"], ["confidence_threshold=2", "[0, 1]"]),
        (
            ["x", *PAIR, "--proposer", "tree", "--branching", "2", "0"],
            ["branching=(2, 0)", "at least 1"],
        ),
        (
            ["x", *PAIR[:2], "--proposer", "early-exit", "--exit-layer", "9"],
            ["exit_layer=9", "it must lie in [1, "],
        ),
        (["x", *PAIR[:2], "--proposer", "first-of"], ["--proposer first-of needs --draft"]),
        (
            ["x", *PAIR, "--proposer", "dynamic-tree", "--num-nodes", "1"],
            ["num_nodes=1", "candidates"],
        ),
        (
            ["x", *PAIR[:2], "--proposer", "ngram", "--branching", "2"],
            ["--branching is not used by --proposer ngram"],
        ),
        (
            ["x", *PAIR, "--proposer", "tree", "--num-drafts", "3"],
            ["--num-drafts is not used by --proposer tree"],
        ),
        (
            ["x", *PAIR, "--exit-layer", "1"],
            ["--exit-layer is not used by --proposer draft", "early-exit"],
        ),
        (["x", *PAIR, "--temperature", "-1"], ["temperature=-1"]),
        (["x", *PAIR, "--temperature", "nan"], ["temperature=nan"]),
        (["x", *PAIR, "--repetition-penalty", "0"], ["repetition_penalty=0", "above 0"]),
        (["x", *PAIR, "--logit-bias", "five=1"], ["--logit-bias five=1", "42=-1.5"]),
        (["x", *PAIR, "--stop", ""], ["stop", "empty string"]),
        (["x", *PAIR, "--logprobs", "2"], ["--logprobs", "--json"]),
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


def test_shipped_heads_are_the_default(capsys, monkeypatch, tmp_path):
    """Heads beside the shipped target are taken without an option; where there are none, their place is named."""
    monkeypatch.setattr(inputs, "_SHIPPED", tmp_path)
    (tmp_path / "target").symlink_to(TINY / "target")
    arguments = [
        "generate",
        "import os\n",
        "--proposer",
        "medusa",
        *SHORT,
        "--json",
        "--no-compare",
    ]
    message = failure(capsys, *arguments)
    assert "--proposer medusa needs --adapter" in message
    assert str(tmp_path / "medusa") in message
    target = specjax.load(TINY / "target")
    specjax.save_medusa(tmp_path / "medusa", specjax.MedusaAdapter.create(target, 2), "target")
    assert json.loads(run(capsys, *arguments).out)["stats"]["tested"] > 0


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
        assert ("JOB" if name == "train" else "--target") in capsys.readouterr().out


def test_python_m_specjax():
    """The module runs, and progress stays off a stderr that is no terminal."""
    command = [
        sys.executable,
        "-m",
        "specjax",
        "generate",
        "x",
        *PAIR,
        *SHORT,
        "--json",
        "--no-compare",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["tokens"][0]) <= 24


def test_x64_changes_no_token(capsys):
    """A process that runs JAX with 64-bit types gets the same text for the same key."""
    arguments = [
        "generate",
        "import os\n",
        *PAIR,
        *SHORT,
        "--temperature",
        "1",
        "--json",
        "--no-compare",
    ]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "specjax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == json.loads(run(capsys, *arguments).out)["tokens"]
