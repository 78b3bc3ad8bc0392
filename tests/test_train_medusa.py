"""Heads are trained: what they learn from which token, resume bit for bit, and a folder that speculates."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models.transformer import head_matrix
from specjax.proposers.medusa import measure_ranks
from train import medusa
from train.corpus import Tokens

ROOT = pathlib.Path(__file__).parent.parent
TARGET = ROOT / "checkpoints" / "tiny" / "target"
SIZES = [
    *("--num-heads", "2", "--sequence-length", "48", "--batch-size", "4", "--eval-batches", "2", "--warmup-steps", "2"),
    *("--written-sequences", "4", "--written-prompt", "8", "--tree-nodes", "6", "--learning-rate", "0.01"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a few small files of Python: the library's own."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted((ROOT / "specjax").rglob("*.py"))[:8]:
        (folder / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    return folder


def run(out, text, *more):
    medusa.main(["--target", str(TARGET), "--data", str(text), "--out", str(out), "--steps", "40", "--save-every", "20",
                 "--eval-every", "20", *SIZES, *more])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run of 40 steps that nobody interrupted."""
    return run(tmp_path_factory.mktemp("finished") / "run", text)


def metrics(folder):
    """What was measured, but for the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def test_labels_lie_two_places_ahead_and_more():
    """Head k learns at t the token at t + 2 + k; what lies behind the batch weighs nothing."""
    batch = jnp.arange(2 * 9).reshape(2, 9)
    for k in range(3):
        labels, weight = (np.asarray(x) for x in medusa.labels_ahead(batch, k))
        assert labels.shape == weight.shape == (2, 8)
        assert weight.sum() == 2 * (8 - 1 - k)
        for row, t in zip(*np.nonzero(weight), strict=True):
            assert t + 2 + k <= 8
            assert labels[row, t] == batch[row, t + 2 + k]


def test_heads_learn(finished):
    """On held-out text the tokens ahead rank better than by the target's own head, which each head starts as."""
    target = specjax.load(TARGET)
    texts = Tokens(finished / "corpus" / "held_out.bin").batch(0, 4, 48, 0)[:, :-1]
    ranks = [
        measure_ranks(target.model, target.params, heads.heads, heads.params, head_matrix(target.params), texts)
        for heads in (specjax.MedusaAdapter.create(target, 2), specjax.load_medusa(finished / "model", target))
    ]
    before, after = (np.log1p(found).mean(0) for found in ranks)
    assert (after < before - 0.1).all()
    assert metrics(finished)[-1]["held_out_length"] > 1


def test_the_folder_speculates(finished):
    """It loads for its target, brings its tree, and the text is the target's."""
    target = specjax.load(TARGET)
    heads = specjax.load_medusa(finished / "model", target)
    assert 1 <= len(heads.choices) <= 5
    assert len(heads.acceptance) == len(heads.choices)
    plain = specjax.generate(target, ["import ", "def "], max_new_tokens=24)
    drafted = specjax.generate(target, ["import ", "def "], max_new_tokens=24, proposer=heads)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0
    assert drafted.stats.target_passes < plain.stats.target_passes


def test_stopped_and_resumed_is_uninterrupted(finished, text, tmp_path):
    """20 steps, then 20 more: the bytes and the metrics of 40."""
    run(tmp_path / "run", text, "--stop-at", "20")
    assert not (tmp_path / "run" / "model").exists()
    resumed = run(tmp_path / "run", text)
    for name in ("medusa_lm_head.safetensors", "config.json"):
        assert (resumed / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()
    assert metrics(resumed) == metrics(finished)


def test_own_heads_and_soft_labels(text, tmp_path):
    """Version 1 on the target's distributions: it trains, and its folder has a map to the vocabulary for each head."""
    out = run(tmp_path / "run", text, "--own-heads", "--soft", "--steps", "3", "--eval-every", "3")
    heads = specjax.load_medusa(out / "model", specjax.load(TARGET))
    assert heads.params["head"].shape == (2, 64, 512)
    assert np.isfinite(metrics(out)[-1]["held_out_length"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-heads", "0"], "--num-heads is 0; it must be at least 1"),
        (["--tree-nodes", "1"], "--tree-nodes is 1; it counts the root too"),
        (["--sequence-length", "9"], "--sequence-length is 9"),
    ],
)
def test_bad_options_are_usage_errors(text, tmp_path, capsys, options, message):
    """Named, and nothing starts."""
    with pytest.raises(SystemExit):
        run(tmp_path, text, *options)
    assert message in capsys.readouterr().err
