"""Recordings of a target: what they hold, what is learned from them, and which are refused."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trained
from trained import metrics

from specjax import load
from specjax.training.divergences import DIVERGENCES, acceptance
from specjax.training.jobs import distill, generate, teacher
from specjax.training.jobs.distill import Distill
from specjax.training.recorded import MANIFEST, Recorded
from specjax.training.top import folded, top_of

TARGET, DRAFT = (
    jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(n), (5, 11))) for n in (0, 1)
)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "adaptive"])
def test_a_tail_of_one_outcome(name):
    """Values and gradients are those of distributions that NumPy has cut to k + 1 outcomes; more
    candidates never lower a divergence, and all of them give the whole one."""
    divergence, values = DIVERGENCES[name], []
    for k in (1, 4, 10, 11):
        ids = np.argsort(-np.asarray(TARGET), axis=1)[:, :k]

        def cut(log_probs, ids=ids):
            probs = np.exp(np.asarray(log_probs, np.float64))
            near = np.take_along_axis(probs, ids, 1)
            rest = probs.sum(1, keepdims=True) - near.sum(1, keepdims=True)
            whole = near if ids.shape[1] == 11 else np.concatenate([near, rest], 1)
            return np.log(whole / probs.sum(1, keepdims=True))

        def loss(draft, k=k):
            target, mine = folded(top_of(TARGET, k), jax.nn.log_softmax(draft))
            return divergence(target, mine)

        wanted = divergence(jnp.asarray(cut(TARGET)), jnp.asarray(cut(DRAFT)))
        np.testing.assert_allclose(jax.jit(loss)(DRAFT), wanted, rtol=2e-4, atol=1e-5)
        grads = jax.jit(jax.grad(lambda draft: loss(draft).sum()))(DRAFT)
        step = 1e-2 * np.random.default_rng(k).normal(size=DRAFT.shape).astype(np.float32)
        slope = (loss(DRAFT + step).sum() - loss(DRAFT - step).sum()) / 2
        np.testing.assert_allclose((grads * step).sum(), slope, rtol=0.02, atol=2e-4)
        values.append(np.asarray(wanted))
    assert (np.diff(values, axis=0) >= -1e-6).all()
    np.testing.assert_allclose(values[-1], divergence(TARGET, DRAFT), rtol=1e-4)


def record(out, *more, data=None):
    teacher.main([
        "--target", str(trained.target()), "--data", *map(str, data or [trained.text()]), "--out",
        str(out), "--sequence-length", "32", "--sequences", "40", "--held-out", "8", "--chunk",
        "16", "--batch-size", "8", "--top", "20", *more,
    ])  # fmt: skip
    return pathlib.Path(out)


@functools.cache
def recording():
    return record(trained.ROOT / "teacher")


def run(out, *more, folder=None):
    distill.main([
        "--teacher", str(folder or recording()), "--out", str(out), "--learning-rate", "0.01",
        "--warmup-steps", "2", "--log-every", "1", "--steps", "6", "--eval-every", "2",
        *trained.DRAFT_SIZES, *more,
    ])  # fmt: skip
    return metrics(out)


def shards(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_a_recording_holds_what_the_target_says():
    """Ids and log-probabilities are those of a plain pass; text is not repeated."""
    made = Recorded.open(recording())
    rows = made.rows(list(range(48)))
    assert rows["tokens"].shape == (48, 33) and len(np.unique(rows["tokens"][:40], axis=0)) == 40
    assert not rows["drawn"].any() and (rows["limit"] == 32).all()
    target = load(trained.target())
    tokens = rows["tokens"][::7]
    positions = jnp.broadcast_to(jnp.arange(32), (len(tokens), 32))
    logits = target.model.apply(target.params, tokens[:, :-1], positions).logits
    wanted = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), rows["top_ids"][::7], axis=2
    )
    np.testing.assert_allclose(rows["top_log_probs"][::7], wanted, atol=0.03)  # in bfloat16
    assert (np.diff(rows["top_log_probs"], axis=2) <= 0).all()


def test_the_predicted_bytes_are_those_of_the_files(capsys):
    """To within the headers, and they are printed before anything is read."""
    request = Recorded.open(recording()).request
    for number, content in enumerate(shards(recording()).values()):
        assert request.bytes(number) - 4096 < len(content) <= request.bytes(number)
    record(recording())
    assert (
        "48 sequences of 32 tokens, of each 20 log-probabilities: 0.000 GB"
        in capsys.readouterr().out
    )


def test_an_interrupted_recording_goes_on(tmp_path, capsys):
    """Missing and damaged chunks are written as they were; a chunk that is whole is not touched."""
    folder, wanted = shutil.copytree(recording(), tmp_path / "teacher"), shards(recording())
    first = folder / "00000.safetensors"
    (folder / "00002.safetensors").unlink()
    damaged = bytearray(wanted["00001.safetensors"])
    damaged[-3] ^= 1
    (folder / "00001.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"00001\.safetensors has changed .*: delete it, and run"):
        run(tmp_path / "run", folder=folder)
    before = first.stat().st_mtime_ns
    record(folder)
    assert shards(folder) == wanted and first.stat().st_mtime_ns == before
    assert "it is written again" in capsys.readouterr().out


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    """The bytes are compared before a chunk is written."""
    free = shutil._ntuple_diskusage(100, 100, 1000)
    monkeypatch.setattr("specjax.training.recorded.shutil.disk_usage", lambda folder: free)
    with pytest.raises(ValueError, match=r"needs 0\.000 GB more, and the disk has 0\.000 GB: pass"):
        record(tmp_path / "teacher")
    assert not shards(tmp_path / "teacher") and not (tmp_path / "teacher" / MANIFEST).exists()


@pytest.mark.parametrize("loss", ["forward-kl", "log-acceptance"])
def test_the_loss_is_that_of_the_target(tmp_path, loss):
    """With all 300 tokens recorded it is the loss beside the target on the same batch; with 20 it
    is that of the target with --top 20."""
    for top in (300, 20):
        folder = record(tmp_path / f"{top}", "--top", str(top), "--temperature", "0.8")
        options = distill.DistillOptions(
            teacher=str(folder), loss=loss, temperature=0.8, sequence_length=32, batch_size=4,
            hidden_size=16, mlp_size=16, num_heads=2, num_kv_heads=1, out=str(tmp_path / "run"),
        )  # fmt: skip
        job = distill.make_job(options)
        assert job.frozen == {} and job.target.params == {}
        batch, params = job.batch(3), job.init()
        target = load(trained.target())
        beside = Distill(job.options, target, job.material, job.draft)
        others = {"own": np.zeros(4, bool)}
        loss_of = (jax.jit(jax.value_and_grad(j.loss, has_aux=True)) for j in (job, beside))
        (value, _), grads = next(loss_of)(params, {}, batch)
        (wanted, _), wanted_grads = next(loss_of)(params, target.params, {**batch, **others})
        assert float(value) == pytest.approx(float(wanted), rel=1e-4)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=0.02, atol=1e-4)


def test_the_bounds_of_the_evaluation(tmp_path):
    """They enclose what an evaluation beside the target measures on the same text."""
    options = distill.DistillOptions(
        teacher=str(recording()), sequence_length=32, hidden_size=16, mlp_size=16, num_heads=2,
        num_kv_heads=1, eval_batches=2, out=str(tmp_path),
    )  # fmt: skip
    job = distill.make_job(options)
    params, target = job.init(), load(trained.target())
    report = job.evaluate(params)
    held = job.material.test(32, 8)[0]
    positions = jnp.broadcast_to(jnp.arange(32), (8, 32))
    p, q = (
        jax.nn.log_softmax(model.apply(arrays, held["tokens"][:, :-1], positions).logits)
        for model, arrays in ((target.model, target.params), (job.draft, params))
    )
    alpha, kl = float(acceptance(p, q).mean()), float(DIVERGENCES["forward-kl"](p, q).mean())
    assert report["held_out_alpha_at_least"] < alpha < report["held_out_alpha_at_most"]
    assert 0.3 * kl < report["held_out_kl_at_least"] < kl


def test_learning_from_a_recording(tmp_path, monkeypatch):
    """No target is loaded; the bound of KL falls; and a resumed run has the same bytes."""

    def none(*arguments, **named):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("specjax.training.recordings.load_target", none)
    lines = run(tmp_path / "whole")
    values = [line["held_out_kl_at_least"] for line in lines if "held_out_kl_at_least" in line]
    assert values[-1] < values[0] - 0.05
    run(tmp_path / "cut", "--stop-at", "3")
    assert run(tmp_path / "cut") == lines
    whole, cut = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    draft = load(tmp_path / "whole" / "model")
    target = load(trained.target())
    assert draft.eos == target.eos and draft.model.max_positions == target.model.max_positions
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["inputs"]["target"]


def test_answers_that_the_target_wrote(tmp_path):
    """Sequences of train.generate keep their masks; both kinds come in their shares; tau needs the
    target, which is then loaded."""
    generate.main([
        "--target", str(trained.target()), "--data", str(trained.text()), "--out",
        str(tmp_path / "data"), "--sequences", "12", "--prompt-tokens", "8", "--max-new-tokens",
        "20", "--batch-size", "4",
    ])  # fmt: skip
    folder = record(
        tmp_path / "teacher", "--sequences", "6", data=[trained.text(), tmp_path / "data"]
    )
    made = Recorded.open(folder)
    assert made.request.counts == (6, 12, 8)
    drawn = made.rows(list(range(6, 18)))["drawn"]
    assert drawn.any(1).all() and not drawn[:, :7].any()
    mixed, whole = made.batches(4, 0.5, 0)[1], made.batches(4, 0.5, 0, whole=True)
    assert mixed["drawn"].any(1).tolist() == [True, False, True, False]
    assert [whole[step]["drawn"].any(1).sum() for step in range(4)] == [4, 0, 4, 0]
    assert mixed["number"].tolist() == [4, 5, 6, 7]
    lines = run(
        tmp_path / "run", "--target", str(trained.target()), "--eval-prompts", "2",
        "--eval-tokens", "8", "--sampled-prompt", "8", "--steps", "1", folder=folder,
    )  # fmt: skip
    assert "tau" in lines[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperature", "0.5"), "recorded with --temperature 1.0, and this run has --temp"),
        (("--sequence-length", "16"), "with --sequence-length 32, and"),
        (("--top", "30"), "--top is 30; --teacher .* has 20 log-probabilities"),
        (("--sampled-fraction", "0.5"), "has 40 sequences of text and 0 with answers"),
        (("--initial", "TINY"), "has other tokens .* than --target .*teacher"),
        (("--target", "OTHER"), "recorded with another target .* than that of --target"),
    ],
)
def test_recordings_that_do_not_fit_are_refused(tmp_path, more, message):
    """The error names the recording, what it was made with, and the cure."""
    if "OTHER" in more:
        other = shutil.copytree(trained.target(), tmp_path / "other")
        folders.edit(other, "config.json", rms_norm_eps=0.5)
        more = ("--target", str(other))
    more = [str(trained.SOURCE / "checkpoints/tiny/draft") if m == "TINY" else m for m in more]
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", *more)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"online": True}, "--online asks the target during training, and --teacher x"),
        ({"loss": "accepted-length"}, "--loss accepted-length asks the target"),
        ({"early_exit": 1}, "--early-exit asks the target"),
        ({"data": ("y",)}, "leave out --data"),
        ({"eval_prompts": 2}, "--eval-prompts measures tau with the target: pass --target"),
        ({"from_layers": (0,)}, "--from-layers takes weights of the target: pass --target"),
        ({"teacher": None}, "pass --target and --data, or --teacher with a folder"),
    ],
)
def test_options_that_need_the_target(changes, message):
    with pytest.raises(ValueError, match=message):
        distill.make_job(distill.DistillOptions(**{"teacher": "x", **changes}))


def test_a_folder_that_is_no_recording(tmp_path):
    with pytest.raises(ValueError, match=r"has no teacher\.json: make it with specjax train"):
        run(tmp_path / "run", folder=trained.target())
    folder = shutil.copytree(recording(), tmp_path / "teacher")
    folders.edit(folder, MANIFEST, complete=False)
    with pytest.raises(ValueError, match=r"teacher is not complete: run the train\.teacher"):
        run(tmp_path / "run", folder=folder)
    folders.edit(folder, MANIFEST, complete=True)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not what was written there"):
        run(tmp_path / "run", folder=folder)
    with pytest.raises(ValueError, match=r"another request:\n  top was 20 and is 21"):
        record(recording(), "--top", "21")
