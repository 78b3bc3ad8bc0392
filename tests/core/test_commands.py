"""The command line on the tiny checkpoint, as a user types it."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from command_line import PAIR, ROOT, SHORT, TINY, failure, run

import specjax
from specjax import folders
from specjax.commands import COMMANDS, colours, main
from specjax.flags import load_models, make_drafter
from specjax.generate import decode, prepared


def test_generate_prints_text_and_table(capsys):
    """The command prints the prompt with its continuation, and then the gain from speculation."""
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
    """stdout is one JSON object with every promised field and the same tokens as plain decoding."""
    arguments = ["--json", "--temperature", temperature, "--seed", 3, *SHORT]
    printed = run(capsys, "generate", "import os\n", "class A", *PAIR[:2], *proposer, *arguments)
    result = json.loads(printed.out)
    assert set(result) == {"text", "tokens", "finish", "exact", "stats"}
    assert {
        "acceptance_rate", "mean_accepted_length", "target_passes", "tokens", "seconds",
        "tokens_per_second", "baseline_tokens_per_second", "speedup", "same_tokens",
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
    """Each proposer loads its weights, drafts, and changes no token."""
    printed = run(
        capsys, "generate", "import os\n", *PAIR[:2], "--json", *SHORT, "--proposer", *arguments
    )
    stats = json.loads(printed.out)["stats"]
    assert stats["same_tokens"] is True
    assert stats["tested"] > 0


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


def test_colours_show_the_accepted_drafts(capsys):
    """Without its colours the text is the same; coloured are the drafts that were accepted."""
    arguments = ["def main(", *PAIR, *SHORT, "--proposer", "draft", "--no-compare"]
    plain = run(capsys, "generate", *arguments).out
    shown = run(capsys, "generate", *arguments, "--colour").out
    text = shown.split(colours.LEGEND)[0]
    bare = re.sub(r"\x1b\[\d+m", "", text).rstrip("\n")
    assert plain.startswith("def main(") and bare and plain.startswith(bare)
    target = specjax.load(TINY / "target")
    call = prepared(target, "def main(", draft=specjax.load(TINY / "draft"), max_new_tokens=24,
                    num_drafts=4)  # fmt: skip
    (depths,) = colours.depths_of(call)
    output = decode(call)
    assert len(depths) == len(output.tokens[0])
    assert sum(depth > 0 for depth in depths) == output.stats.accepted > 0
    # A step gives its drafts in order, and then the target's token.
    assert all(b in (0, a + 1) if a else b in (0, 1) for a, b in itertools.pairwise(depths))
    assert sum(depth == 0 for depth in depths) in (
        output.stats.target_passes, output.stats.target_passes - 1,
    )  # fmt: skip
    assert text.count("\x1b[32m") <= depths.count(1) + text.count("\n")


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


def test_the_shipped_heads_are_not_those_of_auto():
    """Where the shipped heads are loaded for another proposer, `auto` still has none."""
    arguments = argparse.Namespace(target=None, draft=None, drafter=None, dtype="float32")
    target, _ = load_models(arguments, ["auto", "medusa"])
    assert arguments.drafter is not None
    made = make_drafter(arguments, "auto", target, None)
    assert made.proposer.drafter is None
    arguments.drafter_of_auto = arguments.drafter
    assert make_drafter(arguments, "auto", target, None).proposer.drafter is not None


def test_no_compare(capsys):
    """Plain decoding does not run, and the figures that need it are null."""
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
        "--repetition-penalty", 1.5, "--presence-penalty", 0.2, "--frequency-penalty", 0.1,
        "--min-new-tokens", 9, "--logit-bias", "5=-2.5", "--logit-bias", "9=1", "--bad-word",
        "self", "--stop", "xyz", "--logprobs", 2,
    ]  # fmt: skip
    result = json.loads(
        run(
            capsys, "generate", "import os\n", *PAIR, *SHORT, *arguments, "--json", "--no-compare"
        ).out
    )
    settings = {
        "repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.1,
        "min_new_tokens": 9, "logit_bias": {5: -2.5, 9: 1.0}, "bad_words": ["self"], "stop": "xyz",
        "logprobs": 2,
    }  # fmt: skip
    wanted = specjax.generate(
        specjax.load(TINY / "target"), "import os\n", max_new_tokens=24, **settings
    )
    assert result["tokens"] == wanted.tokens
    row = result["logprobs"][0]
    assert [len(row[name]) for name in ("raw", "warped", "top_ids", "top")] == [
        len(wanted.tokens[0])
    ] * 4
    assert (
        max(abs(a - b) for a, b in zip(row["raw"], wanted.logprobs[0].raw.tolist(), strict=True))
        < 1e-3
    )


def test_num_speculative_tokens_is_num_drafts(capsys):
    """`--num-speculative-tokens` is the name of the option in vLLM."""
    one, two = (
        json.loads(
            run(capsys, "generate", "x", *PAIR, *SHORT, "--json", "--no-compare", name, 2).out
        )["stats"]
        for name in ("--num-drafts", "--num-speculative-tokens")
    )
    assert one["target_passes"] == two["target_passes"]


@pytest.mark.parametrize("proposer", ["draft", "ngram"])
def test_no_drafts_is_plain_decoding(capsys, proposer):
    """`--num-drafts 0` is plain decoding for every proposer with that option."""
    arguments = [
        *PAIR[: 4 if proposer == "draft" else 2],
        "--proposer",
        proposer,
        "--num-drafts",
        0,
    ]
    stats = json.loads(run(capsys, "generate", "x", *arguments, *SHORT, "--json").out)["stats"]
    assert (stats["acceptance_rate"], stats["same_tokens"]) == (None, True)


def test_rejection_keeps_the_distribution(capsys):
    """At temperature 1 the table explains why a lossless rule may give other tokens."""
    arguments = ["--rule", "rejection", "--temperature", 1, "--max-new-tokens", 48]
    out = run(capsys, "generate", "def main(", *PAIR, *arguments).out
    assert "lossless rule                  yes" in out
    assert "keeps the distribution, not the tokens" in out


def test_an_inexact_rule_is_marked(capsys):
    """Table, JSON and the report of `bench` mark an inexact rule; its fields are options."""
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


def test_prompt_file(capsys, tmp_path):
    """A text file is one prompt, and JSON lines are a batch."""
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
    stats = json.loads(run(capsys, "generate", "def fibonacci(n):", *SHORT, "--json").out)["stats"]
    assert stats["acceptance_rate"] is not None
    assert stats["same_tokens"] is True


def test_every_command_has_help(capsys):
    """Every command has a help page that names --target."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        wanted = {"train": "JOB", "datastore": "action"}.get(name, "--target")
        assert wanted in capsys.readouterr().out


def test_python_m_specjax():
    """The module runs, and shows no progress on a stderr that is not a terminal."""
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
    """With JAX's 64-bit types the same key gives the same text."""
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


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_options_stand_in_groups(capsys, command):
    """What a reader looks for has a heading, and nothing but `--help` is left without one."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    # A heading begins a line and ends in a colon.
    parts = re.split(r"^(\S.*):$", capsys.readouterr().out, flags=re.MULTILINE)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert re.findall(r"^  (-\S+)", groups.pop("options"), re.MULTILINE) == ["-h,"]
    words = {
        "generate": ["prompts", "models", "speculation: what drafts", "sampling", "constraint",
                     "speculation: which drafts are accepted", "penalties, biases and ends",
                     "output", "devices and processes"],
        "serve": ["models", "speculation", "devices", "room and limits", "address"],
    }  # fmt: skip
    assert set(groups) == set(words[command])
    assert all(re.search(r"^  -", options, re.MULTILINE) for options in groups.values())
