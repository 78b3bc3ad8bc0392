"""The commands `audit` and `bench` on the tiny checkpoint."""

from __future__ import annotations

import json

import pytest
from command_line import PAIR, ROOT, SHORT, TINY, failure, run

import specjax


def test_audit_of_medusa_heads(capsys, tmp_path):
    """One adapter serves all rows of a batch."""
    target = specjax.load(TINY / "target")
    specjax.save_medusa(tmp_path / "heads", specjax.MedusaAdapter.create(target, 2), "target")
    sizes = ["--samples", 16, "--rows", 16, "--num-tokens", 1, "--max-new-tokens", 8]
    printed = run(
        capsys, "audit", *PAIR[:2], "--proposer", "medusa", "--drafter", tmp_path / "heads", *sizes
    )
    assert "passed" in printed.out


AUDIT = [*PAIR, "--samples", 128, "--max-new-tokens", 8]


def test_audit(capsys):
    """The audit prints a table, and the exit status is 0 if no claim is broken."""
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
    assert "would have been found with probability 0.99" in out


def test_audit_fails_with_status_1(capsys, monkeypatch):
    """A rule that wrongly claims to be exact fails the audit."""
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
        (["--max-new-tokens", "0"], ["max_new_tokens=0", "at least 1"]),
        (["--max-new-tokens", "2"], ["num_tokens=3", "at most max_new_tokens"]),
    ],
)
def test_audit_refuses_mistakes(capsys, arguments, words):
    """The error is one line, before anything is compiled."""
    message = failure(capsys, "audit", *AUDIT, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_bench(capsys):
    """There is a row for plain decoding and for each proposer and number of draft tokens, and all
    tokens are equal."""
    arguments = ["--num-drafts", 1, 3, "--rounds", 1, "--json"]
    report = json.loads(run(capsys, "bench", "def f(", "import ", *PAIR, *SHORT, *arguments).out)
    names = [(row["proposer"], row["num_drafts"]) for row in report["rows"]]
    assert names == [("none", 0), ("draft", 1), ("draft", 3), ("ngram", 1), ("ngram", 3)]
    assert all(row["same_tokens"] == 2 for row in report["rows"])
    assert (report["rows"][0]["alpha"], report["rows"][0]["tau"]) == (None, [1.0, 1.0, 1.0])
    text = run(capsys, "bench", "def f(", *PAIR, *SHORT, *arguments[:-1]).out
    assert text.count("\n| ") == 6


def test_bench_of_trees_rules_and_temperatures(capsys, tmp_path):
    """There is a table per temperature, impossible pairs are named, and tokens are compared where
    they must agree."""
    picture, file = tmp_path / "bars.png", tmp_path / "report.json"
    arguments = [
        "--proposers", "tree", "--branching", 1, "--branching", 3, "--rules", "rejection", "block",
        "--temperatures", 0, 1, "--max-new-tokens", 8, "--rounds", 0, "--save", file, "--plot",
        picture,
    ]  # fmt: skip
    out = run(capsys, "bench", "def f(", "import ", *PAIR, *arguments).out
    assert "not possible: tree 3 with block, which supports chains only" in out
    assert [line for line in out.splitlines() if line.startswith("temperature")] == [
        "temperature 0",
        "temperature 1",
    ]
    assert len({line.count("|") for line in out.splitlines() if line.startswith("|")}) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    names = [(row["proposer"], row.get("branching"), row["drafted"], row["rule"]) for row in rows]
    assert (
        names == [("none", None, 0, "match"), *(("tree", [n], n, "rejection") for n in (1, 3))] * 2
    )
    for row in rows:
        comparable = row["rule"] == "match" or row["temperature"] == 0
        assert row["same_tokens"] == (2 if comparable else None)
        assert row["tokens_per_second"] is row["speedup"] is row["speedup_median"] is None
        if row["proposer"] != "none":
            value, low, high = row["alpha"]
            assert 0 <= low <= value <= high <= 1


@pytest.mark.filterwarnings("default:the draft .* uses other tokens")
def test_bench_of_a_draft_with_other_tokens(capsys):
    """The draft is translated, and its acceptance is measured without timing."""
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
    printed = run(capsys, "bench", "import os\n", *PAIR[:2], "--draft", draft, *arguments)
    _, row = json.loads(printed.out)["rows"]
    assert "uses other tokens" in printed.err
    assert (row["proposer"], row["same_tokens"], row["speedup"]) == ("draft", 1, None)
    assert row["alpha"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--proposers", "tree", "--rules", "block"],
            ["block supports chains only", "a proposer of chains"],
        ),
        (
            ["--proposers", "draft", "--branching", "2"],
            ["--branching is not used by --proposer draft", "tree"],
        ),
        (
            ["--rules", "match", "block", "--threshold", "0.5"],
            ["--threshold is not used by --rule match, block"],
        ),
        (["--proposers", "draft", "medusa"], ["--proposer medusa needs --drafter"]),
        (["--rounds", "-1"], ["--rounds -1", "0 or more"]),
        (["--num-drafts", "1", "0"], ["num_drafts=0", "at least 1"]),
        (["--max-new-tokens", "5000"], ["5000", "256", "shorten"]),
    ],
)
def test_bench_refuses_mistakes(capsys, arguments, words):
    """The error is one line, before anything is compiled."""
    message = failure(capsys, "bench", "def f(", *PAIR, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message
