"""The command line with the shipped heads and layers of the target, which table models lack."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from command_line import PAIR, SHORT, TINY, failure, run

import specjax
from specjax._internal import paths as folders


def test_early_exit(capsys):
    """The first layers of the target draft, and change no token."""
    arguments = ["--json", *SHORT, "--proposer", "early-exit", "--exit-layer", 1, "--num-drafts", 2]
    stats = json.loads(run(capsys, "generate", "import os\n", *PAIR[:2], *arguments).out)["stats"]
    assert stats["same_tokens"] is True and stats["tested"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["dynamic-tree", *PAIR[2:], "--num-drafts", 2, "--width", 2, "--num-nodes", 4],
        ["first-of", *PAIR[2:], "--num-drafts", 2, "--confidence-threshold", 0.3],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_proposers(capsys, arguments):
    """Each proposer loads its weights, drafts, and changes no token."""
    command = ["--json", *SHORT, "--proposer", *arguments]
    stats = json.loads(run(capsys, "generate", "import os\n", *PAIR[:2], *command).out)["stats"]
    assert stats["same_tokens"] is True and stats["tested"] > 0


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
    auto = ["--proposer", "auto", "--drafter", tmp_path / "heads", *SHORT]
    printed = run(capsys, "generate", "import os\n", *PAIR[:2], *auto).out
    assert "drafter of 2: " in printed
    both = [*auto, *PAIR[2:]]
    assert "--draft or --drafter" in failure(capsys, "generate", "import os\n", *PAIR[:2], *both)


def test_the_demo(capsys):
    """Every way writes the same tokens, with and without the weights of drafts."""
    arguments = ["demo", "def main(", *PAIR[:2], *SHORT]
    alone = run(capsys, *arguments, "--no-colour").out
    assert "The same tokens in every row of a table: yes" in alone and "\x1b" not in alone
    assert "early-exit" in alone and "tree" not in alone and "medusa" not in alone
    report = json.loads(run(capsys, *arguments, *PAIR[2:], "--json").out)
    names = [row["proposer"] for row in report["rows"]]
    assert report["same_tokens"] is True
    assert names == ["none", "auto", "none", "auto", "ngram", "draft", "tree", "early-exit"]
    assert len({row["sha256"] for row in report["rows"][:2]}) == 1
    drawn = specjax.generate(
        specjax.load(TINY / "target"), "def main(", temperature=1.0, seed=1, max_new_tokens=24
    )
    assert {row["tokens"] for row in report["rows"][2:]} == {len(drawn.tokens[0])}
    digest = hashlib.sha256(np.array(drawn.tokens[0], "<i4").tobytes()).hexdigest()
    assert {row["sha256"] for row in report["rows"][2:]} == {digest[:16]}


@pytest.mark.parametrize("more", [[], ["--dequantise"]], ids=["codes", "float32"])
def test_the_target_of_20_m_and_its_head(more, capsys):
    """As codes and in float32 the head drafts well, and changes no token."""
    folder = folders.shipped("pycode-20m")
    models = ["--target", folder / "target", *more, "--drafter", folder / "eagle3"]
    how = ["--drafter-dtype", "int8", "--proposer", "drafter", "--num-drafts", 3, *SHORT, "--json"]
    stats = json.loads(run(capsys, "generate", "import os\nimport ", *models, *how).out)["stats"]
    assert stats["same_tokens"] is True
    assert stats["mean_accepted_length"] > 2


@pytest.mark.parametrize("more", [["--num-drafts", "3"], ["--num-nodes", "8", "--width", "3"]])
def test_the_shipped_drafter_drafts_a_chain_or_a_tree(more, capsys):
    """`--proposer drafter` is the shipped EAGLE-3 head, which changes no token."""
    out = run(
        capsys, "generate", "import os\nimport ", "--proposer", "drafter", *more, *SHORT, "--json"
    ).out
    stats = json.loads(out)["stats"]
    assert stats["same_tokens"] and stats["accepted"] > 0


def test_the_shipped_pair_is_the_default(capsys):
    """Without --target the shipped target and draft are used."""
    how = ["--proposer", "draft", *SHORT, "--json"]  # `auto` may find that no draft pays
    stats = json.loads(run(capsys, "generate", "def fibonacci(n):", *how).out)["stats"]
    assert stats["acceptance_rate"] is not None
    assert stats["same_tokens"] is True


def test_shipped_heads_are_the_default(capsys, monkeypatch, tmp_path):
    """The shipped heads are used without `--drafter`; if they are missing, the error names their
    folder."""
    monkeypatch.setattr(folders, "_HOME", tmp_path)
    own = tmp_path / "checkpoints" / "pycode"
    own.mkdir(parents=True)
    (own / "target").symlink_to(TINY / "target")
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
    assert "no checkpoint 'pycode/medusa'" in message and str(tmp_path) in message
    target = specjax.load(TINY / "target")
    specjax.save_medusa(own / "medusa", specjax.MedusaAdapter.create(target, 2), "target")
    assert json.loads(run(capsys, *arguments).out)["stats"]["tested"] > 0


def test_a_report_marks_an_inexact_rule(capsys):
    arguments = ["--rule", "threshold", "--threshold", "0.05", "--mean", "--temperature", 1]
    bench = ["--num-drafts", 4, "--rounds", 1, "--proposers", "draft"]
    report = run(capsys, "bench", "def main(", *PAIR, *SHORT, *arguments, *bench).out
    assert "| threshold (exact=False) |" in report
