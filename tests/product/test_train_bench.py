"""The benchmark of training: the same step as PyTorch's, counted operations, and the ablation's
table."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trained
from toys import TRANSFORMERS as toys

from bench import training as bench
from experiments import ablation

TINY = ["--target", "checkpoints/tiny/target", "--draft", "checkpoints/tiny/draft"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loops_take_the_same_step(tmp_path, monkeypatch, capsys, dtype):
    """With the same weights and batch both have the same loss before and after their first step,
    for either dtype of the target. Only one precision is used, since rounding would change small
    updates."""
    pytest.importorskip("torch")
    monkeypatch.chdir(trained.SOURCE)
    bench.main([*TINY, "--only", "distill", "medusa", "--num-heads", "2", "--batch-size", "2",
                "--sequence-length", "16", "--steps", "2", "--rounds", "1", "--precisions",
                "bfloat16", "--peak", "0.1", "--dtype", dtype, "--out",
                str(tmp_path / "report.json")])  # fmt: skip
    rows = json.loads((tmp_path / "report.json").read_text())["speed"]
    assert [(row["job"], row["library"]) for row in rows] == [
        (job, library) for job in ("distill", "medusa") for library in ("specjax", "torch")
    ]
    for one, other in (rows[:2], rows[2:]):
        assert one["first_losses"] == pytest.approx(other["first_losses"], rel=0.01)
        assert one["first_losses"][1] < one["first_losses"][0]
    for row in rows:
        if row["mfu"] is not None:  # None if another process was busy
            assert row["mfu"] == pytest.approx(
                row["tokens_per_second"] * row["flops_per_token"] / 1e11
            )
    assert "| distill | torch | bfloat16 |" in capsys.readouterr().out


def test_operations_are_those_of_the_products():
    """The formula agrees with a count over the traced pass; causal attention counts half."""
    model, length = toys.model(), 16
    config = model.module.config
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jnp.zeros((1, length), int)
    traced = jax.make_jaxpr(lambda p: model.apply(p, tokens, jnp.arange(length)[None]).logits)(
        params
    )
    operations = 0

    def count(jaxpr):
        nonlocal operations
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (inner, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                operations += (
                    2 * equation.outvars[0].aval.size * int(np.prod([shape[i] for i in inner]))
                )
            for part in jax.tree.leaves(
                equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                    count(getattr(part, "jaxpr", part))

    count(traced.jaxpr)
    attention = 2 * length * config.num_heads * config.head_dim * config.num_layers
    # On a CPU the cosines and sines of a token pass through a product (`Rope.rotations`).
    rotations = 2 * 2 * (config.head_dim // 2) ** 2
    expected = bench.forward_flops(config, params, length) + attention + rotations
    assert operations / length == expected


def test_chunked_losses_keep_less():
    """Each loss has a row, and with a large vocabulary needs much less memory than the plain
    loss."""
    rows = bench.memory(8192, 16, 2048)
    assert [row["loss"] for row in rows] == ["cross-entropy", "forward-kl", "accepted-length"]
    for row in rows:
        assert row["plain"] > 4 * 8192 > 0  # bytes per token: at least the logits
        assert row["ratio"] > 2


def test_an_ablation(tmp_path, monkeypatch, capsys):
    """Every cell is trained and measured once, existing results are reused, and the table shows
    all."""
    monkeypatch.chdir(trained.SOURCE)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("import os", "def f(", "class A"))
    )

    def start(*more, behind=(), out="out"):
        ablation.main([
            *("--target", "checkpoints/tiny/target", "--data", str(trained.text()), "--prompts",
                str(prompts)),
            *("--out", str(tmp_path / out), "--num-drafts", "2", "--written-sequences", "4",
                "--written-batch", "4"),
            *("--written-prompt", "8", "--sequence-length", "32", "--max-new-tokens", "12",
                "--batch-size", "3"),
            *("--losses", "accepted-length", "--modes", "target", *more),
            *("--", "--steps", "2", "--warmup-steps", "1", "--batch-size", "2", "--eval-batches",
                "1", "--hidden-size"),
            *("16", "--mlp-size", "32", "--num-heads", "2", "--num-kv-heads", "1", "--log-every",
                "1", *behind),
        ])  # fmt: skip
        return json.loads((tmp_path / out / "ablation.json").read_text())

    table = start()
    assert [(row["loss"], row["data"]) for row in table["rows"]] == [
        ("forward-kl", "text"), ("accepted-length", "target")
    ]  # fmt: skip
    for row in table["rows"]:
        for heat in ("0.0", "1.0"):
            low, high = row[f"tau_{heat}"][1:]
            assert 1 <= low <= row[f"tau_{heat}"][0] <= high <= 3
            assert (f"gain_{heat}" in row) == (row["data"] != "text")
    assert not table["left"]
    models = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "out").glob("*/model/model.safetensors")
    }
    assert len(models) == 2
    shards = (
        tmp_path / "out" / "accepted-length.target" / "sampled",
        tmp_path / "out" / "written" / "00000.safetensors",
    )
    assert not shards[0].exists() and shards[1].exists()
    (tmp_path / "out" / "accepted-length.target" / "measured.json").unlink()
    assert start()["rows"] == table["rows"]
    kept = {path: path.stat().st_mtime_ns for path in models}
    assert [path.parent.parent.name for path in models if kept[path] != models[path]] == [
        "accepted-length.target"
    ]
    assert (
        start("--losses", "forward-kl", "--modes", "text")["rows"] == table["rows"]
    )  # results of other calls stay
    lines = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    assert lines[2].startswith("| forward-kl | text | ") and len(lines) == 4
    with pytest.raises(ValueError, match="was begun with --num-drafts 2, not 3"):
        start("--num-drafts", "3")
    with pytest.raises(ValueError, match="was begun with -- --steps 2"):
        start(behind=("--seed", "1"))
    with pytest.raises(ValueError, match="--loss belongs before the --"):
        start(behind=("--loss", "forward-kl"))
    with pytest.raises(ValueError, match="--loss belongs before the --"):
        start(behind=("--loss=forward-kl",))
    with pytest.raises(SystemExit):
        start(behind=("--initial",))
    assert "Missing value for argument '--initial'" in capsys.readouterr().err
    unchanged = prompts.read_text()
    prompts.write_text(unchanged + json.dumps({"prompt": "while"}) + "\n")
    with pytest.raises(ValueError, match=r"content of --prompts .* has changed since"):
        start()
    prompts.write_text(unchanged)
    shutil.copytree(tmp_path / "out", tmp_path / "more", symlinks=True)
    (tmp_path / "more" / "asked.json").unlink()
    model = str(tmp_path / "out" / "forward-kl.text" / "model")
    first, second, _ = start(behind=("--initial", model), out="more")["rows"]
    assert (first["loss"], first["data"]) == ("none", "--initial")
    assert all(
        first[f"tau_{heat}"] == second[f"tau_{heat}"] for heat in ("0.0", "1.0")
    )  # the same model, twice


def test_gains_are_paired():
    """A cell gains nothing over itself, whatever prompts are drawn; twice the tokens per pass is
    100 %."""
    rng = np.random.default_rng(0)
    counts = {
        "emitted": rng.integers(20, 40, 30).tolist(),
        "passes": rng.integers(8, 20, 30).tolist(),
    }
    assert ablation.gain(counts, counts) == (0, 0, 0)
    twice = {**counts, "emitted": [2 * n for n in counts["emitted"]]}
    assert ablation.gain(twice, counts) == pytest.approx((1, 1, 1))


def test_a_cell_that_fails_stays_in_the_table():
    """It is listed with its error beside the other cells."""
    options = ablation.AblationOptions(
        target="t", data=(), prompts="p", losses=("reverse-kl",), modes=("text",)
    )
    cells = {
        ("forward-kl", "text"): {"counts": {}},
        ("reverse-kl", "text"): {"failure": "the loss is nan, on"},
    }
    made = ablation.report(options, cells)
    assert "| reverse-kl | text | the loss is nan |" in ablation.table(made)
    assert "not yet measured: " not in ablation.table(made)
    assert "not yet measured: forward-kl.text, reverse-kl.text" in ablation.table(
        ablation.report(options, {})
    )
    with pytest.raises(ValueError, match="reverse-kl is infinite at --temperature 0"):
        ablation.AblationOptions(target="t", data=(), prompts="p", temperature=0.0)
