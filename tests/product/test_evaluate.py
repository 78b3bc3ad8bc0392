"""`specjax evaluate`: its texts are those of plain decoding, and its intervals cover the mean."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from command_line import TINY, failure, run

import specjax
from specjax.measure import mean_interval
from specjax.rollouts import Sampler, compare_scores, find_checkpoints, rollout_keys
from specjax.rollouts.depths import Depths, Turn
from specjax.text import Texts

pytestmark = pytest.mark.xdist_group("evaluate")  # a share takes all of them, or none

RECORDS = [{"prompt": "def f(", "wanted": "e"}, {"prompt": "import os\n", "wanted": " "}]
NEW, SAMPLES, DRAFTS = 10, 2, 4
SCORES = """
def share(prompt, text, wanted):
    return text.count(wanted) / max(len(text), 1)

def bare(prompt, text):
    return len(text) > 3

def broken(prompt, text):
    return {"x": 1}[text]

wrong = {"nothing": None, "nan": float("nan"), "many": [1.0]}
nothing, nan, many = (lambda prompt, text, value=value: value for value in wrong.values())
"""


@functools.cache
def target() -> specjax.LanguageModel:
    return specjax.load(TINY / "target")


@functools.cache
def moved() -> dict:
    leaves, tree = jax.tree.flatten(target().params)
    draws = np.random.default_rng(0)
    news = [x + 0.02 * x.std() * draws.standard_normal(x.shape, np.float32) for x in leaves]
    made = jax.tree.unflatten(tree, news)
    # The output matrix is a second copy of the embedding.
    return {**made, "head": {"kernel": made["embedding"].T}}


def in_orbax(folder: pathlib.Path, tree: dict) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """Prompts, scores, and a run whose averaged weights are `moved`."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    (folder / "own_scores.py").write_text(SCORES)
    trained = {name: tree for name, tree in moved().items() if name != "head"}
    states = {
        20: {"params": trained, "step": np.int32(20)},
        100: {"params": target().params, "ema": moved(), "step": np.int32(100)},
    }
    for step, state in states.items():
        (folder / "run" / "state" / str(step)).mkdir(parents=True)
        in_orbax(folder / "run" / "state" / str(step) / "default", state)
    return folder


@pytest.fixture
def command(files, monkeypatch) -> list[object]:
    monkeypatch.chdir(files)
    return [
        "evaluate", TINY / "target", files / "run", "--prompt-file", files / "prompts.jsonl",
        "--score", "own_scores:share", "--samples", SAMPLES, "--max-new-tokens", NEW,
        "--num-drafts", DRAFTS, "--slots", 2, "--seed", 5,
    ]  # fmt: skip


def wanted() -> list[list[list[int]]]:
    """The texts of plain decoding of each checkpoint with the same keys."""
    prompts = [target().tokenizer.encode(record["prompt"]).ids for record in RECORDS]
    keys = rollout_keys(5, prompts, SAMPLES, refresh="never")
    plain = Sampler(target(), slots=2, max_new_tokens=NEW, num_drafts=0)
    trees = (target().params, moved(), moved())
    return [plain.sample(prompts, keys, samples=SAMPLES, params=each).texts for each in trees]


