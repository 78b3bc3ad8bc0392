"""Training Medusa heads: labels, learning, resuming bit for bit, and a folder that speculates."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax.methods import measure_ranks
from specjax.models.transformer import head_matrix
from specjax.training import lora
from specjax.training.corpus import Tokens
from specjax.training.jobs import medusa
from specjax.training.jobs.medusa import labels_ahead
from specjax.training.loop import LoopOptions
from specjax.training.material import Material
from specjax.training.optimizer import make_optimizer
from specjax.training.written import Written

ROOT = pathlib.Path(__file__).parents[2]
TARGET = ROOT / "checkpoints" / "tiny" / "target"
SIZES = [
    *(
        "--num-heads",
        "2",
        "--sequence-length",
        "48",
        "--batch-size",
        "4",
        "--eval-batches",
        "2",
        "--warmup-steps",
        "2",
    ),
    *(
        "--written-sequences",
        "4",
        "--written-prompt",
        "8",
        "--tree-nodes",
        "6",
        "--learning-rate",
        "0.01",
    ),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a few small Python files of the library."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted((ROOT / "specjax" / "auditing").glob("*.py"))[:8]:
        (folder / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    return folder


def run(out, text, *more):
    medusa.main(["--target", str(TARGET), "--data", str(text), "--out", str(out), "--steps", "40",
                 "--save-every", "20", "--eval-every", "20", *SIZES, *more])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run of 40 steps without interruption."""
    return run(tmp_path_factory.mktemp("finished") / "run", text)


def metrics(folder):
    """The metrics without the times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def test_labels_lie_two_places_ahead_and_more():
    """At t, head k learns the token at t + 2 + k if that is learned; labels beyond the batch
    weigh nothing."""
    batch = jnp.arange(2 * 9).reshape(2, 9)
    mask = jnp.array([[1.0] * 8, [0, 0, 0, 0, 1, 1, 1, 0]])
    for k in range(3):
        labels, weight = (np.asarray(x) for x in labels_ahead(batch, mask, k))
        assert labels.shape == weight.shape == (2, 8)
        learned = {
            (row, t): row == 0 or 5 <= t + 2 + k <= 7 for row in range(2) for t in range(7 - k)
        }
        assert set(zip(*np.nonzero(weight), strict=True)) == {
            place for place, yes in learned.items() if yes
        }
        for row, t in zip(*np.nonzero(weight), strict=True):
            assert labels[row, t] == batch[row, t + 2 + k]


def test_heads_learn(finished):
    """On held-out text the heads rank later tokens better than the target's head, with which
    they start."""
    target = specjax.load(TARGET)
    texts = Tokens(finished / "corpus" / "held_out.bin").rows(48, 0).batch(4)[0]["tokens"][:, :-1]
    ranks = [
        measure_ranks(
            target.model,
            target.params,
            heads.heads,
            heads.params,
            head_matrix(target.params),
            texts,
        )
        for heads in (
            specjax.MedusaAdapter.create(target, 2),
            specjax.load_medusa(finished / "model", target),
        )
    ]
    before, after = (np.log1p(rank).mean(0) for rank in ranks)
    assert (after < before - 0.1).all()
    assert metrics(finished)[-1]["held_out_length"] > 1


def test_the_folder_speculates(finished):
    """It loads for its target with its tree, and the text is the target's."""
    target = specjax.load(TARGET)
    heads = specjax.load_medusa(finished / "model", target)
    assert 1 <= len(heads.choices) <= 5
    assert len(heads.acceptance) == len(heads.choices)
    plain = specjax.generate(target, ["import ", "def "], proposer="none", max_new_tokens=24)
    drafted = specjax.generate(target, ["import ", "def "], max_new_tokens=24, proposer=heads)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0
    assert drafted.stats.target_passes < plain.stats.target_passes


