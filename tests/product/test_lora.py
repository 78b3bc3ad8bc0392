"""LoRA folders of PEFT merged while a model is loaded, compared with a merge in NumPy."""

from __future__ import annotations

import json
import shutil

import folders
import numpy as np
import pytest
import safetensors.numpy
import trained
from lora_folders import NAMES, RANK, adapter, base, pair, tensors, write
from test_families import make

import specjax
from experiments import ablation
from specjax.training.dataset import model_hashes, read_masked
from specjax.training.jobs import distill, generate


def same(loaded, merged, source, folder):
    """The model equals the one whose files hold the merged tensors."""
    shutil.copytree(source, folder)
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in merged.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    wanted, actual = specjax.load(folder).params, loaded.params
    flat = [dict(folders.jax.tree_util.tree_leaves_with_path(tree)) for tree in (wanted, actual)]
    assert flat[0].keys() == flat[1].keys()
    for name, leaf in flat[0].items():
        np.testing.assert_allclose(flat[1][name], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", NAMES)
def test_merged_as_peft_merges(tmp_path, family):
    """W + alpha / r B A; of GPT-2's matrices the transpose, and of fused ones each part."""
    lora, merged = adapter(tmp_path / "lora", family, fan_in_fan_out=family == "gpt2")
    loaded = specjax.load(base(family), lora=lora)
    assert loaded.name.endswith(" with lora")
    same(loaded, merged, base(family), tmp_path / "merged")
    before = specjax.load(base(family))
    changed = [
        bool((np.asarray(x) != np.asarray(y)).any())
        for x, y in zip(*map(folders.jax.tree.leaves, (before.params, loaded.params)), strict=True)
    ]
    assert sum(changed) in (2, 4, 5), "the parts of two matrices"


def test_scales(tmp_path):
    """rsLoRA divides by the square root of the rank, and alpha_pattern names modules."""
    lora, merged = adapter(tmp_path / "rs", "llama", scale=5 / RANK**0.5, use_rslora=True)
    same(specjax.load(base("llama"), lora=lora), merged, base("llama"), tmp_path / "one")
    pattern = {"self_attn.v_proj": 8, "^up_proj": 100, r"layers.1.mlp.up_proj$": 8}
    lora, merged = adapter(tmp_path / "by", "llama", scale=8 / RANK, alpha_pattern=pattern)
    same(specjax.load(base("llama"), lora=lora), merged, base("llama"), tmp_path / "two")


def test_whole_matrices_and_embeddings(tmp_path):
    """modules_to_save replace the base's matrices; a change of an embedding is transposed."""
    merged, rng = tensors(base("llama")), np.random.default_rng(2)
    vocab, size = merged["model.embed_tokens.weight"].shape
    a, b = pair(rng, size, vocab)
    head = rng.normal(size=(vocab, size)).astype(np.float32)
    root = "base_model.model."
    lora = write(tmp_path / "lora", {
        f"{root}model.embed_tokens.lora_embedding_A": a,
        f"{root}model.embed_tokens.lora_embedding_B": b,
        f"{root}lm_head.weight": head,
    }, modules_to_save=["lm_head"])  # fmt: skip
    merged["model.embed_tokens.weight"] = (
        merged["model.embed_tokens.weight"] + 5 / RANK * (b.astype(np.float64) @ a).T
    )
    merged["lm_head.weight"] = head
    same(specjax.load(base("llama"), lora=lora), merged, base("llama"), tmp_path / "merged")


def test_in_bfloat16_and_of_some_layers(tmp_path):
    """The sum is rounded once; layers keep their changes when they are renumbered."""
    lora, _ = adapter(tmp_path / "lora", "llama")
    exact = specjax.load(base("llama"), lora=lora)
    rounded = specjax.load(base("llama"), "bfloat16", lora=lora)
    kernel = exact.params["layer_1"]["attention"]["v"]["kernel"]
    np.testing.assert_array_equal(
        rounded.params["layer_1"]["attention"]["v"]["weight"].T, kernel.astype("bfloat16")
    )
    one = specjax.load(base("llama"), lora=lora, layers=[1])
    np.testing.assert_array_equal(one.params["layer_0"]["attention"]["v"]["kernel"], kernel)


def test_its_tokenizer(tmp_path):
    """A tokenizer beside the adapter, with its template, replaces the base's."""
    lora, _ = adapter(tmp_path / "lora", "llama")
    shutil.copy(folders.tokenizer_file(280), lora / "tokenizer.json")
    (lora / "chat_template.jinja").write_text("{{ messages }}")
    loaded = specjax.load(base("llama"), lora=lora)
    assert loaded.tokenizer is not None and loaded.tokenizer.get_vocab_size() == 280
    assert loaded.files["chat_template.jinja"] == b"{{ messages }}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "IA3"},
            'peft_type is "IA3"; it must be LORA: for another method, merge it with PEFT',
        ),
        ({"use_dora": True}, "use_dora is true; .* DoRA cannot be merged here: merge it with PEFT"),
        ({"layer_replication": [[0, 2]]}, "replicated layers cannot be merged here"),
        ({"bias": "all"}, 'bias is "all"; it must be none: merge it'),
        ({"init_lora_weights": "pissa_niter_4"}, "one that leaves the base's weights as they are"),
        ({"lora_alpha": None}, "lora_alpha is null; it must be a finite number"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern is .* a map from names of modules"),
    ],
)
def test_variants_that_cannot_be_merged(tmp_path, config, message):
    """The error names the file, the value and the cure."""
    lora, _ = adapter(tmp_path / "lora", "llama", **config)
    with pytest.raises(ValueError, match=f"(?s)adapter_config.json.*{message}"):
        specjax.load(base("llama"), lora=lora)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.7.mlp.up_proj.lora_A.weight", (3, 48), "layers.7.mlp.up_proj.lora_B.* is missing"),
        ("lm_head.lora_magnitude_vector", (3,), "lora_magnitude_vector belongs to no change"),
        ("model.layers.0.mlp.act.weight", (3,), "mlp.act.weight is not a tensor of the base"),
        ("lm_head.weight", (300, 48), r"change of shape \[300, 48\], and the base's is \[320, 48"),
        ("model.layers.0.mlp.up_proj.bias", (64,), "up_proj.bias belongs to no change"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, shape, message):
    """Unknown, missing and misshapen tensors are named, beside the base that the LoRA says."""
    lora, _ = adapter(tmp_path / "lora", "llama")
    file = lora / "adapter_model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    arrays[f"base_model.model.{name}"] = np.ones(shape, np.float32)
    safetensors.numpy.save_file(arrays, file)
    with pytest.raises(ValueError, match=f"(?s)lora.*{message}"):
        specjax.load(base("llama"), lora=lora)


