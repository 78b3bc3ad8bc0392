"""The configurations that families publish are read, whatever else their files say.

`fixtures/published_configs.json` has the fields of published config.json files by the names of the
models.  They were written by hand, and not downloaded, so single values may differ from the files.
Names with spaces are variants that a model card asks for, or that another version of transformers
writes.
"""

import json
import pathlib
import warnings

import numpy as np
import pytest
import safetensors.numpy
from published_configs import PUBLISHED

import specjax
from specjax.files import read_config

LLAMA = PUBLISHED["meta-llama/Llama-2-7b-hf"]

CONTEXTS = {
    # Linear: the file has the context before it was scaled, as transformers documented it.  The
    # last two files have scaled it already, and other libraries read them like this, too.
    "lmsys/vicuna-7b-v1.5-16k": 16384,
    "togethercomputer/LLaMA-2-7B-32K": 8 * 32768,
    "deepseek-ai/deepseek-coder-6.7b-instruct": 4 * 16384,
    # YaRN: the context of the file, or more if its context before, scaled, is longer.
    "NousResearch/Yarn-Llama-2-7b-64k": 65536,
    "NousResearch/Yarn-Mistral-7b-128k": 131072,
    "Qwen2.5 7B with the model card's yarn": 131072,
    "Qwen3 8B with the model card's yarn": 131072,
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": 131072,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 2**20,  # model_max_length
    # Fields that a multimodal file leaves to its classes.
    "google/gemma-3-27b-it": 131072,
    # A long rope ends where its long factors would begin.
    "microsoft/Phi-3.5-mini-instruct": 4096,
    "microsoft/Phi-3.5-MoE-instruct": 4096,
    "Phi-3-mini-128k with the early name of its rope": 4096,
    "microsoft/Phi-4-mini-instruct": 4096,
}
"""Contexts that are not `max_position_embeddings`, and those of all scaled ropes that are."""

TIED = {
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "gpt2",
    "lfm2",
    "lfm2_moe",
    "opt",
    "smollm3",
    "starcoder2",
}
"""Families whose published files leave the flag out, and mean true."""


