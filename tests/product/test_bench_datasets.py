"""`specjax bench --dataset`: its tables, and the files that vLLM's and aiperf's tools read."""

import json
import shutil

import benchmark_files
import pytest
from command_line import PAIR, TINY, run

import specjax

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}import {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return benchmark_files.write(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The tiny target with a chat template, and with sampling as its default."""
    made = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(TINY / "target", made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"do_sample": True, "temperature": 0.7}
    (made / "generation_config.json").write_text(json.dumps(settings))
    return made


def acceptance_matrix(folder):
    """What aiperf's report makes of a folder of runs: {model: {category: AL}}, from the records."""
    table = {}
    for run_ in sorted(folder.iterdir()):
        profile = json.loads((run_ / "profile_export_aiperf.json").read_text())
        config = profile["input_config"]
        assert config["datasets"][0]["format"].startswith(("speed_bench_", "spec_al_"))
        totals = {}
        for line in (run_ / "profile_export.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert record["error"] is None and record["metadata"]["benchmark_phase"] != "warmup"
            spec = record["spec_decode_acceptance"]
            counts = [spec[f"num_{n}"] for n in
                      ("accepted_draft_tokens", "draft_tokens", "spec_steps")]  # fmt: skip
            assert all(type(n) is int and n >= 0 for n in counts) and counts[0] <= counts[1]
            into = totals.setdefault(record["metadata"]["source_kind"], [0, 0, 0])
            for n, value in enumerate(counts):
                into[n] += value
        table[config["models"]["items"][0]["name"]] = {
            name: 1 + accepted / steps for name, (accepted, _, steps) in totals.items() if steps
        }
    return table


def test_speed_bench(capsys, folder, tmp_path):
    """A row for every category, at temperature 0 and 1; both files agree with the report."""
    arguments = ["--num-drafts", 3, "--rounds", 0, "--max-new-tokens", 16, "--temperatures", 0, 1]
    files = ["--save-vllm", tmp_path / "vllm.json", "--save-aiperf", tmp_path / "runs"]
    asked = ["bench", *PAIR, "--dataset", "speed-bench", "--dataset-path", folder / "speed-bench"]
    asked += ["--proposers", "draft", *arguments]
    report = json.loads(run(capsys, *asked, *files, "--json").out)
    assert report["dataset"] == "speed-bench" and report["prompts"] == 6
    drafted = [row for row in report["categories"] if row["drafted"]]
    names = benchmark_files.CATEGORIES
    assert [(r["temperature"], r["category"]) for r in drafted] == [
        (t, name) for t in (0.0, 1.0) for name in names
    ]
    assert all(row["same_tokens"] == row["prompts"] == 2 for row in drafted)
    table = acceptance_matrix(tmp_path / "runs")
    assert [al for each in table.values() for al in each.values()] == pytest.approx(
        [row["acceptance_length"][0] for row in drafted]
    )
    results = [json.loads(line) for line in (tmp_path / "vllm.json").read_text().splitlines()]
    rows = [row for row in report["rows"] if row["drafted"]]
    for result, row in zip(results, rows, strict=True):
        length = row["acceptance_length"][0]
        assert result["spec_decode_acceptance_length"] == pytest.approx(length)
        drafts, accepted = (
            result[f"spec_decode_{name}"] for name in ("num_drafts", "accepted_tokens")
        )
        assert 1 + accepted / drafts == pytest.approx(length)
        proposed = result["spec_decode_draft_tokens"]
        assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / proposed)
        assert 9 * 8 < result["total_output_tokens"] <= 9 * 16
    rates = results[0]["spec_decode_per_position_acceptance_rates"]
    assert 1 + sum(rates) == pytest.approx(rows[0]["acceptance_length"][0])
    assert rates == sorted(rates, reverse=True)
    printed = run(capsys, *asked, "--categories", "math", "--limit-prompts", 1).out
    assert "| math | 1 |" in printed and "coding" not in printed


def test_thinking_and_the_models_own_sampling(capsys, folder, chatty):
    """By default at temperature 0 and at the target's own; thinking changes the prompt."""
    asked = ["bench", "--target", chatty, "--dataset", "mt-bench", "--dataset-path",
             folder / "mt-bench", "--proposers", "ngram", "--num-drafts", 2, "--rounds", 0,
             "--max-new-tokens", 12, "--thinking", "on", "off", "--json"]  # fmt: skip
    report = json.loads(run(capsys, *asked).out)
    kinds = [(r["temperature"], r["thinking"]) for r in report["rows"] if r["drafted"]]
    assert kinds == [(t, thinking) for t in (0.0, 0.7) for thinking in ("on", "off")]
    assert all(row["same_tokens"] == 1 for row in report["rows"])
    target = specjax.load(chatty)
    texts = [
        specjax.generate(target, messages=[{"role": "user", "content": "import os"}],
                         chat_template_kwargs={"enable_thinking": on}, max_new_tokens=12,
                         temperature=0).tokens
        for on in (True, False)
    ]  # fmt: skip
    assert texts[0] != texts[1]


def test_accuracy_stands_beside_speed(capsys, folder):
    """For every row; the tiny target is right nowhere, and says so."""
    for name, more in (("gsm8k", []), ("humaneval", ["--run-code"])):
        asked = [
            "bench",
            *PAIR[:2],
            "--dataset",
            name,
            "--dataset-path",
            folder / name,
            "--accuracy",
        ]
        asked += ["--proposers", "ngram", "--num-drafts", 2, "--rounds", 0, *more]
        report = json.loads(run(capsys, *asked, "--max-new-tokens", 8, "--json").out)
        assert [row["accuracy"][0] for row in report["rows"]] == [0.0, 0.0]
        assert "| accuracy |" in run(capsys, *asked, "--max-new-tokens", 8).out


def test_synthetic_acceptance(capsys):
    """The length is as asked, and every line says that the text is not the target's."""
    asked = ["bench", "def f(", *PAIR, "--proposers", "draft", "--num-drafts", 4, "--rounds", 0,
             "--max-new-tokens", 100, "--synthetic-acceptance-length", 3]  # fmt: skip
    report = json.loads(run(capsys, *asked, "--json").out)
    row = report["rows"][1]
    assert (row["rule"], row["exact"], row["same_tokens"]) == ("synthetic", False, None)
    assert row["acceptance_length"][0] == pytest.approx(3, abs=0.1)
    printed = run(capsys, *asked).out
    assert "synthetic (exact=False)" in printed and "texts are worthless" in printed
