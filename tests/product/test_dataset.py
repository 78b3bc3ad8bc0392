"""Datasets that a target writes into a folder, and evaluations of its speculation.

A table model stands for the tiny target where its texts are written and evaluated.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import table_pair
import trained
from command_line import TINY
from toys import TABLES as toys

import specjax
from specjax.generation.prompts import encode_file
from specjax.measure import interval
from specjax.training import dataset, sources
from specjax.training.jobs import distill, evaluate, generate
from specjax.training.written import Written

pytestmark = pytest.mark.xdist_group("dataset")  # a share takes all of them, or none

PROMPTS = ["import os\n", "def f(x):\n    return", "class A:\n"]

TARGET = TINY / "target"


@pytest.fixture(scope="module", autouse=True)
def _tables():
    with pytest.MonkeyPatch.context() as patch:
        table_pair.stand_in(patch, TINY)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A file of three prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def write(out, prompts, *more):
    generate.main(["--target", str(TARGET), "--prompts", str(prompts), "--out", str(out),
                   "--batch-size", "2", "--max-new-tokens", "12", "--temperature", "0",
                   *more])  # fmt: skip
    return out


def shards(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def written(tmp_path_factory, prompts):
    """The greedy continuations of the prompts, written with prompt lookup."""
    return write(tmp_path_factory.mktemp("written") / "data", prompts)


@pytest.fixture(scope="module")
def said():
    """The target, and the output of `generate` for the prompts."""
    target = specjax.load(TARGET)
    return target, specjax.generate(target, PROMPTS, proposer=specjax.NGram(4), max_new_tokens=12)


def test_the_dataset_is_what_the_target_says(written, said):
    """The dataset holds the tokens of `generate`, exact counts, hashes, and lines of text."""
    target, wanted = said
    data = dataset.read(written)
    assert [tokens[start:].tolist() for tokens, start in data] == wanted.tokens
    assert target.tokenizer is not None
    assert [tokens[:start].tolist() for tokens, start in data] == [
        target.tokenizer.encode(p).ids for p in PROMPTS
    ]
    manifest = json.loads((written / "dataset.json").read_text())
    assert (manifest["complete"], manifest["sequences"]) == (True, 3)
    assert manifest["new_tokens"] == sum(map(len, wanted.tokens))
    assert manifest["request"]["hashes"] == dataset.model_hashes(TARGET)
    lines = [json.loads(line) for line in (written / "text.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["text"] for line in lines] == wanted.text


def test_an_interrupted_dataset_goes_on(written, tmp_path, prompts):
    """Existing shards stay, missing ones are written as they would have been, and other options
    are refused."""
    out = tmp_path / "data"
    out.mkdir()
    for name in ("00000.safetensors", "dataset.json"):
        (out / name).write_bytes((written / name).read_bytes())
    before = (out / "00000.safetensors").stat().st_mtime_ns
    write(out, prompts)
    assert (out / "00000.safetensors").stat().st_mtime_ns == before
    assert shards(out) == shards(written)
    assert (out / "dataset.json").read_bytes() == (written / "dataset.json").read_bytes()
    with pytest.raises(ValueError, match="new_tokens was 12 and is 5"):
        write(out, prompts, "--max-new-tokens", "5")


def test_likeliest_tokens_are_the_targets(tmp_path, prompts):
    """Ids and log-probabilities at temperature 1 for each new token, whatever was drafted before
    it."""
    out = write(
        tmp_path, prompts, "--temperature", "1", "--top-log-probs", "3", "--num-drafts", "2"
    )
    target = specjax.load(TARGET)
    for path in sorted(out.glob("*.safetensors")):
        shard = safetensors.numpy.load_file(path)
        logits = toys.plain_logits(shard["tokens"], target.model, target.params)
        values, ids = jax.lax.top_k(jax.nn.log_softmax(logits), 3)
        for row, (start, end) in enumerate(
            zip(shard["prompt_length"], shard["length"], strict=True)
        ):
            new = slice(start - 1, end - 1), slice(start, end)
            np.testing.assert_allclose(
                shard["top_log_probs"][row, new[1]], values[row, new[0]], atol=1e-3
            )
            # Almost equal logits may change places.
            assert (shard["top_ids"][row, new[1]] == ids[row, new[0]]).mean() > 0.95
            assert not shard["top_log_probs"][row, :start].any()


def test_a_draft_is_distilled_from_a_dataset(written, tmp_path, capsys):
    """The folder alone is enough; another target, an incomplete dataset and a need for text are
    refused."""
    data = [
        "--target",
        str(TARGET),
        "--data",
        str(written),
        "--sampled-prompt",
        "8",
        "--steps",
        "2",
    ]
    sizes = [*trained.DRAFT_SIZES, "--eval-batches", "1"]
    distill.main([*data, "--out", str(tmp_path / "run"), "--loss", "accepted-length",
                  "--temperature", "0", "--log-every", "1", *sizes])  # fmt: skip
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert options["sampled_fraction"] == 1.0, "there is no text"
    said = capsys.readouterr().out
    assert "note: " not in said
    lines = re.findall(r"step (\d) of 2: loss \S+ .*tokens_per_second \d+  left (\S+)", said)
    assert [step for step, _ in lines] == ["1", "2"] and lines[1][1] == "0:00:00"
    part = ["--sampled-fraction", "0.5"]
    with pytest.raises(ValueError, match="add a folder of text, or pass --sampled-fraction 1"):
        distill.main([*data, "--out", str(tmp_path / "other"), *part, *sizes])
    said = capsys.readouterr().out
    assert "data was drawn with temperature 0, not 1, for which this run learns" in said
    online = ["--online", "--sampled-fraction", "1", "--sampled-prompt", "8"]
    with pytest.raises(ValueError, match=r"--online continues .*: add a folder of text$"):
        distill.main([*data, "--out", str(tmp_path / "other"), *online, *sizes])
    rows = Written.of(dataset.read_masked(written, dataset.model_hashes(TARGET)), 31)
    assert rows.drawn.sum() == json.loads((written / "dataset.json").read_text())["new_tokens"]
    prompts = rows.drawn.argmax(1) + 1
    cuts = dataset.cuts(written)
    assert cuts == (prompts + 12).tolist(), "prompts, and --max-new-tokens"
    rows = Written.of(dataset.read_masked(written, {}), 31, cuts)
    assert rows.limit.tolist() == np.minimum(prompts + 11, 31).tolist()
    assert sources.with_starts(rows, 4).limit.tolist() == rows.limit.tolist()
    with pytest.raises(ValueError, match="--num-drafts 13: every text of the target"):
        sources.with_starts(rows, 13)
    with pytest.raises(ValueError, match="drawn with temperature 0, not 1, and this loss"):
        dataset.read_masked(written, {}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, exact=True)
    with pytest.raises(ValueError, match="another target"):
        dataset.read_masked(written, {"target": "0" * 64})
    manifest = json.loads((written / "dataset.json").read_text())
    half = tmp_path / "half"
    half.mkdir()
    (half / "dataset.json").write_text(json.dumps({**manifest, "complete": False}))
    with pytest.raises(ValueError, match="not complete"):
        dataset.read_masked(half, {})


def test_windows_of_text_are_continued(tmp_path):
    """As many windows as asked for are cut from the corpus."""
    generate.main(["--target", str(TARGET), "--data", str(trained.text()), "--out",
                   str(tmp_path), "--sequences", "3", "--batch-size", "2", "--prompt-tokens", "9",
                   "--max-new-tokens", "12"])  # fmt: skip
    data = dataset.read(tmp_path)
    assert [start for _, start in data] == [9, 9, 9]
    assert json.loads((tmp_path / "dataset.json").read_text())["sequences"] == 3


def test_one_kind_of_prompts(prompts, capsys):
    """Prompts come either from a file or from text."""
    for arguments in ([], ["--prompts", str(prompts), "--data", "."]):
        with pytest.raises(SystemExit):
            generate.main(["--target", "t", *arguments])
        assert "pass --prompts" in capsys.readouterr().err


def test_the_text_is_the_targets_own(prompts, capsys):
    """A rule that changes the distribution is refused."""
    with pytest.raises(SystemExit):
        generate.main(["--target", "t", "--prompts", str(prompts), "--rule", "typical"])
    assert "--rule typical changes the distribution" in capsys.readouterr().err


def test_an_evaluation_is_what_generate_says(tmp_path, prompts, capsys):
    """The sums are those of `generate`'s statistics; a draft equal to the target is always
    accepted."""
    out = tmp_path / "figures.json"
    common = ["--target", str(TARGET), "--prompts", str(prompts), "--max-new-tokens", "12",
              "--num-drafts", "2", "--out", str(out)]  # fmt: skip
    target, draft = (specjax.load(TINY / name) for name in ("target", "draft"))
    stats = specjax.generate(target, PROMPTS, draft=draft, num_drafts=2, max_new_tokens=12).stats
    evaluate.main([*common, "--draft", str(TINY / "draft"), "--batch-size", "3"])
    report = json.loads(out.read_text())
    assert report["new_tokens"] == stats.tokens
    assert report["target_passes"] == stats.target_passes
    assert report["alpha"][0] == pytest.approx(stats.acceptance_rate)
    assert report["tau"][0] == pytest.approx(stats.mean_accepted_length)
    assert None not in report["tau"] and report["tokens_per_second"][1:] == [None, None]
    table = capsys.readouterr().out
    assert "| alpha of draft 2 |" in table
    assert re.search(r"tokens/s \| \d+ \| none: a single sample", table)
    assert table.count("single sample") == 1
    evaluate.main([*common, "--draft", str(TARGET), "--batch-size", "2"])
    report = json.loads(out.read_text())
    assert report["alpha_by_depth"] == [[1, 1, 1], [1, 1, 1]]
    assert report["tokens_per_second"][1] is not None, "two batches"
    assert "single sample" not in capsys.readouterr().out


def test_any_proposer_is_evaluated(tmp_path, prompts):
    """In a tree drafted by the target itself, some sibling is the target's token at every depth."""
    out = tmp_path / "figures.json"
    target = str(TARGET)
    evaluate.main(["--target", target, "--draft", target, "--proposer", "tree", "--branching", "2",
                   "1", "--prompts", str(prompts), "--limit-prompts", "1", "--max-new-tokens", "6",
                   "--out", str(out)])  # fmt: skip
    one = [1, None, None]  # a single prompt has no interval
    assert json.loads(out.read_text())["alpha_by_depth"] == [one, one]