def test_texts_scores_and_report(command, tmp_path, capsys, monkeypatch):
    """A call that was killed in the middle of a line goes on, and another score decodes nothing."""
    monkeypatch.setattr(Depths, "best", deepest)
    out = tmp_path / "out"
    report = json.loads(run(capsys, *command, "--out", out, "--json").out)
    texts, rows = wanted(), report["checkpoints"]
    assert [row["checkpoint"] for row in rows] == ["target", "run/20", "run/100"]
    prompts = [target().tokenizer.encode(record["prompt"]).ids for record in RECORDS]
    words = Texts(target(), [prompt[-1] for prompt in prompts], ())
    for row, own in zip(rows, texts, strict=True):
        assert row["tokens"] == sum(map(len, own))
        decoded = [words.decode(n // SAMPLES, tokens) for n, tokens in enumerate(own)]
        shares = [
            text.count(RECORDS[n // SAMPLES]["wanted"]) / max(len(text), 1)
            for n, text in enumerate(decoded)
        ]
        assert row["scores"] == np.array(shares).reshape(-1, SAMPLES).tolist()
    assert texts[0] != texts[1] == texts[2]
    assert rows[0]["tokens_per_pass"] == 1.0
    # The last checkpoint has the weights of the one before, so all of its drafts are accepted.
    assert rows[2]["tokens_per_pass"] == pytest.approx(NEW / -(-NEW // (DRAFTS + 1)), abs=0.6)
    assert rows[2]["to_previous"] == [0.0, 0.0, 0.0] and rows[2]["to_first"] != [0.0, 0.0, 0.0]
    assert json.loads((out / "report.json").read_text()) == report

    kept = {path: path.read_text() for path in out.glob("*.jsonl")}
    last = max(kept, key=lambda path: path.stat().st_mtime_ns)
    last.write_text(kept[last][: len(kept[last]) * 5 // 8])
    again = json.loads(run(capsys, *command, "--out", out, "--json").out)["checkpoints"]
    assert [row["scores"] for row in again] == [row["scores"] for row in rows]
    assert [row["new_texts"] for row in again] == [0, 0, SAMPLES]
    assert {path: path.read_text() for path in out.glob("*.jsonl")} == kept
    other = [*command, "--out", out, "--score", "own_scores:bare"]
    printed = run(capsys, *other, "--plot", tmp_path / "scores.png").out
    assert printed.count("| kept |") == 3 and "own_scores:bare" in printed
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    for option, value in (("--seed", 6), ("--temperature", 0.5), ("--samples", 1)):
        message = failure(capsys, *command, "--out", out, option, value)
        assert f"holds texts with another {option[2:]}" in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--score", "own_scores:absent"], "--score 'own_scores:absent' cannot be imported"),
        (["--score", "own_scores:wrong"], "pass a function (prompt, text) that returns a number"),
        (["--score", "nowhere:share"], "No module named 'nowhere'"),
        (["--prompt-file", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--temperature", 0], "are the same text: pass --samples 1"),
        (["--max-new-tokens", 5000], "it must be in [1, 256]"),
        (["--max-new-tokens", 254], "reads at most 256"),
        (["--mesh", "data=2"], "devices"),
        (["--samples", 0], "--samples is 0"),
    ],
)
def test_mistakes_are_found_before_anything_is_decoded(command, capsys, more, words):
    assert words in failure(capsys, *command, *more)


def test_prompts_and_checkpoints_that_do_not_fit(command, capsys, tmp_path):
    """The message names the checkpoint, or the prompt, and the cure."""
    (tmp_path / "empty.jsonl").write_text('{"prompt": "", "wanted": "e"}\n')
    assert "prompt 0 is empty" in failure(
        capsys, *command, "--prompt-file", tmp_path / "empty.jsonl"
    )
    (tmp_path / "bare.jsonl").write_text('{"prompt": "x"}\n')
    message = failure(capsys, *command, "--prompt-file", tmp_path / "bare.jsonl")
    assert "for prompt 0: missing a required argument: 'wanted'" in message
    in_orbax(tmp_path / "other", {"layer": {"kernel": np.zeros((2, 3), np.float32)}})
    (tmp_path / "none").mkdir()
    for folder, words in (
        (TINY / "draft", "draft is another model than target: its"),
        (tmp_path / "other", "other holds weights of another model than target"),
        (tmp_path / "none", "none is no checkpoint: pass the folder of a model"),
    ):
        assert words in failure(capsys, *command[:2], folder, *command[3:])
    bare = ["evaluate", tmp_path / "other", *command[3:]]
    assert "has weights alone: pass --target" in failure(capsys, *bare)
    assert "no checkpoint was named" in failure(capsys, "evaluate", *command[3:])
    with pytest.raises(ValueError, match="has another tokenizer than"):
        (found,) = find_checkpoints([TINY / "target"])
        words = type(target().tokenizer).from_str(target().tokenizer.to_str())
        words.add_tokens(["one more"])
        found.check(specjax.LanguageModel(target().model, target().params, words))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nan", "returned nan; it must return a finite number"),
        ("nothing", "returned None"),
        ("many", "returned [1.0]"),
        ("broken", "raised KeyError"),
    ],
)
def test_a_score_that_is_no_number(command, capsys, name, words):
    """The message names the checkpoint, the prompt and the sample; texts are kept."""
    with pytest.raises(SystemExit):
        run(capsys, *command, "--score", f"own_scores:{name}")
    message = capsys.readouterr().err
    assert f"--score own_scores:{name} {words}" in message
    assert "for target, prompt 0, sample 0" in message


def test_intervals_cover_the_mean():
    """In 95 % of draws, with few prompts too; a single prompt has none."""
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 6))
    found = [mean_interval(row) for row in draws]
    covered = np.mean([low <= 3.0 <= high for _, low, high in found])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / len(draws))
    assert mean_interval([1.0]) is None


def test_paired_differences():
    """What a prompt adds to both scores cancels; samples of a prompt are no further prompts."""
    hard = np.random.default_rng(1).normal(0, 10, (1, 20, 1))
    scores = hard + np.array([0.0, 1.0, 3.0])[:, None, None] + np.zeros((3, 20, 4))
    rows = compare_scores(scores)
    assert rows[0]["to_first"] is None and rows[0]["to_previous"] is None
    for row, first, previous in ((rows[1], 1, 1), (rows[2], 3, 2)):
        np.testing.assert_allclose(row["to_first"], [first] * 3, atol=1e-9)
        np.testing.assert_allclose(row["to_previous"], [previous] * 3, atol=1e-9)
        low, high = row["interval"]
        assert high - low > 5
    narrow, wide = (compare_scores(scores[:, :, :n])[1]["interval"] for n in (4, 1))
    np.testing.assert_allclose(narrow, wide)


def deepest(depths: Depths, size: int, rows: list, **_) -> Turn:
    """The most drafts in every step, whatever steps take."""
    return Turn(depths.options[-1], 2, range(len(rows)))
