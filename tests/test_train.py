"""Training: losses and their gradients, data order, resume bit for bit, and folders that come out."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from train import distill, pretrain
from train.corpus import Source, Tokens, prepare, read_documents
from train.loop import LoopOptions, make_schedule
from train.losses import agreement, chunked, cross_entropy, forward_kl
from train.precision import mixed_dot_general

ROOT = pathlib.Path(__file__).parent.parent
SIZES = [
    *("--vocab-size", "300", "--hidden-size", "32", "--mlp-size", "64", "--num-layers", "1", "--num-heads", "2"),
    *("--num-kv-heads", "1", "--sequence-length", "32", "--batch-size", "4", "--eval-batches", "2"),
]
DRAFT_SIZES = [size for size in SIZES if size not in ("--vocab-size", "300")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a few small files of Python: the library's own."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted((ROOT / "specjax").rglob("*.py"))[:8]:
        (folder / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    return folder


def run(out, text, *more):
    pretrain.main(["--data", str(text), "--out", str(out), "--steps", "20", "--save-every", "10", "--eval-every", "10",
                   "--warmup-steps", "2", "--learning-rate", "0.01", *SIZES, *more])  # fmt: skip
    return pathlib.Path(out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run of 20 steps that nobody interrupted."""
    return run(tmp_path_factory.mktemp("finished") / "run", text)


def metrics(folder):
    """What was measured, but for the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def test_the_held_out_loss_falls(finished):
    """Training learns."""
    assert metrics(finished)[-1]["held_out_loss"] < np.log(300) - 1


def test_the_model_loads_and_writes(finished):
    """The folder that comes out is one that `load` and `generate` take."""
    model = specjax.load(finished / "model")
    assert model.eos == (0,)
    assert len(specjax.generate(model, "def f", max_new_tokens=5).tokens[0]) <= 5


def test_stopped_and_resumed_is_uninterrupted(finished, text, tmp_path):
    """10 steps, then 10 more: the bytes and the metrics of 20."""
    run(tmp_path / "run", text, "--stop-at", "10")
    assert not (tmp_path / "run" / "model").exists()
    resumed = run(tmp_path / "run", text)
    assert weights(resumed) == weights(finished)
    assert metrics(resumed) == metrics(finished)


def test_training_goes_on_from_a_folder(finished, text, tmp_path, capsys):
    """`--initial` starts where another run ended; a folder of other sizes is refused."""
    folder = str(finished / "model")
    run(tmp_path / "run", text, "--initial", folder, "--tokenizer", folder + "/tokenizer.json", "--steps", "1")
    assert metrics(tmp_path / "run")[-1]["held_out_loss"] < 4.6
    with pytest.raises(ValueError, match="give the options its sizes"):
        run(tmp_path / "other", text, "--initial", folder, "--num-layers", "2")


def test_an_interrupt_saves(text, tmp_path):
    """Ctrl-C finishes the step, saves, and says how to go on."""
    command = [sys.executable, "-m", "train.pretrain", "--data", str(text), "--out", str(tmp_path / "run"), "--steps",
               "1000000", "--eval-every", "10", "--save-every", "1000000", *SIZES]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"held_out_loss" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read().decode()
    assert process.returncode == 0, rest
    assert "the same command resumes" in rest
    assert any((tmp_path / "run" / "state").iterdir())


def test_batches_depend_on_the_step_alone(tmp_path):
    """Whoever asks, and in which order; and an epoch covers the stream."""
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(tmp_path / "ids")
    one, two = Tokens(tmp_path / "ids"), Tokens(tmp_path / "ids")
    forward = [one.batch(step, 3, 16, seed=5) for step in range(30)]
    backward = [two.batch(step, 3, 16, seed=5) for step in reversed(range(30))][::-1]
    np.testing.assert_array_equal(forward, backward)
    assert all((np.diff(batch, axis=1) == 1).all() for batch in forward)
    first_epoch = np.concatenate(forward)[: (1000 - 17) // 16]
    assert len(set(first_epoch[:, 0].tolist())) == len(first_epoch)


def test_a_tokenised_corpus_is_not_mixed_up(text, tmp_path):
    """Other settings in the same folder are refused, not silently reused."""
    prepare(Source((str(text),)), tmp_path, 300, None)
    with pytest.raises(ValueError, match="choose another --out"):
        prepare(Source((str(text),)), tmp_path, 400, None)


def test_held_out_text_is_not_trained_on(text, tmp_path):
    """Every document is in one of the two streams, and in one alone."""
    tokenizer, train, held_out = prepare(Source((str(text),)), tmp_path, 300, None)
    parts = [
        tokenizer.decode(t.ids.tolist(), skip_special_tokens=False).split("<|endoftext|>") for t in (train, held_out)
    ]
    documents = {document for _, document in read_documents(Source((str(text),)))}
    assert set(parts[0][1:]) | set(parts[1][1:]) == documents
    assert not set(parts[0][1:]) & set(parts[1][1:])
    assert len(parts[1]) > 1


@pytest.mark.parametrize("files", [{}, {"a.py": b""}, {"a.py": b"\xff\xfe"}, {"a.py": b"x\0y", "b.py": b"z"}])
def test_data_without_text_is_refused(tmp_path, files):
    """Empty, binary or missing files: say how many were found, and that two are needed."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"UTF-8 text files.*at least two"):
        prepare(Source((str(tmp_path),)), tmp_path / "out", 300, None)


