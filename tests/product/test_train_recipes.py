"""Every recipe runs: that its options are the job's, and that two of its steps train a model."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import trained
import yaml

FOLDER = trained.SOURCE / "train" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SHORT = {
    "batch_size": 2, "sequence_length": 64, "eval_batches": 1, "sampled_sequences": 2,
    "sampled_batch": 2, "written_sequences": 2, "eval_prompts": 1, "eval_tokens": 4,
    "vocab_size": 300, "anchors": 0, "draft_vocab_size": 60,
}  # fmt: skip
"""What makes two steps of any recipe short.  Sizes of models stay."""


def job_of(name):
    """The job that the first lines of a recipe name."""
    found = re.search(rf"python -m train\.(\w+) --config train/recipes/{name}\.yaml", text(name))
    assert found, f"{name} does not say how it is run"
    return importlib.import_module(f"specjax.training.jobs.{found[1]}")


def text(name):
    return (FOLDER / f"{name}.yaml").read_text()


def run(name, out, *more):
    job = job_of(name)
    options = next(
        vars(job)[kind]
        for kind in ("PretrainOptions", "DistillOptions", "MedusaOptions", "DrafterOptions")
        if kind in vars(job)
    )
    fields = options.__dataclass_fields__
    given = yaml.safe_load(text(name))
    short = [
        f"{key}={value}" for key, value in SHORT.items()
        if key in fields and (key != "draft_vocab_size" or key in given)
    ]  # fmt: skip
    if "initial" in given:
        more = (*more, "--initial", str(trained.SOURCE / "checkpoints" / "pycode" / "draft"))
    if "tokenizer" in given or ("initial" in given and "target" not in given):
        target = trained.SOURCE / "checkpoints" / "pycode" / "target"
        more = ("--initial", str(target), "--tokenizer", str(target / "tokenizer.json"))
    if "target" not in given and "target" in fields:
        more = (*more, "--target", str(trained.SOURCE / "checkpoints" / "tiny" / "target"))
    job.main([
        "--config", str(FOLDER / f"{name}.yaml"), "--data", str(trained.text()), "--out", str(out),
        "--set", "steps=2", *short, *more,
    ])  # fmt: skip
    return given, json.loads((out / "run.json").read_text())["options"]


ALIKE = {
    "dspark", "pycode-eagle3", "pycode-draft-2", "pycode-target-2", "pycode-medusa", "lk-hybrid",
    "medusa-legacy", "medusa-2-self", "tiny-draft", "tiny-target",
}  # fmt: skip
"""Each runs the job of another recipe with other numbers."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in ALIKE else ()) for x in RECIPES],
)
def test_a_recipe_runs(tmp_path, monkeypatch, name):
    """Its options are in `run.json` as they were resolved, and a model is written."""
    monkeypatch.chdir(trained.SOURCE)
    given, resolved = run(name, tmp_path / "run")
    changed = {*SHORT, "steps", "out", "initial", "tokenizer"}
    for key, value in given.items():
        assert resolved[key] == value or key in changed, key
    assert resolved["steps"] == 2
    assert list((tmp_path / "run" / "model").rglob("*.safetensors"))


def test_the_shipped_models_have_recipes():
    """One for each folder of checkpoints that was trained, and for each published method."""
    checkpoints = trained.SOURCE / "checkpoints"
    for pair in ("pycode", "tiny"):
        for folder in (checkpoints / pair).iterdir():
            if folder.is_dir():
                assert any(name.startswith(f"{pair}-{folder.name}") for name in RECIPES), folder
    methods = {"eagle3", "dflash", "dspark", "distillspec", "gkd", "osd", "lk-hybrid", "lk-alpha"}
    assert methods <= set(RECIPES)
    assert {"medusa-legacy", "medusa-1", "medusa-2", "medusa-2-self"} <= set(RECIPES)
