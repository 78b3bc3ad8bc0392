"""Evaluations of Medusa heads; `test_dataset.py` evaluates other drafts."""

import json

import trained

import specjax
from specjax.training.jobs import evaluate


def test_heads_are_evaluated_on_several_prompts_at_once(tmp_path):
    """One adapter serves any number of rows, and each row has the same figures as alone."""
    prompts = tmp_path / "prompts.jsonl"
    texts = ["import os\n", "def f(x):\n    return"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    target, reports = specjax.load(trained.target()), []
    specjax.save_medusa(tmp_path / "heads", specjax.MedusaAdapter.create(target, 2), "target")
    for batch in ("1", "2"):
        out = tmp_path / f"{batch}.json"
        evaluate.main(["--target", str(trained.target()), "--drafter", str(tmp_path / "heads"),
                       "--prompts", str(prompts), "--max-new-tokens", "6",
                       "--batch-size", batch, "--out", str(out)])  # fmt: skip
        reports.append(json.loads(out.read_text()))
    assert reports[0]["tau"] == reports[1]["tau"]
    assert reports[0]["alpha_by_depth"] == reports[1]["alpha_by_depth"]


def test_lookups_are_evaluated(tmp_path):
    """By default, one prompt at a time: the sums are those of `generate`'s statistics."""
    out, prompts = tmp_path / "figures.json", tmp_path / "prompts.jsonl"
    texts = ["import os\n", "def f(x):\n    return", "class A:\n"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    target = specjax.load(trained.target())
    stats = specjax.generate(target, texts, proposer=specjax.NGram(4), max_new_tokens=12).stats
    evaluate.main(["--target", str(trained.target()), "--prompts", str(prompts),
                   "--max-new-tokens", "12", "--out", str(out)])  # fmt: skip
    report = json.loads(out.read_text())
    assert report["target_passes"] == stats.target_passes
    assert report["alpha"][0] == stats.acceptance_rate
