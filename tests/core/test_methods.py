"""A new method is one folder and one line in `METHODS`: `tests/toy_method` is one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_target import target, write
from toy_method.reader import MAP

import specjax
from specjax.files import find_folder
from specjax.methods import METHODS, SharedParams
from specjax.methods.table import Method
from specjax.training.drafters import Lesson, default_taps, plan

DEPTH = 3


@pytest.fixture
def line(monkeypatch):
    """The one line."""
    monkeypatch.setitem(METHODS, "map", Method(MAP, "toy_method.learner:plan_map", 1))


@pytest.fixture
def folder(tmp_path):
    size = target().params["embedding"].shape[1]
    weight = np.random.default_rng(0).normal(size=(DEPTH, size, size)).astype(np.float32)
    return write(tmp_path / "a map", {"num_drafts": DEPTH}, {"map.weight": weight})


def test_its_folders_are_loaded_and_its_drafts_change_no_text(line, folder):
    drafter = specjax.load_drafter(folder, target())
    assert drafter.source.depth == DEPTH
    options = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3}
    plain = specjax.generate(target(), [[3, 5, 7]], proposer="none", **options)
    drafted = specjax.generate(target(), [[3, 5, 7]], drafter=drafter, **options)
    assert plain.tokens == drafted.tokens
    assert drafted.stats.tested > 0


def test_its_folders_are_refused_without_the_line(folder):
    with pytest.raises(ValueError, match=r"a map is not a drafter of a format.*map\.weight"):
        specjax.load_drafter(folder, target())
    assert find_folder(folder) == folder


def test_its_learner_is_planned_and_learns(line):
    """The planned learner's guesses have the gradient that lowers their own loss."""
    config = target().model.module.config
    learner = plan("map", types.SimpleNamespace(num_drafts=DEPTH, taps=()), config, 0)
    assert len(default_taps("map", config.num_layers)) == 1
    table = target().params["embedding"]
    tokens = jnp.array([[3, 5, 7, 9, 11, 2]])
    lesson = Lesson(
        tokens, jnp.ones((1, 5)), jnp.zeros((1, 5, 1)), jnp.array([[0, 2]]), jnp.ones((1, 2))
    )

    def loss(own):
        params = SharedParams(own, {"embedding": table, "head": target().params["head"]})
        total = 0.0
        for guess in learner.guesses(params, lesson):
            logits = jax.nn.log_softmax(guess.hidden @ learner.head(params))
            label = jnp.take_along_axis(tokens, jnp.minimum(guess.at + 1, 5), axis=1)
            said = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
            total -= (guess.weight * said).sum()
        return total

    own = learner.init(jax.random.key(1))
    before, gradient = jax.value_and_grad(loss)(own)
    after = loss(jax.tree.map(lambda x, g: x - 0.05 * g, own, gradient))
    assert own["map"].shape == (DEPTH, config.hidden_size, config.hidden_size)
    assert after < before - 0.01
