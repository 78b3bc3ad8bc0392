"""Folders of several models: the text model is read, whatever its tensors are called there."""

import json

import folders
import jax
import lora_folders
import numpy as np
import pytest
import safetensors.numpy
import small_families

import specjax
from specjax.files import read_config

CASES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text, as E2B",
    "gemma4_unified": "gemma4_unified_text, as 12B",
    "llama4": "llama4_text, one expert",
    "mistral3": "mistral",
    "mistral3, ministral3": "ministral3, growth",
    "mistral3, mistral4": "mistral4, growing queries",
    "qwen2_5_vl": "qwen2, yarn",
    "qwen3_vl": "qwen3",
}
"""The kind of folder -> the case of `small_families` that is its text model."""

KINDS = {"qwen2": "qwen2_5_vl_text", "qwen3": "qwen3_vl_text"}
SPELLINGS = {
    "as transformers 5 names them": ("model.language_model.", "lm_head.", "model."),
    "as publishers named them": ("language_model.model.", "language_model.lm_head.", ""),
    "as early files have them": ("model.", "lm_head.", ""),
}
"""What stands for `model.` and for `lm_head.`, and before the names of other models."""
OTHERS = (
    "visual.patch.weight", "vision_tower.layers.0.weight", "multi_modal_projector.weight",
    "audio_tower.layers.0.weight", "embed_audio.weight", "embed_vision.weight",
    "vision_embedder.weight", "vision_model.layers.0.weight",
)  # fmt: skip


def write(folder, kind, spelling, text=None, **outer):
    """A folder with the text model, and tensors of others; `text` changes its configuration."""
    case, (body, head, before) = CASES[kind], SPELLINGS[spelling]
    source, model_type = small_families.folder(case), kind.split(",")[0]
    inner = json.loads((source / "config.json").read_text())
    ids = {name: inner.pop(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids |= {"tie_word_embeddings": inner.pop("tie_word_embeddings")}
    inner["model_type"] = KINDS.get(inner["model_type"], inner["model_type"])
    inner |= text or {}
    stored = {
        name.replace("model.", body, 1) if name.startswith("model.") else head + name[8:]: tensor
        for name, tensor in lora_folders.tensors(source).items()
    }
    stored |= {before + name: np.ones((2, 3), np.float32) for name in OTHERS}
    config = {
        "model_type": model_type, "text_config": inner, "vision_config": {"depth": 2}, **ids,
        **outer,
    }  # fmt: skip
    folders.Llama(config, stored).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", CASES)
def test_the_text_model_is_read(kind, spelling, tmp_path):
    """It is the model of a plain folder, and a saved copy is such a folder."""
    plain = specjax.load(small_families.folder(CASES[kind]))
    loaded = specjax.load(write(tmp_path / "nested", kind, spelling))
    assert (loaded.model, loaded.eos) == (plain.model, plain.eos)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, plain.params)
    specjax.save(loaded, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["model_type"] == plain.model.module.config.family
    assert config["architectures"] == [specjax.FAMILIES[config["model_type"]].architecture]
    again = specjax.load(tmp_path / "copy")
    assert (again.model, again.eos) == (plain.model, plain.eos)
    jax.tree.map(np.testing.assert_array_equal, again.params, plain.params)


def test_fields_beside_each_other(tmp_path):
    """Early files of Qwen2.5-VL have no `text_config`, and name the positions of images."""
    folder = write(tmp_path, "qwen2_5_vl", "as early files have them")
    config = json.loads((folder / "config.json").read_text())
    inner = config.pop("text_config")
    del inner["model_type"], inner["rope_parameters"]
    sections = {"type": "mrope", "mrope_section": [1, 1, 2]}
    (folder / "config.json").write_text(
        json.dumps({**inner, **config, "rope_scaling": sections, "rope_theta": 3e4})
    )
    _, _, ours = read_config(folder)
    assert (ours.family, ours.rope) == ("qwen2", specjax.models.Rope(3e4))


def test_what_a_published_file_leaves_out(tmp_path):
    """Gemma 3's file of 4 billion parameters has no heads and no vocabulary."""
    inner = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    raw = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = read_config(tmp_path)[2]
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert ours.max_positions == 131072 and ours.tied_embeddings and ours.window_of(0) == 1024


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_lora_is_merged(spelling, tmp_path):
    """Whatever spelling it has itself."""
    folder = write(tmp_path / "nested", "qwen3_vl", "as transformers 5 names them")
    module = SPELLINGS[spelling][0] + "layers.0.self_attn.q_proj"
    before = specjax.load(folder)
    kernel = before.params["layer_0"]["attention"]["q"]["kernel"]
    a, b = lora_folders.pair(np.random.default_rng(0), *kernel.shape[::-1])
    root = f"base_model.model.{module}"
    lora = lora_folders.write(
        tmp_path / "lora", {f"{root}.lora_A.weight": a, f"{root}.lora_B.weight": b}, lora_alpha=3
    )
    after = specjax.load(folder, lora=lora).params["layer_0"]["attention"]["q"]["kernel"]
    np.testing.assert_allclose(after - kernel, (b @ a).T, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "outer", "message"),
    [
        ({"model_type": "phi3"}, {}, 'text_config: model_type is "phi3"; it must be "qwen3_vl_tex'),
        ({"hidden_size": "x"}, {}, 'hidden_size is "x"'),
        ({}, {"text_config": [1]}, "text_config"),
        ({}, {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"'),
        ({"quantization_config": {"bits": 4}}, {}, "quantised"),
        ({}, {"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "auto_map"),
        ({}, {"model_type": "qwen9_vl"}, "qwen3_vl"),
    ],
)
def test_refused(text, outer, message, tmp_path):
    folder = write(tmp_path, "qwen3_vl", "as transformers 5 names them", text, **outer)
    with pytest.raises(ValueError, match=message):
        specjax.load(folder)


def test_a_tensor_of_nobody_is_named(tmp_path):
    folder = write(tmp_path, "qwen3_vl", "as transformers 5 names them")
    stored = lora_folders.tensors(folder) | {"model.other.weight": np.ones((2, 2), np.float32)}
    safetensors.numpy.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.other\.weight is not a tensor of this arch"):
        specjax.load(folder)