def test_other_bases_and_files(tmp_path):
    """A LoRA of another model, of a tied output, pickled or missing files: each has its cure."""
    lora, _ = adapter(tmp_path / "lora", "qwen3")
    with pytest.raises(ValueError, match=r"not a LoRA for .*its base is 'org/base', so pass that"):
        specjax.load(base("llama"), lora=lora)
    tied = make("gpt2", "plain")[1]
    head = {"base_model.model.lm_head.weight": np.ones((96, 64), np.float32)}
    with pytest.raises(ValueError, match="one in this base: merge it with PEFT"):
        specjax.load(tied, lora=write(tmp_path / "tied", head))
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pickled adapter_model\.bin is not read"):
        specjax.load(base("qwen3"), lora=lora)
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
        specjax.load(base("llama"), lora=folders.target())


def test_a_draft_for_a_target_with_a_lora(tmp_path):
    """The target writes and teaches with the LoRA; its data is refused without it."""
    target = folders.target()
    lora, _ = adapter(tmp_path / "lora", "llama")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "a dog"}\n')
    made = tmp_path / "data"
    generate.main([
        "--target", str(target), "--lora", str(lora), "--prompts", str(prompts), "--out", str(made),
        "--max-new-tokens", "20", "--temperature", "1",
    ])  # fmt: skip
    assert read_masked(made, model_hashes(target, str(lora)))
    with pytest.raises(ValueError, match=r"was made with another lora .* than this one .none"):
        read_masked(made, model_hashes(target))
    arguments = [
        "--target", str(target), "--lora", str(lora), "--data", str(made), "--steps", "1",
        "--sampled-fraction", "1", "--sampled-prompt", "4", "--out", str(tmp_path / "run"),
        "--from-layers", "1", "--sequence-length", "16", "--batch-size", "2",
        "--eval-batches", "1", "--learning-rate", "1e-9", "--warmup-steps", "0",
    ]  # fmt: skip
    distill.main(arguments)
    student = specjax.load(tmp_path / "run" / "model").params["layer_0"]["attention"]["v"]
    wanted = specjax.load(target, lora=lora).params["layer_1"]["attention"]["v"]["kernel"]
    np.testing.assert_allclose(student["kernel"], wanted, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_target_as_it_is_served(tmp_path, dtype):
    """The draft learns from a target in this type, which also writes text for it."""
    distill.main([
        "--target", str(trained.target()), "--data", str(trained.text()), "--dtype", dtype,
        "--out", str(tmp_path / "run"), "--steps", "8", "--sampled-prompt", "8",
        "--sampled-sequences", "4", "--sampled-batch", "4", "--learning-rate", "0.02",
        "--warmup-steps", "0", "--log-every", "1", *trained.DRAFT_SIZES,
    ])  # fmt: skip
    losses = [line["loss"] for line in trained.metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    manifest = json.loads((tmp_path / "run" / "sampled" / "dataset.json").read_text())
    assert manifest["request"]["dtype"] == dtype


def test_an_ablation_measures_the_target_without_a_lora(tmp_path):
    """It would measure another model than the drafts were trained for."""
    with pytest.raises(ValueError, match=r"--lora there: an ablation .*merge the LoRA first"):
        ablation.main([
            "--target", str(folders.target()), "--data", str(tmp_path), "--prompts", "none",
            "--out", str(tmp_path / "run"), "--", "--lora", "there",
        ])  # fmt: skip