def test_evaluations_are_plotted(tmp_path, prompts):
    """The picture shows alpha by depth."""
    pytest.importorskip("matplotlib")
    figures = {"alpha_by_depth": [(0.5, 0.4, 0.6), None, (0.7, 0.6, 0.8)]}
    evaluate.plot(figures, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_conversations_are_answered(tmp_path):
    """The target's chat template formats them, and no prompt token counts as the target's
    output."""
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    chat = [
        {"role": role, "content": content}
        for role, content in (("user", "hi"), ("assistant", "o"), ("user", "x"))
    ]
    lines = tmp_path / "chats.jsonl"
    lines.write_text(json.dumps({"messages": chat}) + "\n")
    out = tmp_path / "data"
    generate.main(["--target", str(target), "--prompts", str(lines), "--out", str(out),
                   "--batch-size", "2", "--max-new-tokens", "12"])  # fmt: skip
    ((tokens, start),) = dataset.read(out)
    tokenizer = specjax.load(target).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokens[:start].tolist()) == "[u]hi[a]o[u]x>"
    rows = Written.of(dataset.read_masked(out, dataset.model_hashes(target)), 63)
    assert rows.drawn[0].nonzero()[0].tolist() == list(range(start - 1, len(tokens) - 1))
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="another tokenizer"):
        dataset.read_masked(out, dataset.model_hashes(target))


def test_bad_prompts_are_named(tmp_path, capsys):
    """The error names the line and the expected form."""
    target = specjax.load(TARGET)
    path = pathlib.Path(tmp_path / "prompts.jsonl")
    for text, message in [
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: it must be"),
        ("\n", "holds no prompt"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            encode_file(target, path)


def test_intervals():
    """Intervals of a ratio of sums: zero if prompts agree, else about two standard errors."""
    assert interval(np.full(9, 2.0), np.full(9, 4.0)) == (0.5, 0.5, 0.5)
    assert interval(np.ones(3), np.zeros(3)) is None
    values = np.random.default_rng(0).normal(1, 0.2, 400)
    bounds = interval(values, np.ones(400))
    assert bounds is not None
    assert bounds[0] == pytest.approx(values.mean())
    error = 1.96 * values.std() / 20
    assert bounds[1] == pytest.approx(values.mean() - error, abs=0.004)
    assert bounds[2] == pytest.approx(values.mean() + error, abs=0.004)
