"""Data by weights, sequences side by side in a row, and batches that are made ahead."""

from __future__ import annotations

import json
import threading
import time
import types

import jax
import numpy as np
import pytest
import trained
from hypothesis import given
from hypothesis import strategies as st
from properties import law
from test_distill import job
from toys import TRANSFORMERS as toys
from trained import metrics

from specjax.training.corpus import Tokens
from specjax.training.jobs import distill, generate
from specjax.training.loop import _batches
from specjax.training.mixture import Mixture
from specjax.training.ordering import turns
from specjax.training.written import Written


@law(60)
@given(st.lists(st.sampled_from([0.5, 1.0, 3.0, 7.0]), min_size=1, max_size=4))
def test_each_source_has_its_share_after_every_row(weights):
    """To within a row for each source before it, and its rows come in order, each once."""
    taken, shares = np.zeros(len(weights)), np.array(weights) / sum(weights)
    for number in range(200):
        source, index = turns(number, weights)
        assert index == taken[source]
        taken[source] += 1
        assert (abs(taken - shares * (number + 1)) <= 1 + np.arange(len(weights))).all()


def test_a_mixture_of_texts(tmp_path):
    """Its rows are those of the texts; any part of it can be read alone."""
    parts = []
    for number in range(2):
        np.full(1000, number, np.uint16).tofile(tmp_path / str(number))
        parts.append(Tokens(tmp_path / str(number)))
    mixture = Mixture(tuple(parts), (3.0, 1.0))
    rows = mixture.rows(16, 5).batch(40)[0]["tokens"]
    assert rows[:, 0].sum() == 10 and (rows == rows[:, :1]).all()
    np.testing.assert_array_equal(mixture.rows(16, 5).batch(8)[3]["tokens"], rows[24:32])
    assert mixture.windows(16) == round(61 * 4 / 3 + 0.5)


def sequences(count, length, seed=0):
    """Rows [R, T] whose prompts and answers have random lengths."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(random.integers(3, length + 2))
        mask = np.arange(size) >= random.integers(1, size - 1)
        rows.append((random.integers(1, toys.VOCAB, size).astype(np.int32), mask))
    return rows


def test_answers_by_weights():
    """Rows of several sources come in their shares, each source in an order of its own."""
    parts = {i: Written.of(sequences(9, 15, i), 15) for i in (0, 2)}
    joined = Written.joined(parts, (3.0, 9.0, 1.0))
    taken = joined.rows(4).batch(36)[0]["tokens"]
    for part, epochs in ((parts[0], 3), (parts[2], 1)):
        mine = (taken[:, None] == part.tokens).all(2)
        assert mine.sum() == 9 * epochs and (mine.sum(0) == epochs).all()


def test_packed_sequences_are_learned_as_if_they_were_alone():
    """The loss and its gradient are those of the rows one by one; without `starts` they differ."""
    rows = Written.of(sequences(40, 15), 15)
    packed = rows.packed()
    assert packed.starts is not None and len(packed.tokens) < 0.8 * len(rows.tokens)
    assert packed.drawn.sum() == rows.drawn.sum() and packed.starts.sum() == len(rows.tokens)
    assert packed.starts[:, 0].all() and (packed.drawn * ~packed.starts)[:, -1:].any() not in (2,)
    loss = jax.jit(jax.value_and_grad(job().loss, has_aux=True))

    def of(written, **more):
        count = len(written.tokens)
        batch = {"tokens": written.tokens, "drawn": written.drawn, "limit": written.limit,
                 "number": np.arange(count), "own": np.zeros(count, bool),
                 "share": np.ones(count, np.float32), **more}  # fmt: skip
        return loss(toys.truncated(), toys.weights(), batch)

    (wanted, _), grads = of(rows)
    (value, others), found = of(packed, starts=packed.starts)
    assert float(value) == pytest.approx(float(wanted), rel=1e-3)
    assert float(others["weight"]) == rows.drawn.sum()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=2e-3)
    assert abs(float(of(packed)[0][0]) - float(wanted)) > 1e-2 * float(wanted)


def run(out, data, *more):
    distill.main([
        "--target", str(trained.target()), "--data", *map(str, data), "--out", str(out),
        "--sampled-prompt", "8", "--learning-rate", "0.01", "--warmup-steps", "2", "--log-every",
        "1", "--steps", "4", *trained.DRAFT_SIZES, *more,
    ])  # fmt: skip
    return metrics(out)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    out = tmp_path_factory.mktemp("answers") / "data"
    generate.main([
        "--target", str(trained.target()), "--data", str(trained.text()), "--out", str(out),
        "--sequences", "24", "--prompt-tokens", "4", "--max-new-tokens", "6", "--batch-size", "12",
    ])  # fmt: skip
    return out


def test_a_run_on_a_mixture(tmp_path, answers, capsys):
    """Weights of text and of answers are the shares of both; packed, mixed and resumed, the run
    has the bytes of one without interruption."""
    more = tmp_path / "more"
    more.mkdir()
    for number in range(3):
        (more / f"{number}.txt").write_text(f"{number} the cat sat on the mat. " * 60)
    data = (trained.text(), more, answers)
    options = ("--weights", "2", "1", "1", "--pack")
    whole = run(tmp_path / "whole", data, *options)
    assert "packed 24 sequences into" in capsys.readouterr().out
    resolved = json.loads((tmp_path / "whole" / "run.json").read_text())["options"]
    assert resolved["sampled_fraction"] == 0.25
    run(tmp_path / "cut", data, *options, "--stop-at", "2")
    assert run(tmp_path / "cut", data, *options) == whole
    with pytest.raises(ValueError, match=r"--weights was \[2\.0, 1\.0, 1\.0\] and is \[1\.0, 1"):
        run(tmp_path / "cut", data, "--weights", "1", "1", "1", "--pack")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--weights", "1", "2"), "--weights 1.0 2.0 are 2, and --data has 1 entries: pass one"),
        (("--weights", "0"), "--weights 0.0: each must be a finite number above 0"),
        (("--pack", "--loss", "accepted-length"), "needs to know where each sequence was cut"),
    ],
)
def test_mixtures_that_cannot_be(tmp_path, capsys, more, message):
    with pytest.raises(SystemExit):
        run(tmp_path, [trained.text()], *more)
    assert message in capsys.readouterr().err


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ValueError, match="--pack: there are no sequences with answers"):
        run(tmp_path, [trained.text()], "--pack", "--sampled-fraction", "0")


def test_batches_are_made_ahead():
    """Two are made before they are asked for, in order, from any state on; an error comes with its
    own step; and closing does not wait for what nobody asked for."""
    made, gate = [], threading.Event()

    def batch(step):
        if step == 4:
            raise ValueError("step 4")
        made.append(step)
        if step == 2:
            gate.set()
        return step

    job = types.SimpleNamespace(batch=batch)
    ahead = _batches(job, 6, None, 0)
    assert next(ahead) == 0 and gate.wait(10)
    assert made == [0, 1, 2]
    assert [next(ahead) for _ in range(3)] == [1, 2, 3]
    state = ahead.get_state()
    with pytest.raises(ValueError, match="step 4"):
        next(ahead)
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 5 and set(made) <= {0, 1, 2, 3, 5}
    again = _batches(types.SimpleNamespace(batch=lambda step: step), 6, state, 0)
    assert list(again) == [4, 5]
    older = _batches(types.SimpleNamespace(batch=lambda step: step), 6, None, 5)
    assert list(older) == [5]
