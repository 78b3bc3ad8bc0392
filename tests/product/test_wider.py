"""Wider models compute the function of the narrow one, and their new weights learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from experiments import wider

SIZES: dict[str, Any] = {"hidden_size": 96, "mlp_size": 224, "num_heads": 6, "num_kv_heads": 3}
TOKENS = jnp.arange(5, 45)[None]


def logits(model, params):
    return model.apply(params, TOKENS, jnp.arange(TOKENS.shape[1])[None]).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("wider") / "target"
    wider.main(wider.Options(specjax.shipped("tiny/target"), out, **SIZES))
    return out


def test_the_function_stays(folder):
    narrow, wide = (specjax.load(f, "float32") for f in (specjax.shipped("tiny/target"), folder))
    assert wide.model.module.config.hidden_size == 96
    wanted, made = (np.asarray(logits(one.model, one.params)) for one in (narrow, wide))
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-4)


def test_all_weights_learn_within_three_steps(folder):
    """Those that read zeros have no gradient until the zeros are written."""
    wide = specjax.load(folder, "float32")

    def loss(params):
        scores = jax.nn.log_softmax(logits(wide.model, params)[:, :-1])
        return -jnp.take_along_axis(scores, TOKENS[:, 1:, None], 2).mean()

    slope = jax.jit(jax.grad(loss))
    params = wide.params
    for _ in range(2):
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, slope(params))
    for path, gradient in jax.tree.leaves_with_path(slope(params)):
        seen = np.abs(np.asarray(gradient))
        if "embed" not in jax.tree_util.keystr(path):  # rows of other tokens
            assert (seen > 0).mean() > 0.9, path


def test_a_head_drafts_the_same_for_the_wider_target(tmp_path):
    """It reads states that are those of the narrow target, with zeros behind them."""
    target, head = specjax.shipped("pycode/target"), specjax.shipped("pycode/eagle3")
    wider.main(wider.Options(target, tmp_path / "target"))
    wider.main(wider.Options(head, tmp_path / "head", like=target))
    made = [
        specjax.generate(
            (loaded := specjax.load(folder, "float32")), "import os\n", max_new_tokens=32,
            drafter=specjax.load_drafter(drafter, loaded), temperature=0.0, eos=[],
        )
        for folder, drafter in ((target, head), (tmp_path / "target", tmp_path / "head"))
    ]  # fmt: skip
    narrow, wide = made
    assert wide.tokens == narrow.tokens
    assert wide.stats.accepted == narrow.stats.accepted > 0


def test_what_cannot_be_is_refused(tmp_path):
    source = specjax.shipped("tiny/target")
    for sizes, words in (({"hidden_size": 32}, "wider already"), ({"num_heads": 5}, "num_heads=5")):
        with pytest.raises(ValueError, match=words):
            wider.main(wider.Options(source, tmp_path / "x", **{**SIZES, **sizes}))
    assert not (tmp_path / "x").exists()
