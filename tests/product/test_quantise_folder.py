"""`specjax quantise`: folders in few bits, rounded to nearest and by GPTQ."""

import functools
import json
import re

import folders
import jax.numpy as jnp
import numpy as np
import packed_folders
import pytest
from test_packed_models import leaves, logits, random_model, same_numbers

import specjax
from specjax.cli import main
from specjax.models import Packed, run_layer
from specjax.rounding import distance, pieces_of
from specjax.rounding.gptq import solved

TEXT = ["def add(a, b):\n    return a + b\n\n\nclass Point:\n    x: int\n    y: int\n" * 40]


@functools.cache
def plain_folder():
    model = folders.random_llama(2, hidden_size=128, intermediate_size=96)
    return folders.write(model, "to-round", tokens=False)


def test_nearest_is_int4_of_load(tmp_path):
    """The numbers are those of `load(dtype="int4")`, and what is no linear map is unchanged."""
    made = specjax.quantise_folder(plain_folder(), tmp_path / "out")
    there = specjax.load(tmp_path / "out")
    same_numbers(there, specjax.load(plain_folder(), "int4"))
    same_numbers(made, there)
    plain, ours = (
        packed_folders.read_tensors(plain_folder()),
        packed_folders.read_tensors(tmp_path / "out"),
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        np.testing.assert_array_equal(plain[name], ours[name])
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized" and "lm_head" in settings["ignore"]
    kinds = {g["weights"]["group_size"] for g in settings["config_groups"].values()}
    assert kinds == {None, 32}  # 128 inputs are one group


@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_bits_and_group(tmp_path, method):
    """8 bits in groups of 32 are within half a step of a 255th of the largest number."""
    model = specjax.load(specjax.shipped("tiny/target"))
    texts = TEXT if method == "gptq" else None
    how = {"bits": 8, "group": 32, "texts": texts, "length": 64}
    made = specjax.quantise_folder(specjax.shipped("tiny/target"), tmp_path / "out", method, **how)
    packed = {n: leaf for n, leaf in leaves(made).items() if isinstance(leaf, Packed)}
    assert packed and {leaf.group for leaf in packed.values()} == {32}
    assert {leaf.codes.dtype for leaf in packed.values()} == {jnp.dtype("int8")}
    found = distance(model, specjax.load(tmp_path / "out"), pieces_of("texts", TEXT, model, 4, 64))
    assert 0 < found.divergence < 1e-3


def reference(matrix, h, bits, group, damping=0.01):
    """Equations 2 to 4 of the paper, one column after the other, in float64."""
    half, count = 2 ** (bits - 1), matrix.shape[1]
    parts = np.abs(matrix).reshape(len(matrix), -1, group).max(-1) / (half - 0.5)
    steps = np.repeat(np.asarray(jnp.asarray(parts, jnp.bfloat16), np.float64), group, 1)
    order = np.argsort(-np.diag(h), kind="stable")
    w, h = matrix[:, order].astype(np.float64), h[order][:, order].astype(np.float64)
    h = h + damping * np.mean(np.diag(h)) * np.eye(count)
    left, codes = list(range(count)), np.zeros_like(w)
    for j in range(count):
        inverse = np.linalg.inv(h[np.ix_(left, left)])  # of the columns that are not rounded yet
        step = steps[:, order[j]]
        codes[:, j] = np.clip(np.round(w[:, j] / step), -half, half - 1)
        error = (w[:, j] - codes[:, j] * step) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left.pop(0)
    back = np.empty_like(codes)
    back[:, order] = codes
    return back, steps


def test_gptq_is_the_papers():
    """Codes are those of the equations, and the error on the inputs is less than of rounding."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 96)) @ rng.normal(size=(96, 96)) * np.geomspace(0.1, 3, 96)
    matrix = rng.normal(size=(24, 96)).astype(np.float32)
    h = (x.T @ x).astype(np.float32)
    made = solved(matrix, jnp.asarray(h), 4, 32)
    codes, steps = reference(matrix, h, 4, 32)
    ours = made.codes.astype(np.int64) - 8
    assert (ours == codes).mean() > 0.99  # a sum in float32 may lie on the other side of a half
    nearest = np.clip(np.round(matrix / steps), -8, 7)
    errors = [np.linalg.norm(x @ (matrix - c * steps).T) for c in (ours, codes, nearest)]
    assert errors[0] < 1.02 * errors[1] < 0.7 * errors[2]


def test_an_input_that_is_never_used():
    """Its column is rounded to nearest, and so is every column of inputs that are independent."""
    matrix = np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)
    h = np.diag(np.arange(32)).astype(np.float32)
    made = solved(matrix, jnp.asarray(h), 4, 32)
    nearest = np.clip(np.round(matrix / made.scales.numbers()), -8, 7) + 8
    np.testing.assert_array_equal(made.codes, nearest)


def test_a_layer_is_run_as_in_the_model():
    """The streams are the model's taps, for layers with windows, states and shared keys too."""
    shared = {
        "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "head_dim": 16,
        "vocab_size_per_layer_input": 320, "use_double_wide_mlp": False, "sliding_window": 8,
        "layer_types": ["full_attention"] * 2, "global_head_dim": 16,
        "attention_k_eq_v": False, "num_global_key_value_heads": None,
    }  # fmt: skip
    for model in (specjax.load(plain_folder()), random_model("gemma4_text", **shared)):
        tokens = jnp.asarray(np.random.default_rng(0).integers(1, 300, (2, 24)))
        positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
        taps = model.model.apply(model.params, tokens, positions, taps=(0, 1, 2)).features
        wanted = np.split(np.asarray(taps), 3, axis=-1)
        stream, written = None, {}
        for i in range(2):
            ran = run_layer(model.model.module, model.params, tokens, i, stream, written)
            stream, written[i] = ran.stream, ran.written
            np.testing.assert_allclose(stream, wanted[i + 1], atol=1e-5)
            assert all(h.shape[0] == h.shape[1] for h in ran.products.values())
            assert any("down" in path for path in ran.products)


def test_gptq_is_closer_than_nearest(tmp_path):
    """On the shipped target, for text of its kind; the best draft of it is its own copy."""
    source = specjax.shipped("tiny/target")
    how = {"texts": TEXT, "length": 64}
    specjax.quantise_folder(source, tmp_path / "nearest")
    specjax.quantise_folder(source, tmp_path / "gptq", "gptq", **how)
    plain = specjax.load(source)
    pieces = pieces_of("texts", TEXT, plain, 8, 64)
    near, gptq = (
        distance(plain, specjax.load(tmp_path / name), pieces) for name in ("nearest", "gptq")
    )
    assert near.plain == gptq.plain
    assert gptq.divergence < 0.8 * near.divergence


def test_experts_are_rounded_to_nearest(tmp_path):
    """A stack has no linear map whose inputs could be observed."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = random_model("qwen3_moe", **sizes)
    tiny = specjax.load(specjax.shipped("tiny/target"))
    folder = tmp_path / "experts"
    specjax.save(model, folder)
    folders.edit(folder, vocab_size=320)
    made = specjax.quantise_folder(folder, tmp_path / "out")
    assert isinstance(leaves(made)["layer_0/mlp/up"], Packed)
    same_numbers(made, specjax.load(tmp_path / "out"))
    assert np.abs(logits(made) - logits(model)).max() < 0.5 * np.ptp(logits(model))
    assert tiny.tokenizer is not None
    with pytest.raises(ValueError, match="texts is text, and experts has no tokenizer"):
        specjax.quantise_folder(folder, tmp_path / "other", "gptq", texts=TEXT)


def refused(message, *arguments, **how):
    with pytest.raises(ValueError, match=message):
        specjax.quantise_folder(*arguments, **how)


def test_refused_at_the_door(tmp_path, monkeypatch):
    """Before weights are read, and nothing is written."""
    monkeypatch.setattr("specjax.rounding.folder.load", None)
    source, out = specjax.shipped("tiny/target"), tmp_path / "out"
    refused("method='awq' is not allowed; pass one of nearest, gptq", source, out, "awq")
    refused("bits=3 is not allowed; pass 4 or 8", source, out, bits=3)
    refused("group=48 does not divide the .* inputs of model.layers", source, out, group=48)
    refused("group=0", source, out, group=0)
    refused("needs text to calibrate with: pass texts", source, out, "gptq")
    refused("reads no text: leave texts out", source, out, texts=TEXT)
    refused(f"{re.escape(str(tmp_path))} exists already", source, tmp_path)
    refused("packed already .compressed-tensors", packed_folders.write("int4", "packed-int4"), out)
    assert not out.exists()


def test_experts_in_one_tensor_are_refused(tmp_path):
    """compressed-tensors has no form for them."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    specjax.save(random_model("gpt_oss", **sizes), tmp_path / "fused")
    refused("experts.*holds the matrices of several", tmp_path / "fused", tmp_path / "out")


def test_the_command(tmp_path, capsys):
    """It writes, compares, and refuses with a line."""
    source, out = str(specjax.shipped("tiny/target")), str(tmp_path / "out")
    (tmp_path / "text.py").write_text(TEXT[0])
    text = str(tmp_path / "text.py")
    command = ["quantise", source, out, "--method", "gptq", "--data", text, "--compare", text]
    main([*command, "--length", "64", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] < told["bytes_before"] and 0 < told["divergence"] < 0.5
    main(["inspect", out])
    assert "matrices in compressed-tensors int4" in capsys.readouterr().out
    for wrong, message in (
        (["quantise", source, out], "exists already"),
        (["quantise", source, f"{out}2", "--method", "gptq"], "pass --data FILE"),
        (["quantise", source, f"{out}2", "--data", text], "leave --data out"),
    ):
        with pytest.raises(SystemExit) as end:
            main(wrong)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