def write(folder: pathlib.Path, config: dict, **tensors: np.ndarray) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_family_is_here():
    kinds = {*specjax.FAMILIES, *specjax.models.NESTED}
    assert {config["model_type"] for config in PUBLISHED.values()} == kinds


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read(name, tmp_path):
    """Its sizes and its context are those that the file says, and what is written is read again."""
    raw = PUBLISHED[name]
    config, family, ours = read_config(write(tmp_path, raw))
    assert config == raw
    assert family.architecture in raw["architectures"]
    text = raw.get("text_config", raw)
    assert ours.num_layers == text.get("num_hidden_layers", text.get("n_layer"))
    assert ours.hidden_size == text.get("hidden_size", text.get("n_embd"))
    assert ours.num_kv_heads == text.get("num_key_value_heads", ours.num_heads)
    assert ours.tied_embeddings == raw.get("tie_word_embeddings", raw["model_type"] in TIED)
    assert ours.max_positions == CONTEXTS.get(
        name, text.get("max_position_embeddings", text.get("n_positions"))
    )
    family = specjax.FAMILIES[ours.family]  # a folder of several models is saved as its text model
    assert family.read_config(family.write_config(ours)) == ours


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": None},
        {"auto_map": {}},
        {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
        {"auto_map": {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}},
        {"auto_map": {"AutoModelForCausalLM": "org/model--modeling_own.LlamaForCausalLM"}},
        {"quantization_config": None},
        {"quantization_config": {}},
        *({name: None} for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")),
        *({name: None} for name in ("head_dim", "num_key_value_heads", "rope_theta")),
        *({name: None} for name in ("rope_parameters", "sliding_window", "layer_types")),
    ],
)
def test_a_field_that_says_nothing(change, tmp_path):
    """Null, an empty object, and code where the class is that of the family change nothing."""
    plain = read_config(write(tmp_path, LLAMA))[2]
    wanted = {**vars(plain), "num_kv_heads": plain.num_heads}
    assert vars(read_config(write(tmp_path, {**LLAMA, **change}))[2]) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, r"auto_map names 'own\.Own'"),
        ({"auto_map": "own.Own"}, r"auto_map names 'own\.Own'"),
        ({"auto_map": {"AutoModelForCausalLM": ["a.LlamaForCausalLM"]}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, 'model_type is "own"'),
    ],
)  # fmt: skip
def test_a_field_that_says_something(change, message, tmp_path):
    """A class of another name may compute something else, so it is refused."""
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, {**LLAMA, **change}))


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2", "smollm3"])
def test_the_context_of_a_rope_is_that_of_its_kind(kind, family, tmp_path):
    """In every family, with the context before it was scaled in the rope, outside of it, or in
    `max_position_embeddings` alone."""
    raw = next(c for c in PUBLISHED.values() if c["model_type"] == family)
    size = raw["hidden_size"] // raw["num_attention_heads"]
    turned = int(size * raw.get("rotary_pct", 1.0)) // 2
    factors = {"short_factor": [1.0] * turned, "long_factor": [2.0] * turned}
    rope = {"type": kind, "factor": 4.0, **(factors if kind == "longrope" else {})}
    before = {"original_max_position_embeddings": 1000}
    scaled = {**rope, **before}
    for most, outer, inner, wanted in (
        (1000, {}, rope, {"linear": 4000, "yarn": 4000, "dynamic": 1000}),
        (1000, {}, scaled, {"linear": 4000, "yarn": 4000, "dynamic": 1000, "longrope": 1000}),
        (4000, {}, scaled, {"linear": 4000, "yarn": 4000, "dynamic": 4000, "longrope": 1000}),
        (9000, before, rope, {"linear": 9000, "yarn": 9000, "dynamic": 9000, "longrope": 1000}),
        (4000, before, {**rope, "original_max_position_embeddings": 7},
         {"linear": 4000, "yarn": 4000, "dynamic": 4000, "longrope": 1000}),
    ):  # fmt: skip
        if kind not in wanted:  # a long rope without the context before it
            continue
        config = {**raw, "max_position_embeddings": most, "rope_scaling": inner, **outer}
        _, ours, read = read_config(write(tmp_path, config))
        assert read.max_positions == wanted[kind], (most, outer, inner)
        assert ours.read_config(ours.write_config(read)) == read


@pytest.mark.parametrize("most", [16, 17, 1000, 4095])
@pytest.mark.parametrize("factor", [1.0, 1.7, 2.0, 3.0, 8.0])
def test_any_context_of_a_linear_rope_is_written(most, factor):
    """Also one that is no multiple of the factor."""
    rope = specjax.models.Rope(kind="linear", factor=factor)
    config = specjax.models.TransformerConfig(32, 16, 16, 1, 2, 2, 8, most, rope=rope)
    family = specjax.FAMILIES["llama"]
    assert family.read_config(family.write_config(config)) == config


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct",
        "google/gemma-2b", "google/gemma-2-9b", "google/gemma-3-1b-it", "facebook/opt-350m",
        "Gemma 4 31B as transformers saves its text model",
        "openai-community/gpt2", "microsoft/Phi-4-mini-instruct", "HuggingFaceTB/SmolLM3-3B",
    ],
)  # fmt: skip
@pytest.mark.parametrize("short", [False, True], ids=["", "names without the prefix"])
def test_an_output_matrix_beside_a_tied_flag(name, short, tmp_path):
    """It is the embedding if it has the same numbers, and a matrix of its own if not."""
    raw = PUBLISHED[name]
    family = specjax.FAMILIES[raw["model_type"]]
    config = family.read_config(raw)
    names = {row.path[0]: row.name for row in family.tensors(config)}
    embedding = names["embedding"]
    embedding = family.spelled(embedding)[-1] if short else embedding
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    for head, tied in (
        (numbers, True),
        (numbers.astype(np.float16), True),
        (numbers[:2], False),
        (numbers[::-1].copy(), False),
    ):
        write(tmp_path, raw, **{embedding: numbers, "lm_head.weight": head})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read, _, ours = read_config(tmp_path)
        assert ours.tied_embeddings == tied
        assert read == raw if tied else read == {**raw, "tie_word_embeddings": False}
        assert [str(tmp_path) in str(one.message) for one in caught] == [True] * (not tied)
