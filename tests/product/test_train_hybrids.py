"""`train.pretrain`, `train.distill` and `train.drafter` with targets with recurrent layers."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import folders
import pytest
import small_targets
import trained
from trained import metrics

import specjax
from specjax.proposers import StaticTree
from specjax.training.jobs import distill, drafter, pretrain

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
LOOP = ["--steps", "12", "--save-every", "6", "--eval-every", "12", "--log-every", "4",
        "--warmup-steps", "2", "--learning-rate", "0.01", "--sequence-length", "32",
        "--batch-size", "4", "--eval-batches", "1"]  # fmt: skip
PROMPTS = ["def f(", "import os\nimport "]


@functools.cache
def pretrained(family: str) -> pathlib.Path:
    """A target that `train.pretrain` made like a folder of the family."""
    like, out = folders.ROOT / f"like-{family}", trained.ROOT / f"hybrid-{family}"
    specjax.save(small_targets.target(family, 32, 300, 2), like)
    where = ["--data", str(trained.text()), "--out", str(out), "--vocab-size", "300"]
    pretrain.main([*where, "--like", str(like), *LOOP])
    return out


@functools.cache
def target(family: str) -> specjax.LanguageModel:
    return specjax.load(pretrained(family) / "model", "float32")


def learned(out: pathlib.Path) -> bool:
    losses = [line["loss"] for line in metrics(out) if "loss" in line]
    return losses[-1] < losses[0]


def keeps_the_text(family: str, **drafting: Any) -> None:
    for temperature in (0.0, 0.8):
        settings = {"max_new_tokens": 16, "temperature": temperature, "seed": 2}
        plain = specjax.generate(target(family), PROMPTS, **settings)
        out = specjax.generate(target(family), PROMPTS, **settings, **drafting)
        assert out.tokens == plain.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_trained_from_nothing(family):
    """It has the family and the layers of the model that it is like, and its loss falls."""
    config = target(family).model.module.config
    assert config.family == family and [m is not None for m in config.mixers] == [True, False]
    assert learned(pretrained(family))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_is_distilled(family, own, tmp_path):
    """From texts and from what the target writes; a draft of one dense layer, and one of the
    target's own kind."""
    folder = str(pretrained(family) / "model")
    sizes = ["--like", folder] if own else trained.DRAFT_SIZES[:10]
    where = ["--target", folder, "--data", str(trained.text()), "--out", str(tmp_path)]
    answers = ["--sampled-fraction", "0.5", "--sampled-sequences", "16", "--sampled-batch", "4",
               "--sampled-prompt", "8"]  # fmt: skip
    distill.main([*where, *sizes, *LOOP, *answers])
    assert learned(tmp_path)
    draft = specjax.load(tmp_path / "model", "float32")
    keeps_the_text(family, draft=draft, num_drafts=3)
    tree = specjax.make_drafter(target(family), draft, StaticTree, branching=(2, 2))
    keeps_the_text(family, drafter=tree)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_is_trained(family, kind, tmp_path):
    """Its layers are attention and MLPs, whatever the target has."""
    folder = str(pretrained(family) / "model")
    where = ["--target", folder, "--data", str(trained.text()), "--out", str(tmp_path)]
    small = ["--num-layers", "1", "--mlp-size", "32", "--num-drafts", "3", "--taps", "0", "1"]
    drafter.main(["--kind", kind, *where, *small, *LOOP])
    assert learned(tmp_path)
    made = specjax.load_drafter(tmp_path / "model", target(family))
    keeps_the_text(family, drafter=made)
    keeps_the_text(family, drafter=specjax.drafters.arrange(made, None, 6, 2))
