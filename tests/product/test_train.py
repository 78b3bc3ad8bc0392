"""Whole trainings of a model: they learn, resume bit for bit, and refuse invalid input.  What
interrupts a run is in `test_resume.py`."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trained
from kills import same
from toys import TRANSFORMERS as toys
from trained import metrics

import specjax
from specjax import LinenModel, Transformer
from specjax.models import BLOCK_SLOTS
from specjax.models.rope import Rope
from specjax.training.jobs import pretrain
from specjax.training.shards import digest


def run(out, *more):
    pretrain.main(trained.command(out, *more))
    return pathlib.Path(out)


def test_the_held_out_loss_falls():
    """Training lowers the held-out loss."""
    assert metrics(trained.run())[-1]["held_out_loss"] < np.log(300) - 1


def test_the_model_loads_and_writes():
    """`load` and `generate` accept the exported folder."""
    model = specjax.load(trained.target())
    assert model.eos == (0,)
    assert len(specjax.generate(model, "def f", max_new_tokens=5).tokens[0]) <= 5


def test_a_layer_that_is_computed_again_is_the_same_layer():
    """Rematerialisation changes no gradient."""
    tokens = jnp.array([[1, 2, 3, 4]])
    positions = jnp.arange(4)[None]

    def loss(params, remat):
        model = LinenModel(Transformer(toys.model().module.config, remat=remat))
        return (model.apply(params, tokens, positions).logits ** 2).mean()

    wanted, actual = (
        jax.jit(jax.grad(loss), static_argnums=1)(toys.weights(), remat) for remat in (False, True)
    )
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_sequence_may_be_longer_than_a_block_of_slots(tmp_path):
    """Decoding reads so many slots in a loop, of which JAX has no gradient."""
    text = str(trained.SOURCE / "specjax" / "models")
    length = str(BLOCK_SLOTS + 100)
    more = "--data", text, "--sequence-length", length, "--batch-size", "1", "--eval-batches", "1"
    out = run(tmp_path / "run", "--steps", "2", *more)
    assert np.isfinite(metrics(out)[-1]["held_out_loss"])


def test_too_little_held_out_text_is_refused_before_training(tmp_path):
    """With the longest sequence that it can fill."""
    with pytest.raises(
        ValueError, match=r"held_out.bin has (\d+) tokens: .*more --data, or"
    ) as told:
        run(tmp_path / "run", "--sequence-length", "10000")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    longest = re.findall(r"at most (\d+)$", str(told.value))[0]
    with pytest.raises(ValueError, match=r"held_out.bin has"):
        run(tmp_path / "run", "--sequence-length", str(int(longest) + 1))
    run(tmp_path / "run", "--sequence-length", longest, "--steps", "1")


def test_stopped_and_resumed_is_uninterrupted(tmp_path):
    """10 steps and then 10 more have the bytes and metrics of 20."""
    run(tmp_path / "run", "--stop-at", "10")
    assert not (tmp_path / "run" / "model").exists()
    assert same(run(tmp_path / "run"), trained.run())


def test_training_goes_on_from_a_folder(tmp_path):
    """`--initial` starts from another run's model, with its tokenizer; other sizes and other
    tokens are refused by name."""
    folder = str(trained.target())
    run(tmp_path / "run", "--initial", folder, "--steps", "1")
    assert (
        metrics(tmp_path / "run")[-1]["held_out_loss"]
        < metrics(trained.run())[-1]["held_out_loss"] + 0.3
    )
    with pytest.raises(ValueError, match=r"does not fit --num-layers 2: pass --num-layers 1$"):
        run(tmp_path / "other", "--initial", folder, "--num-layers", "2")
    other = str(trained.SOURCE / "checkpoints" / "tiny" / "draft" / "tokenizer.json")
    with pytest.raises(
        ValueError, match=r"\(300, in .*\) than the tokenizer of this run .*leave out --tokenizer"
    ):
        run(tmp_path / "words", "--initial", folder, "--tokenizer", other)


def saved_model(folder, **changes):
    """A random model of another family with the tests' sizes and tokens, as `save` writes it."""
    target = specjax.load(trained.target())
    config = dataclasses.replace(
        target.model.module.config, family="qwen2", qkv_bias=True, tied_embeddings=False,
        norm_eps=1e-6, **changes,
    )  # fmt: skip
    model = specjax.LinenModel(specjax.Transformer(config))
    params = model.init(jax.random.key(3))
    made = specjax.LanguageModel(model, params, target.tokenizer, (0,), "other")
    specjax.save(made, folder)
    return config


@pytest.mark.parametrize("context", [16, 32, 64])
def test_training_goes_on_from_any_model_of_these_sizes(tmp_path, context):
    """The initial model may have another family, positions, output and context; the result is
    that model with other weights and the longer of the two contexts."""
    rope = Rope(theta=5e5)
    config = saved_model(tmp_path / "model", max_positions=context, rope=rope)
    tokenizer = str(tmp_path / "model" / "tokenizer.json")
    more = ("--initial", str(tmp_path / "model"), "--tokenizer", tokenizer, "--steps", "1")
    trained_model = specjax.load(run(tmp_path / "run", *more) / "model")
    wanted = dataclasses.replace(config, max_positions=max(context, 32))
    assert trained_model.model.module.config == wanted
    before = specjax.load(tmp_path / "model")
    pairs = zip(jax.tree.leaves(trained_model.params), jax.tree.leaves(before.params), strict=True)
    for leaf, other in pairs:
        np.testing.assert_allclose(leaf, other, atol=0.02)


def test_a_context_that_cannot_grow_is_refused(tmp_path):
    """Positions scaled for a context of 16 cannot be extended to 32."""
    saved_model(tmp_path / "model", max_positions=16, rope=Rope(kind="linear", factor=2.0))
    tokenizer = str(trained.target() / "tokenizer.json")
    more = ("--initial", str(tmp_path / "model"), "--tokenizer", tokenizer)
    with pytest.raises(ValueError, match=r"--sequence-length is 32; --initial .* at most 16"):
        run(tmp_path / "run", *more)


@pytest.mark.parametrize("file", ["train.bin", "tokenizer.json"])
def test_changed_inputs_are_refused(tmp_path, file):
    """Changed text or tokenizers are named; --accept-changes continues."""
    shutil.copytree(trained.run(), tmp_path / "run")
    corpus = tmp_path / "run" / "corpus"
    changed, manifest = corpus / file, corpus / "corpus.json"
    before = digest(changed)
    changed.write_bytes(changed.read_bytes() + (b" " * 2))
    with pytest.raises(ValueError, match=f"{file} is not what was tokenised"):
        run(tmp_path / "run")
    # As if other text had been tokenised.
    manifest.write_text(manifest.read_text().replace(before, digest(changed)))
    name = {"train.bin": "text", "tokenizer.json": "tokenizer"}[file]
    with pytest.raises(ValueError, match=rf"the {name} has changed: sha256(.|\n)*--accept-changes"):
        run(tmp_path / "run")
    run(tmp_path / "run", "--accept-changes")


@pytest.mark.parametrize("option", ["--steps", "--batch-size", "--sequence-length"])
def test_bad_options_are_usage_errors(option, capsys):
    """A number below 1 is named, and nothing starts."""
    with pytest.raises(SystemExit):
        pretrain.main(["--data", str(trained.text()), option, "0"])
    assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err
