"""The command line as a user types it, on table models that stand in for the tiny checkpoint.

`test_front_doors.py` runs it on the checkpoint, and `tests/product/test_commands_shipped.py` on the
shipped heads.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
import table_pair
from command_line import PAIR as BOTH
from command_line import SHORT, TINY, failure, run
from preparing import prepared

import specjax
from specjax.cli import COMMANDS, colours, main
from specjax.generation.run import decode
from specjax.options.models import ModelOptions, load_models, make_drafter

PAIR = [*BOTH, "--proposer", "draft", "--num-drafts", 2]
PLAIN = {"max_new_tokens": 24, "proposer": "none"}


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    table_pair.stand_in(monkeypatch, TINY)


def test_generate_prints_text_and_table(capsys):
    """The command prints the prompt with its continuation, and then the gain from speculation."""
    out = run(capsys, "generate", "def main(", *PAIR, *SHORT).out
    text = specjax.generate(specjax.load(TINY / "target"), "def main(", **PLAIN).text[0]
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
def test_json_is_one_object(capsys, temperature):
    """stdout is one JSON object with every promised field and the same tokens as plain decoding."""
    arguments = ["--proposer", "ngram", "--json", "--temperature", temperature, "--seed", 3, *SHORT]
    printed = run(capsys, "generate", "import os\n", "class A", *BOTH[:2], *arguments)
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
        **PLAIN,
        temperature=temperature,
        seed=3,
    )
    assert (result["text"], result["tokens"], result["finish"]) == (
        plain.text,
        plain.tokens,
        plain.finish,
    )


def test_another_proposer(capsys):
    """It loads its weights, drafts, and changes no token;
    `tests/product/test_commands_shipped.py` has others."""
    arguments = ["--proposer", "tree", *BOTH[2:], "--branching", 2, 1]
    printed = run(capsys, "generate", "import os\n", *BOTH[:2], "--json", *SHORT, *arguments)
    stats = json.loads(printed.out)["stats"]
    assert stats["same_tokens"] is True
    assert stats["tested"] > 0


def test_colours_show_the_accepted_drafts(capsys):
    """Without its colours the text is the same; coloured are the drafts that were accepted."""
    arguments = ["def main(", *PAIR, *SHORT, "--no-compare"]
    plain = run(capsys, "generate", *arguments).out
    shown = run(capsys, "generate", *arguments, "--colour").out
    text = shown.split(colours.LEGEND)[0]
    bare = re.sub(r"\x1b\[\d+m", "", text).rstrip("\n")
    assert plain.startswith("def main(") and bare and plain.startswith(bare)
    target = specjax.load(TINY / "target")
    call = prepared(target, "def main(", draft=specjax.load(TINY / "draft"), max_new_tokens=24,
                    num_drafts=2)  # fmt: skip
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


def test_the_shipped_heads_are_not_those_of_auto():
    """Where the shipped heads are loaded for another proposer, `auto` still has none."""
    models = load_models(ModelOptions(dtype="float32"), ["auto", "medusa"])
    assert models.drafter is not None
    assert make_drafter("auto", models, {}).proposer.drafter is None
    named = dataclasses.replace(models, of_auto=str(models.drafter))
    assert make_drafter("auto", named, {}).proposer.drafter is not None


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
    wanted = specjax.generate(specjax.load(TINY / "target"), "import os\n", **PLAIN, **settings)
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
    deep = PAIR[:-2]  # eight drafts, if the option were ignored
    one, two = (
        json.loads(
            run(capsys, "generate", "x", *deep, *SHORT, "--json", "--no-compare", name, 2).out
        )["stats"]
        for name in ("--num-drafts", "--num-speculative-tokens")
    )
    assert one["target_passes"] == two["target_passes"]


@pytest.mark.parametrize("proposer", ["draft", "ngram"])
def test_no_drafts_is_plain_decoding(capsys, proposer):
    """`--num-drafts 0` is plain decoding for every proposer with that option."""
    arguments = [
        *BOTH[: 4 if proposer == "draft" else 2],
        "--proposer",
        proposer,
        "--num-drafts",
        0,
    ]
    stats = json.loads(run(capsys, "generate", "x", *arguments, *SHORT, "--json").out)["stats"]
    assert (stats["acceptance_rate"], stats["same_tokens"]) == (None, True)


def test_rejection_keeps_the_distribution(capsys):
    """At temperature 1 the table explains why a lossless rule may give other tokens."""
    arguments = ["--rule", "rejection", "--temperature", 1, *SHORT]
    out = run(capsys, "generate", "def main(", *PAIR, *arguments).out
    assert "lossless rule                  yes" in out
    assert "keeps the distribution, not the tokens" in out


def test_an_inexact_rule_is_marked(capsys):
    """Table and JSON mark an inexact rule; its fields are options."""
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
            *BOTH[:2],
            "--proposer",
            "none",
            *SHORT,
            "--json",
            "--no-compare",
        ).out
        assert len(json.loads(out)["text"]) == count


def test_every_command_has_help(capsys):
    """Every command has a help page that names --target, or what it has in its place."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        own = {"train": "JOB", "datastore": "ACTION", "quantise": "--method"}
        wanted = own.get(name, "--target")
        assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_options_stand_in_groups(capsys, command):
    """What a reader looks for has a heading, and nothing but `--help` is left without one."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    # Without a terminal a heading is a line above a line of hyphens.
    parts = re.split(r"^ (\S.*\S) +\n -{40,} *$", capsys.readouterr().out, flags=re.MULTILINE)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert re.findall(r"^  (-\S+)", groups.pop("options"), re.MULTILINE) == ["-h,"]
    words = {
        "generate": ["prompt", "model", "proposer", "rule", "sampling", "penalty", "constraint",
                     "device", "output", "file"],
        "serve": ["model", "speculation", "device", "room", "fleet", "address", "file"],
    }  # fmt: skip
    assert set(groups) - {"positional arguments"} == {f"{word} options" for word in words[command]}
    assert all(re.search(r"^  \S", options, re.MULTILINE) for options in groups.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["genrate"], "'genrate' is not one; is it generate?"),
        ([], "none was named; choose from demo, generate"),
        (["train", "destill"], "'destill' is not one; is it distill?"),
        (["generate", "x", "--max-new-token", "3"], "--max-new-tokens INT"),
        (["generate", "x", "--top-k", "many"], "many"),
        (["generate", "x", "--proposer", "nothing"], "--proposer 'nothing' is neither one of auto"),
        (["generate", "x", "--mesh", "rows=2"], "--mesh 'rows=2': it must look like data=2"),
        (
            ["generate", "x", "--regex", "a", "--choice", "b"],
            "not allowed with --choice: leave one",
        ),
        (["generate", "x", "--canonical"], "--canonical is used with --regex"),
        (["generate", "x", "--top-k", "many"], "For full helptext, see specjax generate --help"),
        (["generate", "--target", "x", "--", "--regex", "a", "--prompt"], "x is not a folder"),
    ],
)
def test_what_a_command_cannot_read(capsys, arguments, words):
    """It names the fault and the cure before anything is loaded."""
    assert words in " ".join(failure(capsys, *arguments).split())


def test_options_of_a_command_in_a_file(capsys, tmp_path):
    """`--config` and `--set` are read for commands, too, and the command line wins."""
    lines = "max_new_tokens: 9\nstop: [xyz, zyx]\ncompare: false\njson: true\nproposer: none\n"
    (tmp_path / "options.yaml").write_text(lines)
    arguments = ["generate", "x", *BOTH[:2], "--config", tmp_path / "options.yaml"]
    for more, count in (([], 9), (["--set", "max_new_tokens=7"], 7), (["--max-new-tokens", 5], 5)):
        result = json.loads(run(capsys, *arguments, *more).out)
        assert [len(row) for row in result["tokens"]] == [count]
        assert result["stats"]["same_tokens"] is None


@pytest.mark.parametrize(("more", "keeps"), [([], True), (["--admin"], False)])
def test_a_server_that_a_trainer_writes_to_keeps_no_bfloat16(monkeypatch, more, keeps):
    """New weights may be of another dtype than the folder, and are not rounded."""
    from specjax.cli import serve
    from specjax.options.command import parse

    def load(*given, keep_bfloat16, **how):
        raise ValueError(f"asked for {keep_bfloat16}")

    monkeypatch.setattr(serve, "load_models", load)
    with pytest.raises(ValueError, match=f"asked for {keeps}"):
        serve.engine_of(parse(serve.ServeOptions, more, prog="serve"))


def test_the_cache_of_a_server_may_be_rounded(monkeypatch):
    from specjax.cli import serve
    from specjax.options.command import parse

    def load(named, *more, **how):
        raise ValueError(f"asked for {named.cache_dtype}")

    monkeypatch.setattr(serve, "load_models", load)
    with pytest.raises(ValueError, match="asked for int8"):
        serve.engine_of(parse(serve.ServeOptions, ["--cache-dtype", "int8"], prog="serve"))
