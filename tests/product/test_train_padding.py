"""Drafts whose vocabulary is padded to another size than the target's."""

from __future__ import annotations

import dataclasses

import folders
import jax
import jax.numpy as jnp
import pytest
import trained
from trained import metrics

import specjax
from specjax.models import LanguageModel, LinenModel, Transformer
from specjax.training.jobs import distill


def padded(folder, size):
    """The tests' target with another number of rows of its embedding and output matrix."""
    target = specjax.load(trained.target())
    config = dataclasses.replace(target.model.module.config, vocab_size=size)
    model = LinenModel(Transformer(config))
    fresh = model.init(jax.random.key(0))

    def grown(mine, theirs):
        rows = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape, theirs.shape, strict=True))
        return mine.at[rows].set(theirs[rows])

    params = jax.tree.map(grown, fresh, {name: target.params[name] for name in fresh})
    made = LanguageModel(model, params, target.tokenizer, target.eos, "padded")
    specjax.save(made, folder, dtype=jnp.float32)
    return folder


def run(out, *more):
    distill.main([
        "--target", str(trained.target()), "--data", str(trained.text()), "--out", str(out),
        "--sampled-fraction", "0", "--sampled-prompt", "8", "--learning-rate", "1e-6",
        "--warmup-steps", "0", "--log-every", "1", "--steps", "2", "--sequence-length", "32",
        "--batch-size", "4", "--eval-batches", "1", "--eval-prompts", "2", "--eval-tokens", "8",
        *more,
    ])  # fmt: skip
    return metrics(out)


@pytest.mark.parametrize("more", [(), ("--online", "--num-drafts", "2"), ("--top", "20")])
def test_a_draft_whose_vocabulary_is_padded(tmp_path, more):
    """The target itself with more rows than it has tokens: nothing is left to learn, every draft
    is accepted, and the folder keeps its size."""
    initial = padded(tmp_path / "initial", 384)
    lines = run(tmp_path / "run", "--initial", str(initial), *more)
    assert lines[0]["loss"] == pytest.approx(0, abs=2e-3)
    assert lines[-1]["held_out_alpha"] > 0.98 and lines[-1]["tau"] > 2
    assert specjax.load(tmp_path / "run" / "model").model.vocab_size == 384


def test_a_target_whose_vocabulary_is_padded(tmp_path):
    """The ids behind the draft's have no share in the loss, however likely they are."""
    more = ("--target", str(padded(tmp_path / "target", 384)), "--initial", str(trained.target()))
    lines = run(tmp_path / "run", *more)
    assert lines[0]["loss"] == pytest.approx(0, abs=2e-3) and lines[-1]["held_out_alpha"] > 0.98
    assert specjax.load(tmp_path / "run" / "model").model.vocab_size == 300


def test_other_vocabularies_are_refused(tmp_path):
    """What counts is what an id means.  A size alone says nothing, and some jobs need an equal
    one."""
    with pytest.raises(ValueError, match=r"has other tokens \(290, in a vocabulary of 304\)"):
        run(tmp_path / "run", "--initial", str(folders.draft()))
    initial = padded(tmp_path / "initial", 384)
    with pytest.raises(ValueError, match=r"padded to 384 and not to 300, which --draft-fraction"):
        run(tmp_path / "own", "--initial", str(initial), "--draft-fraction", "0.5")
    (initial / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has other tokens .* in a vocabulary of 384\) than"):
        run(tmp_path / "none", "--initial", str(initial))
