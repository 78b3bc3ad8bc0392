"""Drafters that learn from recorded hidden states: the same as beside the target, without it."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import trained
from trained import metrics

import specjax
from specjax.drafters import load_drafter
from specjax.training import tables
from specjax.training.jobs import drafter, medusa, teacher
from specjax.training.recorded import MANIFEST, STATES, Recorded
from specjax.training.shards import read_shard

SMALL = ["--num-layers", "1", "--mlp-size", "32", "--num-drafts", "3", "--markov-rank", "8",
         "--sequence-length", "32", "--batch-size", "4", "--eval-batches", "2", "--steps", "8",
         "--save-every", "4", "--eval-every", "8", "--log-every", "1", "--warmup-steps", "2",
         "--learning-rate", "0.01"]  # fmt: skip
HEADS = ["--num-heads", "2", "--sequence-length", "32", "--batch-size", "4", "--eval-batches", "2",
         "--steps", "8", "--save-every", "4", "--log-every", "1", "--warmup-steps", "2",
         "--tree-nodes", "4", "--written-prompt", "8", "--learning-rate", "0.01"]  # fmt: skip


def record(out, *more, data=None):
    teacher.main([
        "--target", str(trained.target()), "--data", *map(str, data or [trained.text()]), "--out",
        str(out), "--sequence-length", "32", "--sequences", "40", "--held-out", "8", "--chunk",
        "16", "--batch-size", "8", *more,
    ])  # fmt: skip
    return pathlib.Path(out)


@functools.cache
def recording():
    """Taps of all kinds of drafters, and the embedding."""
    return record(trained.ROOT / "states", "--drafters", "eagle3", "dspark", "--taps", "0")


def learn(kind, out, *more, folder=None):
    """A run from a recording, whose target is not there."""
    where = ["--teacher", str(folder or recording()), "--out", str(out)]
    if kind == "medusa":
        drafter.main(["--kind", kind, *where, *HEADS, *more])
    else:
        drafter.main(["--kind", kind, *where, *SMALL, *more])
    return metrics(pathlib.Path(out))


def weights(run):
    return next((run / "model").glob("*.safetensors")).read_bytes()


def test_a_recording_of_hidden_states(capsys):
    """States are those of a plain pass, in bfloat16; the bytes were predicted; candidates are left
    out, and the tables that drafters share are there."""
    made = Recorded.open(recording(), (STATES,))
    request = made.request
    assert request.taps == (0, 1) and request.top == 0 and request.state_size == 3 * 16
    rows = made.tapping((1,)).rows([0, 17, 47])
    target = specjax.load(trained.target(), "float32")
    positions = np.broadcast_to(np.arange(32), (3, 32))
    out = target.model.apply(target.params, rows["tokens"][:, :-1], positions, taps=(1,))
    wanted = np.concatenate([out.hidden, out.features], axis=-1)
    np.testing.assert_allclose(rows[STATES].astype(np.float32), wanted, atol=0.06, rtol=0.02)
    for number in range(3):
        size = (recording() / f"{number:05d}.safetensors").stat().st_size
        assert request.bytes(number) - 4096 < size <= request.bytes(number)
    assert "top_ids" not in read_shard(recording() / "00000.safetensors")
    shared = tables.unpacked(recording(), target.model, None)
    assert set(shared) == {"embedding", "norm"}  # the output matrix is the embedding
    for name, part in shared.items():
        jax.tree.map(np.testing.assert_array_equal, part, target.params[name])
    counts, seen = made.token_counts(), made.rows(list(range(40)))["tokens"][:, 1:]
    np.testing.assert_array_equal(counts, np.bincount(seen.reshape(-1), minlength=300))
    capsys.readouterr()
    record(recording(), "--drafters", "eagle3", "dspark", "--taps", "0")
    printed = capsys.readouterr().out
    assert "of each the last hidden state and those of the layers 0 1: 0.000 GB" in printed


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_drafter_learns_without_its_target(kind, tmp_path, monkeypatch):
    """Loss and gradient are those beside the target on the same sequences; the run resumes to the
    same bytes; and the folder drafts for the target without changing a token."""
    job = drafter.make_job(drafter.DrafterOptions(
        kind=kind, teacher=str(recording()), out=str(tmp_path / "job"), num_drafts=3,
        sequence_length=32, batch_size=4, num_layers=1, mlp_size=32, markov_rank=8,
    ))  # fmt: skip
    target = specjax.load(trained.target(), "float32")
    beside = drafter.TrainDrafter(job.options, target, job.material, job.learner, job.known)
    batch, params = job.batch(2), job.init()
    assert "layers_0" not in job.frozen and len(job.frozen) <= 3
    plain = {name: batch[name] for name in ("tokens", "drawn", "number")}
    ours, theirs = (
        jax.jit(jax.value_and_grad(each.loss, has_aux=True))(params, each.frozen, rows)
        for each, rows in ((job, batch), (beside, plain))
    )
    assert float(ours[0][0]) == pytest.approx(float(theirs[0][0]), rel=2e-3)
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * float(np.abs(b).max()) + 1e-6)

    def none(*arguments, **named):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("specjax.training.recordings.load_target", none)
    lines = [line for line in learn(kind, tmp_path / "whole") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    learn(kind, tmp_path / "cut", "--stop-at", "4")
    learn(kind, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    made = load_drafter(tmp_path / "whole" / "model", target)
    prompts = ["def f(", "import os\nimport "]
    output = specjax.generate(target, prompts, drafter=made, max_new_tokens=12)
    assert output.tokens == specjax.generate(target, prompts, max_new_tokens=12).tokens


def test_heads_learn_without_their_target(tmp_path, monkeypatch):
    """As for other drafters; ranks are those of a pass of the target."""

    def none(*arguments, **named):
        raise AssertionError("a target was loaded")

    job = medusa.make_job(medusa.MedusaOptions(
        teacher=str(recording()), out=str(tmp_path / "job"), num_heads=2, sequence_length=32,
        batch_size=4, written_prompt=8,
    ))  # fmt: skip
    target = specjax.load(trained.target(), "float32")
    beside = medusa.TrainMedusa(job.options, target, job.material, job.adapter)
    batch, params = job.batch(1), job.init()
    ours, theirs = (
        jax.jit(each.loss)(params, each.frozen, batch)[0] for each in (job, beside)
    )  # fmt: skip
    assert float(ours) == pytest.approx(float(theirs), rel=2e-3)
    drawn, ranks = job.held_out(0, params, job.frozen)
    tokens = job.material.test(32, 4)[0]["tokens"]
    wanted = beside._ranks(params, target.params, tokens[:, :-1])
    assert ranks.shape == wanted.shape and not drawn.any()
    assert (np.abs(ranks - wanted) <= 2).mean() > 0.8  # of 300 that are nearly as likely
    monkeypatch.setattr("specjax.training.recordings.load_target", none)
    learn("medusa", tmp_path / "run", "--steps", "24", "--save-every", "24")
    made = specjax.load_medusa(tmp_path / "run" / "model", target)
    loss = jax.jit(job.loss)
    after, before = (
        sum(float(loss(heads, job.frozen, job.batch(step))[0]) for step in range(10))
        for heads in (jax.tree.map(lambda x: x.astype(np.float32), made.params), params)
    )
    assert after < 0.995 * before


def test_a_reduced_vocabulary_and_measured_drafts(tmp_path):
    """Counts come from the recording; with the target beside it, tau is measured."""
    lines = learn(
        "eagle3", tmp_path / "run", "--draft-vocab-size", "60", "--target", str(trained.target()),
        "--eval-prompts", "2", "--eval-tokens", "8", "--sampled-prompt", "8",
    )  # fmt: skip
    assert lines[-1]["tau"] >= 1
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"target", "tokenizer", "teacher"} <= set(run["inputs"])


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("eagle3", ["--taps", "0", "2"], "--taps names 2, and the target has 1 layers"),
        ("eagle3", ["--sequence-length", "16"], "recorded with --sequence-length 32, and"),
        ("eagle3", ["--online"], "--online asks the target during training"),
        ("eagle3", ["--keep-features", "1"], "--keep-features asks the target"),
        ("eagle3", ["--data", "x"], "leave out --data"),
        ("eagle3", ["--eval-prompts", "2"], "--eval-prompts measures tau with the target"),
        ("medusa", ["--lora-rank", "2"], "--lora-rank asks the target"),
        ("medusa", ["--isolate-documents"], "recorded with --no-isolate-documents, and"),
    ],
)
def test_runs_that_a_recording_cannot_teach(kind, more, message, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as caught:
        learn(kind, tmp_path / "run", *more)
    assert message in capsys.readouterr().err + str(caught.value)


def test_recordings_without_states_are_refused(tmp_path, capsys):
    """Each kind of run names what it lacks, and how to record it; options that record nothing, or
    what no drafter can use, are refused before a target is loaded."""
    candidates = record(tmp_path / "top", "--top", "4", "--sequences", "2")
    with pytest.raises(ValueError, match=r"has no hidden states, .* again with --drafters KIND"):
        learn("dflash", tmp_path / "run", folder=candidates)
    with pytest.raises(ValueError, match=r"no log-probabilities, .* record it again with --top"):
        drafter.main([
            "--kind", "model", "--teacher", str(recording()), "--out", str(tmp_path / "model"),
            "--sequence-length", "32",
        ])  # fmt: skip
    some = record(tmp_path / "some", "--drafters", "medusa", "--sequences", "2")
    assert json.loads((some / MANIFEST).read_text())["request"]["taps"] == []
    with pytest.raises(ValueError, match=r"layers none beside the last, and this drafter reads 1"):
        learn("eagle3", tmp_path / "run", folder=some)
    for more, message in (
        (["--top", "0"], "--top 0 records nothing"),
        (["--taps", "0", "--dtype", "int8"], "which --dtype int8 has rounded"),
        (["--taps", "7"], "--taps names 7, and the target has 1 layers"),
        (["--drafters", "nothing"], "invalid choice 'nothing' for argument '--drafters'"),
    ):
        with pytest.raises((SystemExit, ValueError)) as caught:
            record(tmp_path / "none", *more)
        assert message in capsys.readouterr().err + str(caught.value)
    damaged = (recording() / tables.FILE).read_bytes()
    try:
        (recording() / tables.FILE).write_bytes(damaged[:-1] + b"!")
        with pytest.raises(ValueError, match=r"shared\.safetensors is not what was written"):
            learn("eagle3", tmp_path / "run")
    finally:
        (recording() / tables.FILE).write_bytes(damaged)