def test_a_missing_folder_is_named(tmp_path):
    """The folder, and that it does not exist."""
    with pytest.raises(ValueError, match="nowhere does not exist"):
        prepare(Source((str(tmp_path / "nowhere"),)), tmp_path / "out", 300, None)


@pytest.mark.parametrize("option", ["--steps", "--batch-size", "--sequence-length"])
def test_bad_options_are_usage_errors(option, text, capsys):
    """A number below 1 is named, and nothing starts."""
    with pytest.raises(SystemExit):
        pretrain.main(["--data", str(text), option, "0"])
    assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err


def test_the_schedule_does_not_depend_on_steps_before_it_decays():
    """So that a run can be resumed with more of them."""
    short, long = (make_schedule(LoopOptions(steps=s, warmup_steps=10, decay_fraction=0.2)) for s in (100, 500))
    assert [float(short(s)) for s in range(80)] == [float(long(s)) for s in range(80)]
    assert float(short(100)) == 0.0


KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (37, 8)), jax.random.normal(KEYS[1], (8, 11))
TARGET_HIDDEN, TARGET_HEAD = jax.random.normal(KEYS[2], (37, 6)), jax.random.normal(KEYS[3], (6, 11))
LABELS = jax.random.randint(KEYS[4], (37,), 0, 11)
WEIGHT = (jnp.arange(37) % 3 > 0).astype(jnp.float32)
LOSSES = {
    "cross_entropy": (cross_entropy, (WEIGHT, LABELS), ()),
    "forward_kl": (forward_kl, (WEIGHT, TARGET_HIDDEN), (TARGET_HEAD,)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_a_chunked_loss_is_the_whole_one(name, chunk):
    """Value and gradients, whether or not the chunks divide the rows."""
    loss, rows, shared = LOSSES[name]

    def whole(hidden, head):
        return loss(mixed_dot_general(hidden, head, (((1,), (0,)), ((), ()))), *rows, *shared)

    def cut(hidden, head):
        return chunked(loss, chunk)(hidden, head, rows, shared)

    wanted = jax.value_and_grad(whole, (0, 1))(HIDDEN, HEAD)
    found = jax.value_and_grad(cut, (0, 1))(HIDDEN, HEAD)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def float64(logits):
    logits = np.asarray(logits, np.float64)
    return np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def test_losses_against_float64():
    """Cross-entropy, forward KL, and the two agreements, written out."""
    logits = np.asarray(mixed_dot_general(HIDDEN, HEAD, (((1,), (0,)), ((), ()))))
    target = np.asarray(mixed_dot_general(TARGET_HIDDEN, TARGET_HEAD, (((1,), (0,)), ((), ()))))
    q, p, w = float64(logits), float64(target), np.asarray(WEIGHT)
    wanted = -(w * np.log(q[np.arange(37), LABELS])).sum()
    assert float(cross_entropy(logits, WEIGHT, LABELS)) == pytest.approx(wanted, rel=1e-5)
    wanted = (w * (p * np.log(p / q)).sum(1)).sum()
    assert float(forward_kl(logits, WEIGHT, TARGET_HIDDEN, TARGET_HEAD)) == pytest.approx(wanted, rel=1e-5)
    alpha, same = agreement(logits, WEIGHT, TARGET_HIDDEN, TARGET_HEAD)
    assert float(alpha) == pytest.approx((w * np.minimum(p, q).sum(1)).sum(), rel=1e-5)
    assert float(same) == (w * (p.argmax(1) == q.argmax(1))).sum()


@pytest.mark.parametrize("axis", [0, 1])
def test_mixed_products_round_and_sum_as_they_say(axis):
    """bfloat16 factors, float32 sums, gradients of both factors."""
    x, kernel = HIDDEN[:5], HEAD if axis == 0 else HEAD.T
    dimensions = (((1,), (axis,)), ((), ()))

    def rounded(a):
        return np.asarray(a.astype(jnp.bfloat16), np.float64)

    wanted = rounded(x) @ (rounded(kernel) if axis == 0 else rounded(kernel).T)
    np.testing.assert_allclose(mixed_dot_general(x, kernel, dimensions), wanted, rtol=1e-6, atol=1e-6)
    found = jax.grad(lambda x, k: (mixed_dot_general(x, k, dimensions) ** 2).sum(), (0, 1))(x, kernel)
    plain = jax.grad(lambda x, k: (jax.lax.dot_general(x, k, dimensions) ** 2).sum(), (0, 1))(x, kernel)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.2)


def test_distillation_raises_acceptance(finished, text, tmp_path):
    """A draft that learned from the target agrees with it more than one that has not, and is accepted more."""
    target = str(finished / "model")
    options = ["--target", target, "--data", str(text), "--sampled-sequences", "8", "--sampled-batch", "4",
               "--sampled-prompt", "8", "--learning-rate", "0.01", "--warmup-steps", "2", *DRAFT_SIZES]  # fmt: skip
    rates = []
    for steps in (1, 60):
        out = tmp_path / str(steps)
        distill.main([*options, "--out", str(out), "--steps", str(steps)])
        draft = specjax.load(out / "model")
        output = specjax.generate(
            specjax.load(target), ["import ", "def "], draft=draft, max_new_tokens=20, temperature=1.0
        )
        rates.append((metrics(out)[-1]["held_out_alpha"], output.stats.acceptance_rate))
    assert rates[1][0] > rates[0][0]
    assert rates[1][1] >= rates[0][1]


def test_sampling_goes_on_where_it_stopped(finished, text, tmp_path):
    """Batches that the target has written are kept, and are what it would write again."""
    target = specjax.load(finished / "model")
    _, train, _ = prepare(Source((str(text),)), tmp_path / "corpus", 300, str(finished / "model" / "tokenizer.json"))
    options = distill.DistillOptions(
        target="", data=(), sequence_length=16, sampled_sequences=6, sampled_batch=2, sampled_prompt=4
    )
    whole = distill.sample(target, train, options, tmp_path / "sampled")
    assert whole.shape == (6, 17)
    kept, lost = tmp_path / "sampled" / "00000.npy", tmp_path / "sampled" / "00002.npy"
    before = kept.stat().st_mtime_ns
    lost.unlink()
    np.testing.assert_array_equal(distill.sample(target, train, options, tmp_path / "sampled"), whole)
    assert kept.stat().st_mtime_ns == before