def test_stopped_and_resumed_is_uninterrupted(finished, text, tmp_path):
    """20 steps and then 20 more have the bytes and metrics of 40."""
    run(tmp_path / "run", text, "--stop-at", "20")
    assert not (tmp_path / "run" / "model").exists()
    resumed = run(tmp_path / "run", text)
    for name in ("medusa_lm_head.safetensors", "config.json"):
        assert (resumed / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()
    assert metrics(resumed) == metrics(finished)


def test_own_heads_and_soft_labels(text, tmp_path):
    """Version 1 trains on the target's distributions, and its folder has a map per head."""
    out = run(tmp_path / "run", text, "--own-heads", "--soft", "--steps", "3", "--eval-every", "3")
    heads = specjax.load_medusa(out / "model", specjax.load(TARGET))
    assert heads.params["head"].shape == (2, 64, 512)
    assert np.isfinite(metrics(out)[-1]["held_out_length"])


def job(**changes):
    """Heads of the tiny target on partly learned sequences: initial parameters and a batch."""
    options = medusa.MedusaOptions(
        target=str(TARGET),
        data=(),
        num_heads=2,
        sequence_length=24,
        written_prompt=8,
        batch_size=2,
        **changes,
    )
    target = specjax.load(TARGET)
    tokens = np.random.default_rng(0).integers(1, 512, (2, 25), dtype=np.int32)
    drawn = np.tile((np.arange(24) >= 10).astype(np.float32), (2, 1))
    written = Written(tokens, drawn, np.full(2, 24, np.int32))
    material = Material(None, written, written, {})
    made = medusa.TrainMedusa(options, target, material, medusa.first_adapter(options, target))
    return made, made.init(), made.batch(0)


def test_the_target_learns_beside_the_heads():
    """Medusa-2 begins at the target: the target's loss is that of the data, both losses reach
    the updates, heads have their weight, and no prompt token is a label."""
    made, params, batch = job(lora_rank=2, heads_weight=0.5)
    target = made.target
    loss = jax.jit(jax.value_and_grad(made.loss, has_aux=True))
    (total, parts), grads = loss(params, target.params, batch)
    logits = jax.nn.log_softmax(
        toys.plain_logits(batch["tokens"][:, :-1], target.model, target.params)
    )
    wanted = -np.take_along_axis(np.asarray(logits), batch["tokens"][:, 1:, None], 2)[..., 0][
        :, 10:
    ].mean()
    assert float(parts["loss_target"]) == pytest.approx(wanted, rel=0.02)
    heads = float(parts["loss_head_0"]) + 0.8 * float(parts["loss_head_1"])
    assert float(total) == pytest.approx(wanted + 0.5 * heads, rel=0.02)
    reached = {name: float(jnp.abs(grad["b"]).max()) for name, grad in grads["lora"].items()}
    assert {"layer_0/attention/q", "layer_1/mlp/down"} <= set(reached) and "head" not in reached
    assert min(reached.values()) > 0
    assert max(float(jnp.abs(grad["a"]).max()) for grad in grads["lora"].values()) == 0
    made = job(lora_rank=2, heads_ramp="sine", steps=10, warmup_steps=1)[0]
    assert [float(made.batch(step)["share"][0]) for step in (0, 5, 10)] == pytest.approx(
        [0, 0.2 * 0.5**0.5, 0.2]
    )


def test_low_rank_changes():
    """W + alpha / rank A B for every linear map in its dtype; tied outputs and routers are
    unchanged."""
    key, leaf = jax.random.key(0), jnp.ones((3, 4), jnp.bfloat16)
    params = {"layer_0": {"q": {"kernel": leaf, "bias": leaf[0]}, "router": {"kernel": leaf},
              "gate": leaf}, "head": {"kernel": leaf}, "embedding": leaf.T}  # fmt: skip
    assert set(lora.initial_lora(params, 2, True, key)) == {"layer_0/q"}
    changes = lora.initial_lora(params, 2, False, key)
    assert set(changes) == {"layer_0/q", "head"}
    changes["head"]["b"] = jnp.full((2, 4), 2.0)
    merged = lora.merge(params, changes, 0.25)
    wanted = 1 + 0.5 * np.asarray(changes["head"]["a"]).sum(1, keepdims=True).repeat(4, 1)
    np.testing.assert_allclose(np.asarray(merged["head"]["kernel"], np.float32), wanted, rtol=0.01)
    assert merged["head"]["kernel"].dtype == jnp.bfloat16
    assert (merged["layer_0"]["q"]["kernel"] == leaf).all()


def test_parts_learn_at_their_own_rates():
    """With equal gradients, the steps have the ratio of the rates."""
    optimizer = make_optimizer(LoopOptions(warmup_steps=0), {"heads": 4.0, "lora": 1.0})
    params = {"heads": {"x": jnp.zeros(3)}, "lora": {"x": jnp.zeros(3)}}
    changes: Any = optimizer.update(
        jax.tree.map(jnp.ones_like, params), optimizer.init(params), params
    )[0]
    np.testing.assert_allclose(changes["heads"]["x"], 4 * changes["lora"]["x"], rtol=1e-6)
    assert (changes["lora"]["x"] < 0).all()


def test_heads_and_a_target_of_their_own(finished, text, tmp_path):
    """Medusa-2 starts from the heads of Medusa-1 and the unchanged target, which loads like any
    other; the heads speculate for it, and tau is measured on the way."""
    more = ("--initial", str(finished / "model"), "--lora-rank", "2", "--self-distil", "--steps",
            "3", "--eval-every", "3", "--eval-prompts", "3", "--eval-tokens", "8", "--log-every",
            "1")  # fmt: skip
    out = run(tmp_path / "run", text, *more)
    lines = metrics(out)
    losses = [line["loss_target"] for line in lines if "loss_target" in line]
    assert losses[0] == pytest.approx(0, abs=1e-6) and losses[-1] > 0
    assert 1 <= lines[-1]["tau_low"] <= lines[-1]["tau"] <= lines[-1]["tau_high"] <= 3
    model = out / "model"
    target = specjax.load(model / "target")
    before = specjax.load(TARGET).params["layer_0"]["attention"]["q"]["kernel"]
    assert (target.params["layer_0"]["attention"]["q"]["kernel"] != before).any()
    heads = specjax.load_medusa(model / "heads", target)
    plain = specjax.generate(target, "import ", max_new_tokens=8)
    assert (
        specjax.generate(target, "import ", max_new_tokens=8, proposer=heads).tokens == plain.tokens
    )


def test_other_data_for_heads(text, tmp_path):
    """A file without rows, and initial heads of another form, are refused."""
    (tmp_path / "chats.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"0 different UTF-8 texts below .*chats\.jsonl"):
        run(tmp_path / "run", tmp_path / "chats.jsonl")
    made = job()[0]
    specjax.save_medusa(tmp_path / "heads", made.adapter, "tiny")
    with pytest.raises(ValueError, match=r"heads does not fit --num-heads 3: pass --num-heads 2$"):
        run(tmp_path / "run", text, "--initial", str(tmp_path / "heads"), "--num-heads", "3")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--self-distil"], "pass --lora-rank, too"),
        (["--eval-prompts", "2", "--eval-tokens", "41"], "are more than --sequence-length 48"),
        (["--num-heads", "0"], "--num-heads is 0; it must be at least 1"),
        (["--tree-nodes", "1"], "--tree-nodes is 1; it must be at least 2: it counts the root too"),
        (["--sequence-length", "9"], "--sequence-length is 9"),
    ],
)
def test_bad_options_are_usage_errors(text, tmp_path, capsys, more, message):
    """The error names the option, and nothing starts."""
    with pytest.raises(SystemExit):
        run(tmp_path, text, *more)
    assert message in capsys.readouterr().err
