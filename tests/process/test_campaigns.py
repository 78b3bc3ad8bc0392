"""The long campaigns, in short: mixed calls in one process, and what a killed run must equal."""

from __future__ import annotations

import jax.numpy as jnp
import kills
import numpy as np
import pytest
import soak
from kills import arrays, differences, files

import specjax
from specjax.training.loop import LoopOptions, fit


class Toy:
    """Fits numbers to the mean of others."""

    frozen = None

    def __init__(self):
        self.inputs = {"text": "a" * 64}

    def init(self):
        return {"x": jnp.zeros(64)}

    def batch(self, step):
        return {"y": np.random.default_rng(step).normal(size=(4, 64)).astype(np.float32)}

    def loss(self, params, frozen, batch):
        return jnp.mean((params["x"] - batch["y"]) ** 2), {}

    def evaluate(self, params):
        return {"distance": float(jnp.abs(params["x"]).mean())}

    def goal(self, report):
        return -report["distance"]

    def export(self, params, folder):
        folder.mkdir()
        np.save(folder / "x.npy", np.asarray(params["x"]))


def settings(out, **changes):
    return LoopOptions(
        out=str(out), batch_size=4, save_every=3, eval_every=3, log_every=2, warmup_steps=2,
        **changes,
    )  # fmt: skip


def test_a_short_soak(capsys, monkeypatch):
    """Twelve calls: all proposers of two structures, threads, streams, and programs that
    are dropped and made again."""
    monkeypatch.setattr(soak, "EVERY", 5)
    try:
        soak.main(["--calls", "12", "--structures", "2", "--keep", "3"])
    finally:
        specjax.keep_programs(None)
    said = capsys.readouterr()
    assert "| equal to plain decoding |" in said.out and "| in two threads |" in said.out
    assert said.err.count("programs of decoding") >= 1


def test_a_soak_finds_a_wrong_text(monkeypatch, capsys):
    """A text that is not that of plain decoding fails with the seed of its call."""
    made = specjax.generate

    def wrong(target, prompts, **options):
        if "rule" in options and options["rule"] == "match":
            options = {**options, "seed": options["seed"] ^ 1, "temperature": 1.3}
        return made(target, prompts, **options)

    monkeypatch.setattr(specjax, "generate", wrong)
    try:
        with pytest.raises(AssertionError):
            soak.main(["--calls", "20", "--seed", "1", "--structures", "1"])
    finally:
        specjax.keep_programs(None)
    assert "failed: python -m tests.soak --structures 1 --only " in capsys.readouterr().err


def test_what_a_killed_run_must_equal(tmp_path):
    """A difference in a model, a metric or the last checkpoint is named; `test_train.py` kills."""
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        fit(Toy(), settings(tmp_path / name, steps=3, seed=seed, learning_rate=1e-3 + seed))
    one, two, other = (files(tmp_path / name) for name in ("one", "two", "other"))
    assert len(arrays(tmp_path / "one")) > 4 and differences(one, two) == []
    found = differences(one, other)
    for name in ("model/x.npy", "best/x.npy", "metrics.jsonl", "state/params/x"):
        assert name in found
    assert set(kills.JOBS) == {"pretrain", "distill", "medusa", "drafter", "two processes"}
