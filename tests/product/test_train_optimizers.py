"""Optimizers by name: they learn, log their rate, resume bit for bit, and change their part."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trained import metrics

from specjax.training.loop import LoopOptions, fit
from specjax.training.optimizer import make_optimizer, make_schedule
from specjax.training.optimizers import MUON, OPTIMIZERS, check_arguments

SHAPES = {
    "embedding": (12, 8),
    "layer": {"kernel": (8, 16), "bias": (16,)},
    "head": {"kernel": (16, 4)},
}


@dataclasses.dataclass(frozen=True)
class Net:
    """A small network that fits the logits of another one."""

    rates: dict | None = dataclasses.field(default=None, compare=False)
    frozen = None

    def init(self):
        keys = iter(jax.random.split(jax.random.key(1), 4))
        return jax.tree.map(
            lambda shape: 0.5 * jax.random.normal(next(keys), shape),
            SHAPES,
            is_leaf=lambda leaf: isinstance(leaf, tuple),
        )

    def batch(self, step):
        return {"x": np.random.default_rng(step).integers(0, 12, 16)}

    def loss(self, params, frozen, batch):
        def logits(params):
            hidden = params["embedding"][batch["x"]] @ params["layer"]["kernel"]
            return jnp.tanh(hidden + params["layer"]["bias"]) @ params["head"]["kernel"]

        wanted = logits(jax.tree.map(lambda x: jnp.cos(40 * x), self.init()))
        return jnp.mean((logits(params) - wanted) ** 2), {}

    def evaluate(self, params):
        return {"held_out": float(self.loss(params, None, self.batch(999))[0])}

    def export(self, params, folder):
        folder.mkdir()
        leaves = jax.tree_util.tree_leaves_with_path(params)
        np.savez(folder / "x.npz", **{jax.tree_util.keystr(p): np.asarray(x) for p, x in leaves})


def settings(out, **changes):
    common = {"steps": 60, "batch_size": 4, "log_every": 1, "eval_every": 60, "save_every": 60}
    return LoopOptions(
        out=str(out), **{**common, "warmup_steps": 2, "learning_rate": 0.02, **changes}
    )


def exported(out):
    with np.load(out / "model" / "x.npz") as file:
        return {name: file[name].tobytes() for name in file.files}


RATES = {"adagrad": 0.2, "sgd": 0.2, "adafactor": 0.1, "lamb": 0.1, "lars": 2.0, "sm3": 0.5}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(tmp_path, name):
    """The loss falls, and the rate in its state is logged."""
    changes = {"optimizer": name, "learning_rate": RATES.get(name, 0.02)}
    report = fit(Net(), settings(tmp_path / "whole", **changes))
    assert report["held_out"] < 0.7 * Net().evaluate(Net().init())["held_out"]
    lines = [line for line in metrics(tmp_path / "whole") if "loss" in line]
    schedule = make_schedule(settings("", **changes))
    wanted = [float(schedule(step)) for step in range(60)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", MUON, "adafactor", "ademamix"])
def test_a_resumed_run_is_uninterrupted(tmp_path, name):
    """A run that stopped has the bytes and the metrics of one that did not."""
    changes = {"optimizer": name, "steps": 8}
    same_program = make_optimizer(settings("", **changes))
    for out, stop in (("whole", 0), ("cut", 3), ("cut", 0)):
        fit(Net(), settings(tmp_path / out, stop_at=stop, **changes), same_program)
    assert exported(tmp_path / "cut") == exported(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def one_update(options, params, grads, rates=None):
    optimizer = make_optimizer(options, rates)
    changes, state = optimizer.update(grads, optimizer.init(params), params)
    return changes, state


def test_muon_changes_matrices_and_adamw_the_rest():
    """Its updates are orthogonal, of the size of AdamW's; embedding, output matrix and bias have
    AdamW's updates; and so the rate of each group is logged."""
    params = Net().init()
    grads = jax.tree.map(lambda x: jnp.sin(70 * x), params)
    options = settings("", warmup_steps=0, weight_decay=0.0, clip=np.inf)
    muon, state = one_update(dataclasses.replace(options, optimizer=MUON), params, grads)
    adamw, _ = one_update(options, params, grads)
    for name in ("embedding", "head"):
        jax.tree.map(np.testing.assert_array_equal, muon[name], adamw[name])
    np.testing.assert_array_equal(muon["layer"]["bias"], adamw["layer"]["bias"])
    kernel = np.asarray(muon["layer"]["kernel"])
    size = np.linalg.svd(kernel, compute_uv=False) / (0.02 * 0.2 * 16**0.5)
    assert (size > 0.6).all() and (size < 1.3).all(), "five steps of Newton and Schulz"
    assert np.sqrt((kernel**2).mean()) == pytest.approx(0.02 * 0.2, rel=0.2)
    assert (kernel * np.asarray(grads["layer"]["kernel"])).sum() < 0, "it descends"
    tall = {"layer": {"kernel": jnp.zeros((16, 4))}}
    grads = {"layer": {"kernel": jax.random.normal(jax.random.key(0), (16, 4))}}
    update = one_update(dataclasses.replace(options, optimizer=MUON), tall, grads)[0]
    root = np.sqrt((np.asarray(update["layer"]["kernel"]) ** 2).mean())
    assert root == pytest.approx(0.02 * 0.2, rel=0.2)
    assert len(jax.tree.leaves(state)) > 0


