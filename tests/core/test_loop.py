"""The training loop and optimizer on ten numbers: accumulation, rates, averages, early stops,
failures and records.  What stops and resumes is in `test_resume.py`."""

from __future__ import annotations

import dataclasses
import gc
import json
import resource
import sys
import time
import types

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kills import same
from quadratic_job import SIZE, Quadratic, exported, metrics, second, settings, train

from specjax.training import curves, record
from specjax.training.loop import LoopOptions, fit
from specjax.training.optimizer import gradient, make_schedule


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run without any disturbance, whose optimizer `fit` makes."""
    out = tmp_path_factory.mktemp("quadratic") / "run"
    fit(Quadratic(), settings(out))
    return out


def test_parts_of_a_batch_are_the_batch():
    """Loss, metrics and gradient of unequal parts add up to those of the batch."""
    x, y = (np.random.default_rng(n).normal(size=(8, 5)).astype(np.float32) for n in (0, 1))
    batch = {"x": x, "y": y, "weight": (np.arange(8) % 3).astype(np.float32)}

    def loss(params, frozen, batch):
        each = ((batch["x"] @ params - batch["y"][:, 0]) ** 2) * batch["weight"]
        total = batch["weight"].sum()
        return each.sum() / total, {"weight": total, "twice": 2 * each.sum() / total}

    params = jnp.arange(5.0)
    whole, cut = (gradient(loss, parts, params, None, batch) for parts in (1, 4))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


LONGEST = jnp.arange(1001)  # of one shape, so that no other operations are compiled
WARMUPS = [*({"warmup_steps": n} for n in (0, 2, 200)), {"warmup_fraction": 0.6}]


@pytest.mark.parametrize("warmup", WARMUPS, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_rate_rises_once_and_falls_once(kind, decay, warmup):
    """The rate rises to its peak and falls to 0 after the last step without a jump, whatever
    part of warm-up and decay fits into the run."""
    for steps in (1, 2, 3, 7, 50, 200, 250, 1000):
        changes = {"steps": steps, "schedule": kind, "decay_fraction": decay, **warmup}
        made = jax.vmap(make_schedule(LoopOptions(learning_rate=1.0, **changes)))
        rate = np.asarray(made(LONGEST), np.float64)[: steps + 1]
        peak, change = int(rate.argmax()), np.diff(rate)
        assert rate.max() == pytest.approx(1) and rate[-1] == pytest.approx(0, abs=1e-6), steps
        assert (change[:peak] >= 0).all() and (change[peak:] <= 1e-6).all(), steps
        # Neither part gets less than the smaller of its request and half of the run.
        half, asked = max(1, steps // 2), warmup.get("warmup_steps", round(0.6 * steps))
        assert (rate[0] == 0) == (asked > 0 and steps > 1), steps
        assert change.max() <= 1 / max(1, min(asked, half)) + 1e-6, steps
        assert -change.min() <= np.pi / 2 / max(1, min(round(decay * steps), half)) + 1e-6, steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 0.0}, "--clip is 0.0; it must be greater than 0"),
        ({"clip": np.nan}, "--clip is nan"),
        ({"learning_rate": -1.0}, "--learning-rate is -1.0; it must be greater than 0"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0; it must be greater than 0"),
        ({"learning_rate": np.nan}, "--learning-rate is nan; it must be a finite number"),
        ({"learning_rate": np.inf}, "--learning-rate is inf; it must be a finite number"),
        ({"ema": 1.0}, r"--ema is 1.0; it must lie in \[0, 1\)"),
        ({"ema": np.nan}, "--ema is nan"),
        ({"warmup_steps": -5}, "--warmup-steps is -5; it must be at least 0"),
        ({"warmup_fraction": 1.5}, r"--warmup-fraction is 1.5; it must lie in \[0, 1\]"),
        ({"decay_fraction": -0.1}, r"--decay-fraction is -0.1; it must lie in \[0, 1\]"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1; it must be at least 0"),
        ({"seed": -1}, "--seed is -1; it must lie in"),
        ({"seed": 1 << 32}, "--seed is 4294967296; it must lie in"),
        ({"patience": -1}, "--patience is -1; it must be at least 0"),
        ({"batch_size": 6, "accumulate": 4}, "--accumulate is 4; it must divide"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(changes, message):
    """The error names the option before anything runs."""
    with pytest.raises(ValueError, match=message):
        LoopOptions(**changes)


def test_the_rate_is_logged(tmp_path, capsys):
    """The log has the rate of the step; a message says if the warm-up was shortened."""
    changes = {"warmup_steps": 100, "learning_rate": 1e-7, "log_every": 1, "decay_fraction": 0.25}
    train(tmp_path, steps=8, **changes)
    rates = [line["learning_rate"] for line in metrics(tmp_path) if "learning_rate" in line]
    assert rates == pytest.approx([n / 6 * 1e-7 for n in range(7)] + [0.5e-7], rel=1e-5)
    assert "100 steps of warm-up do not fit into --steps 8" in capsys.readouterr().out


def test_the_schedule_does_not_depend_on_steps_before_it_decays():
    """A run can therefore be resumed with more steps."""
    short, long = (
        make_schedule(LoopOptions(steps=s, warmup_steps=10, decay_fraction=0.2)) for s in (100, 500)
    )
    assert [float(short(s)) for s in range(80)] == [float(long(s)) for s in range(80)]
    assert float(short(100)) == 0.0


def test_the_cosine_schedule():
    """It reaches the peak after the warm-up, half of it in the middle of the rest, and 0 at the
    end."""
    rate = make_schedule(
        LoopOptions(steps=110, warmup_steps=10, learning_rate=0.4, schedule="cosine")
    )
    assert [float(rate(s)) for s in (0, 5, 10, 60, 110)] == pytest.approx(
        [0, 0.2, 0.4, 0.2, 0], abs=1e-6
    )


def test_the_average_is_what_is_kept(tmp_path):
    """ema <- decay ema + (1 - decay) params from the start, and the average is exported."""
    constant = {"decay_fraction": 0.0, "warmup_steps": 0}
    wanted = np.zeros(SIZE)
    for steps in (1, 2):
        train(tmp_path / f"{steps}", steps=steps, **constant)
        wanted = 0.9 * wanted + 0.1 * exported(tmp_path / f"{steps}")
    train(tmp_path / "ema", steps=2, ema=0.9, **constant)
    np.testing.assert_allclose(exported(tmp_path / "ema"), wanted, rtol=1e-5)


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    """The run stops at that step, names the batch, and can be resumed from the last good
    checkpoint."""
    with pytest.raises(
        FloatingPointError, match=r"at step 7, on batch 6 .*last good checkpoint \(step 6\)"
    ):
        train(tmp_path, Quadratic(broken=6))
    assert np.isnan(np.load(tmp_path / "bad_batch.npz")["y"]).all()
    train(tmp_path)
    assert np.isfinite(exported(tmp_path)).all()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax does not end its threads
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    """A failed write is reported; once there is room, the run resumes as if nothing had
    happened.  The numbers of this run fill more than the largest file that is allowed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    evaluations = []

    def fill(place):
        evaluations.append(place)
        if evaluations.count("evaluate") == 2 and place == "evaluate":
            while not (tmp_path / "cut" / "state" / "3" / "sha256.json").exists():
                time.sleep(0.01)  # it is written beside the run
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))

    job = Quadratic(4096)
    try:
        with pytest.raises(
            OSError, match=r"step 6 could not be written(.|\n)*\(step 3\) is intact: free some"
        ):
            train(tmp_path / "cut", dataclasses.replace(job, watch=fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()  # collect garbage here, not in the next test
    train(tmp_path / "cut", job)
    train(tmp_path / "whole", job)
    assert exported(tmp_path / "cut").tobytes() == exported(tmp_path / "whole").tobytes()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_patience(tmp_path):
    """The best evaluation is exported, the second one that is not better ends the run for good.
    Resuming the ended run returns the same report again."""
    long = {"steps": 30, "decay_fraction": 0.0}
    job = Quadratic(aim=second())
    report = train(tmp_path / "run", job, patience=2, **long)
    again = train(tmp_path / "run", job, patience=2, **long)
    assert report["distance"] > 0 and again == pytest.approx(report)
    assert metrics(tmp_path / "run")[-1]["step"] == 12
    train(tmp_path / "six", **{**long, "steps": 6})
    assert exported(tmp_path / "run", "best").tobytes() == exported(tmp_path / "six").tobytes()


def test_other_options_and_inputs_are_refused(tmp_path, finished):
    """Each change is named; options that do not affect the numbers may change; changes can be
    accepted."""
    train(tmp_path, stop_at=3)
    other = Quadratic(inputs={"text": "b" * 64})
    with pytest.raises(
        ValueError, match=r"--learning-rate was 0.002 and is 0.1(.|\n)*--accept-changes"
    ):
        train(tmp_path, learning_rate=0.1)
    with pytest.raises(ValueError, match="the text has changed: sha256 aaaaaaaaaaaa, bbbbbbbbbbbb"):
        train(tmp_path, other)
    with pytest.raises(ValueError, match="another job, or of a model of other sizes"):
        train(tmp_path, Quadratic(SIZE + 1))
    train(tmp_path, other, accept_changes=True, stop_at=6)
    train(tmp_path, other, save_every=4)
    assert same(tmp_path, finished)


def test_the_mask_is_shown_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    """`--show-mask` prints the first batch of a job with what is learned of it, and ends."""
    monkeypatch.setenv("NO_COLOR", "1")
    words = folders.tokenizer()
    assert train(tmp_path / "run", Quadratic(words=words), show_mask=True) == {}
    first = [words.decode([token], skip_special_tokens=False) for token in range(3)]
    assert f"1 of 3 tokens are learned\n{first[0]}{first[1]}⟦{first[2]}⟧" in (
        capsys.readouterr().out
    )
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_was(finished):
    """run.json has the resolved options, versions and hashes."""
    summary = json.loads((finished / "run.json").read_text())
    assert summary["options"] == json.loads(json.dumps(dataclasses.asdict(settings(finished))))
    assert summary["versions"]["jax"] == jax.__version__
    assert summary["inputs"] == {"text": "a" * 64}


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    """A process that is killed while writing leaves half a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    record.Metrics(path, 1).write(2, {"loss": 0.5})
    assert record.read_metrics(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 0.5}]


def test_the_last_evaluation_of_a_record(tmp_path):
    """It skips lines of training and lines after the step; without an evaluation it is {}."""
    path = tmp_path / "metrics.jsonl"
    assert record.last_evaluation(path, 9) == {}
    lines = [
        {"step": 2, "loss": 2.0, "learning_rate": 0.1},
        {"step": 2, "distance": 0.5},
        {"step": 3, "loss": 1.0, "learning_rate": 0.1},
        {"step": 4, "distance": 0.25},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert record.last_evaluation(path, 1) == {}
    assert record.last_evaluation(path, 3) == {"distance": 0.5}


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    """Without its writer the error says what to install; with it every number is logged."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        record.Metrics(tmp_path / "metrics.jsonl", 0, tensorboard=True)
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step, walltime):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    metrics = record.Metrics(tmp_path / "metrics.jsonl", 4, tensorboard=True)
    metrics.write(5, {"loss": 0.25})
    metrics.close()
    assert written == [(str(tmp_path / "tensorboard"), 5), ("loss", 0.25, 5), "closed"]


def test_curves(finished, monkeypatch):
    """The picture shows every metric; without matplotlib the run is refused before it starts."""
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ValueError, match="pip install matplotlib"):
            train(finished, curves=True)
    pytest.importorskip("matplotlib")
    assert curves.plot_curves(finished).read_bytes().startswith(b"\x89PNG")