@pytest.mark.parametrize("name", ["adamw", "lion", MUON])
def test_weight_decay_is_on_matrices_only(name):
    """Without a gradient, matrices shrink by the rate times the decay, and vectors stay."""
    params = jax.tree.map(jnp.ones_like, Net().init())
    options = settings("", warmup_steps=0, weight_decay=0.1, optimizer=name)
    changes, _ = one_update(options, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(changes["layer"]["kernel"], -0.02 * 0.1, rtol=1e-5)
    np.testing.assert_allclose(changes["embedding"], -0.02 * 0.1, rtol=1e-5)
    assert not changes["layer"]["bias"].any()


def test_parts_with_rates_of_their_own(tmp_path):
    """Each part has its rate in the log, also where Muon splits it."""
    rates = {"embedding": 4.0, "layer": 1.0, "head": 1.0}
    fit(Net(rates), settings(tmp_path, optimizer=MUON, steps=3, warmup_steps=0))
    line = metrics(tmp_path)[0]
    assert line["learning_rate_embedding_others"] == pytest.approx(0.08)
    assert line["learning_rate_layer_matrices"] == pytest.approx(0.02)
    assert line["learning_rate_layer_others"] == pytest.approx(0.02)


def test_an_optimizer_of_ones_own(tmp_path):
    """`fit` takes any chain of optax; it resumes like the others."""
    chain = optax.chain(optax.clip(0.5), optax.sgd(0.1, momentum=0.9))
    fit(Net(), settings(tmp_path / "whole"), chain)
    fit(Net(), settings(tmp_path / "cut", stop_at=25), chain)
    report = fit(Net(), settings(tmp_path / "cut"), chain)
    assert exported(tmp_path / "cut") == exported(tmp_path / "whole")
    again = fit(Net(), settings(tmp_path / "cut"), chain)
    assert again == pytest.approx(report, rel=1e-6), "the last evaluation is found"
    assert "learning_rate" not in metrics(tmp_path / "whole")[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adamw", "bb1=0.9", r"adamw of optax has no argument 'bb1'; is it 'b1'\?  It has b1, b2"),
        ("adamw", "b1=high", r"--optimizer-args b1=high: 'high' must be a number, true or false"),
        ("sgd", "momentum", r"--optimizer-args momentum: '' must be a number"),
        ("lion", "learning_rate=1", r"lion of optax has no argument 'learning_rate'"),
    ],
)
def test_arguments_that_an_optimizer_does_not_take(name, text, message):
    with pytest.raises(ValueError, match=message):
        settings("", optimizer=name, optimizer_args=(text,))


def test_arguments_of_an_optimizer(tmp_path, capsys):
    """They reach the function of optax; an optimizer without weight decay says so."""
    assert check_arguments("sgd", ["momentum=0.9", "nesterov=true"]) == {
        "momentum": 0.9, "nesterov": True,
    }  # fmt: skip
    more = {"optimizer": "sgd", "steps": 4}
    fit(Net(), settings(tmp_path / "with", optimizer_args=("momentum=0.9",), **more))
    assert "note: sgd of optax has no weight decay on matrices" in capsys.readouterr().out
    fit(Net(), settings(tmp_path / "without", **more))
    assert exported(tmp_path / "with") != exported(tmp_path / "without")


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    """Its optimizer had another state; the error says how to go on."""
    fit(Net(), settings(tmp_path, stop_at=20))
    run = json.loads((tmp_path / "run.json").read_text())
    del run["options"]["optimizer"], run["options"]["optimizer_args"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"earlier version of specjax.*\(--initial .*best\)"):
        fit(Net(), settings(tmp_path))
