"""Folders that could stall, fill or end the process are refused by file and field."""

import json
import os
import shutil
import sys

import folders
import pytest
import tokenizers
from folders import refused
from tokenizers import normalizers

import specjax
from specjax.files import read_tokenizer
from specjax.generation.prompts import encode
from specjax.models import Rope, TransformerConfig
from tests.fuzz import bases

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture
def folder(tmp_path):
    """A valid folder that a test may damage."""
    return shutil.copytree(folders.target(), tmp_path / "model")


def base(tmp_path, family, **values):
    """The folder of a small model of a family, with other fields."""
    folder = bases.write(family, tmp_path / family)
    specjax.load(folder)
    return folders.edit(folder, **values)


# --- files that are no plain files ----------------------------------------------------------------

FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_pipe(folder, name):
    """A pipe would wait for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(ValueError, folder, str(folder / name), "a pipe or a device", "replace it")


@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_without_end(folder, name):
    """A file with a hole of 100 GB is measured before it is read."""
    with open(folder / name, "ab") as stream:
        stream.truncate(100 * 2**30)
    refused(ValueError, folder, str(folder / name), f"{100 * 2**30} bytes", "download it again")


def test_weights_with_a_hole(folder):
    """Of weights only the header is read."""
    with open(folder / "model.safetensors", "ab") as stream:
        stream.truncate(100 * 2**30)
    refused(ValueError, folder, str(folder / "model.safetensors"), "download it again")


@pytest.mark.parametrize("target", ["/dev/zero", "elsewhere.json"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_to_the_outside(folder, name, target):
    """Nothing outside the folder is read, neither a device nor the same file elsewhere."""
    if target != "/dev/zero":
        target = shutil.copy(folder / name, folder.parent / target)
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    refused(ValueError, folder, str(folder / name), str(target), "outside", "put a copy")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_link_that_leads_nowhere(folder, name):
    """A link to itself or to a missing file is not taken for a file that is not there."""
    for target in (name, "missing.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        refused(ValueError, folder, str(folder / name), "leads nowhere", "download")


def test_links_that_are_followed(folder):
    """Links within the folder, and those of the Hub's cache to the files beside its snapshots."""
    (folder / "config.json").rename(folder / "own.json")
    (folder / "config.json").symlink_to("own.json")
    specjax.load(folder)
    home = folder.parent / "models--a--b"
    snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copy(file, blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    specjax.load(snapshot)


def test_a_medusa_folder_of_links(folder, tmp_path):
    """Folders of heads obey the same rules."""
    target = specjax.load(folder)
    heads = tmp_path / "heads"
    specjax.save_medusa(heads, specjax.MedusaAdapter.create(target, 1), "t")
    specjax.load_medusa(heads, target)
    shutil.move(heads / "config.json", tmp_path / "elsewhere.json")
    (heads / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match="outside its folder"):
        specjax.load_medusa(heads, target)


@pytest.mark.parametrize("name", ["../model/model.safetensors", "..", "", "x/y.safetensors", 5])
def test_shards_elsewhere(folder, name):
    """An index names files of its own folder."""
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    refused(ValueError, folder, str(index), "weight_map", "of this folder")


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [DEEP, b"9" * 5000], ids=["deep", "long number"])
def test_json_that_python_does_not_read(folder, name, content):
    """Neither a RecursionError nor an error without the file's name."""
    (folder / name).write_bytes(b'{"a": ' + content + b"}")
    refused(ValueError, folder, str(folder / name), "not JSON")


@pytest.mark.parametrize("checked", [True, False])
def test_a_header_that_is_deep(folder, monkeypatch, checked):
    """It is refused by safetensors, and if a version of that skips unknown fields, by us."""
    if not checked:
        monkeypatch.setattr("safetensors.safe_open", lambda *_: None)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    at = header.index(b'"dtype"')
    header = header[:at] + b'"x": ' + DEEP + b", " + header[at:]
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    refused(ValueError, folder, str(file), "damaged" if checked else "not JSON", "download it")


def test_a_header_of_gigabytes(folder):
    """The length of a header is bounded before it is read."""
    file = folder / "model.safetensors"
    file.write_bytes((2**26).to_bytes(8, "little") + file.read_bytes()[8:])
    refused(ValueError, folder, str(file), f"{2**26} bytes", "download it again")


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}

# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "field", "value", "words"),
    [
        ("llama", "num_hidden_layers", 10**5, "at most 512"),
        ("llama", "head_dim", 10**9, "at most 16384"),
        ("llama", "vocab_size", 10**12, "at most"),
        ("mistral", "num_hidden_layers", 10**12, "at most 512"),
        ("mixtral", "num_local_experts", 10**7, "at most 16384"),
        ("mixtral", "num_local_experts", 10**4, "at least 30001 tensors: the files hold"),
        ("qwen3_moe", "num_experts", 10**4, "at least 30001 tensors: the files hold"),
        ("llama", "num_hidden_layers", 500, "at least 500 tensors: the files hold"),
        ("llama", "model_type", [], "model_type is []; it must be one of"),
        ("llama", "eos_token_id", True, "eos_token_id in config.json"),
        ("llama", "eos_token_id", [-1], "eos_token_id in config.json"),
        ("llama", "eos_token_id", 2**40, "eos_token_id in config.json"),
        ("llama", "max_position_embeddings", "64", 'max_position_embeddings is "64"'),
        ("llama", "rope_scaling", [1], "rope_scaling is [1]"),
        ("llama", "hidden_act", ["silu"], 'hidden_act is ["silu"]'),
        ("gpt2", "n_head", 9, "head_dim=0"),
        ("qwen2", "max_window_layers", "x", 'max_window_layers is "x"'),
        ("qwen2", "max_window_layers", -1, "max_window_layers is -1"),
        ("qwen2", "sliding_window", "8", 'sliding_window is "8"'),
        ("qwen2", "layer_types", "sliding_attention", 'layer_types is "sliding_attention"'),
        ("qwen2", "layer_types", ["full_attention"] * 2, "a list of 1 entries"),
        ("qwen3_moe", "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("qwen3_moe", "mlp_only_layers", "0", 'mlp_only_layers is "0"'),
        ("smollm3", "no_rope_layers", [1, 1], "no_rope_layers is [1, 1]"),
        ("smollm3", "no_rope_layers", ["0"], 'no_rope_layers is ["0"]'),
        ("smollm3", "no_rope_layer_interval", 0, "no_rope_layer_interval is 0"),
        ("gemma3_text", "sliding_window_pattern", "6", 'sliding_window_pattern is "6"'),
        ("gemma3_text", "sliding_window_pattern", "LG", 'sliding_window_pattern is "LG"'),
        ("gemma3_text", "sliding_window_pattern", 0, "sliding_window_pattern is 0"),
        ("cohere2", "sliding_window_pattern", 0, "sliding_window_pattern is 0"),
        ("cohere2", "logit_scale", 0, "logit_scale is 0"),
        ("cohere2", "use_qk_norm", True, "use_qk_norm=True is not supported"),
        ("cohere2", "use_parallel_block", False, "use_parallel_block=False is not supported"),
        ("exaone4", "sliding_window_pattern", "LX", 'sliding_window_pattern is "LX"'),
        ("exaone4", "layer_types", ["other"], '"other"'),
        ("granite", "residual_multiplier", "x", 'residual_multiplier is "x"'),
        ("granite", "logits_scaling", 0, "logits_scaling is 0"),
        ("hunyuan_v1_dense", "use_cla", True, "use_cla=True is not supported"),
        ("hunyuan_v1_dense", "rope_scaling", {"type": "dynamic", "alpha": -1}, "alpha is -1"),
        ("ministral3", "rope_scaling", {"type": "default", "llama_4_scaling_beta": -1},
         "llama_4_scaling_beta is -1"),
        ("ministral3", "rope_scaling", {"type": "default", "llama_4_scaling_beta": 1},
         "lacks 'original_max_position_embeddings'"),
        ("olmo3", "rope_parameters", {"full_attention": 5}, "rope_parameters is 5"),
        ("qwen2_moe", "shared_expert_intermediate_size", 0,
         "shared_expert_intermediate_size is 0"),
        ("qwen2_moe", "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("glm4_moe", "n_group", 0, "n_group is 0"),
        ("glm4_moe", "n_group", 2, "2 experts cannot be cut into 2 groups of at least two"),
        ("glm4_moe", "first_k_dense_replace", -1, "first_k_dense_replace is -1"),
        ("glm4_moe", "routed_scaling_factor", 0, "routed_scaling_factor is 0"),
        ("glm4_moe", "n_shared_experts", "1", 'n_shared_experts is "1"'),
        ("minimax_m2", "scoring_func", "softmax", "scoring_func='softmax' is not supported"),
        ("minimax_m2", "use_qk_norm", False, "use_qk_norm=False is not supported"),
        ("minimax_m2", "attn_type_list", [0], "attn_type_list="),
        ("minimax_m2", "rotary_dim", "64", 'rotary_dim is "64"'),
        ("gpt_oss", "swiglu_limit", 0, "swiglu_limit is 0"),
        ("gpt_oss", "hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("ernie4_5_moe", "use_bias", True, "use_bias=True is not supported"),
        ("ernie4_5_moe", "moe_norm_min", 0.5, "moe_norm_min=0.5 is not supported"),
        ("ernie4_5_moe", "moe_layer_interval", 0, "moe_layer_interval is 0"),
        ("ernie4_5_moe", "moe_num_experts", [64, 64], "moe_num_experts is [64, 64]"),
        ("seed_oss", "attention_out_bias", "x", 'attention_out_bias is "x"'),
        ("ernie4_5", "use_bias", "x", 'use_bias is "x"'),
        ("glm4", "attention_bias", "x", 'attention_bias is "x"'),
        ("starcoder2", "norm_type", "rms", "norm_type='rms' is not supported"),
        ("starcoder2", "use_bias", "x", 'use_bias is "x"'),
        ("stablelm", "qk_layernorm", "x", 'qk_layernorm is "x"'),
        ("gemma3_text", "rope_parameters", {"full_attention": 5}, "rope_parameters is 5"),
        ("gemma4_text", "layer_types", ["other"], '"other"'),
        ("gemma4_text", "use_bidirectional_attention", "all",
         "use_bidirectional_attention='all' is not supported"),
        ("gemma4_text", "vocab_size_per_layer_input", 7,
         "vocab_size_per_layer_input=7 is not supported"),
        ("gemma4_text", "hidden_size_per_layer_input", -1, "hidden_size_per_layer_input is -1"),
        ("gemma4_text", "num_kv_shared_layers", 1, "num_kv_shared_layers is 1"),
        ("gemma4_text", "enable_moe_block", True, "lacks 'num_experts'"),
        ("gemma4_text", "global_head_dim", "x", 'global_head_dim is "x"'),
        ("gemma4_text", "attention_k_eq_v", "x", 'attention_k_eq_v is "x"'),
        ("gemma4_text", "rope_parameters", {"full_attention": 5},
         "rope_parameters for full_attention is 5"),
        ("gemma4_text", "rope_parameters", {"full_attention": {"rope_type": "yarn"}},
         'rope_type for full_attention is "yarn"'),
        ("gemma4_text", "per_layer_config", {"3": {}}, 'an entry in per_layer_config is "3"'),
        ("gemma4_text", "per_layer_config", {"0": {"sliding_window": 3}}, '["sliding_window"]'),
        ("gemma4_text", "per_layer_config", {"0": {"head_dim": 0}},
         "head_dim in per_layer_config[0] is 0"),
        ("deepseek_v2", "topk_method", "noaux_tc", 'topk_method is "noaux_tc"'),
        ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob=True is not supported"),
        ("deepseek_v3", "kv_lora_rank", "6", 'kv_lora_rank is "6"'),
        ("deepseek_v3", "num_key_value_heads", 1, "num_key_value_heads=1 is not supported"),
        ("deepseek_v3", "first_k_dense_replace", "1", 'first_k_dense_replace is "1"'),
        ("deepseek_v3", "n_shared_experts", -1, "n_shared_experts is -1"),
        ("deepseek_v3", "n_group", 3, "4 experts cannot be cut into 3 groups"),
        ("deepseek_v3", "rope_interleave", "x", 'rope_interleave is "x"'),
        ("kimi_k2", "scoring_func", "softmax", "scoring_func='softmax' is not supported"),
        ("kimi_k2", "rope_scaling", {"type": "linear", "factor": 2.0, "mscale_all_dim": 1},
         "mscale_all_dim=1 is not supported"),
        ("glm4_moe_lite", "mlp_layer_types", ["other"], '"other"'),
        ("glm4_moe_lite", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5"),
        ("mistral4", "rope_parameters", {"type": "default", "partial_rotary_factor": 1.0},
         "partial_rotary_factor=1.0"),
        ("mistral4", "rope_parameters", {"type": "default", "llama_4_scaling_beta": -1},
         "llama_4_scaling_beta is -1"),
        ("gemma2", "query_pre_attn_scalar", 0, "query_pre_attn_scalar is 0"),
        ("opt", "word_embed_proj_dim", 0.5, "word_embed_proj_dim is 0.5"),
        ("gpt2", "activation_function", {}, "activation_function is {}"),
        ("gpt_neox", "rotary_pct", 1e-40, "rotary_pct is 1e-40"),
        ("phi3", "rope_scaling", {**LONG, "short_factor": [1.0] * 5}, "5 factors"),
        ("phi3", "rope_scaling", {**LONG, "short_factor": 5}, "short_factor is 5"),
        ("phi3", "max_position_embeddings", None, None),
    ],
)  # fmt: skip
def test_a_field_of_a_family(tmp_path, family, field, value, words):
    """Types and sizes are checked before anything is built, and the error names the file."""
    folder = base(tmp_path, family, **{field: value})
    if field == "eos_token_id":
        (folder / "generation_config.json").unlink()
    if words is None:
        specjax.load(folder)
    else:
        refused(ValueError, folder, str(folder), "config.json", words)


@pytest.mark.parametrize(
    "values", [{"num_key_value_heads": 3}, {"hidden_act": "x"}, {"head_dim": 3}]
)
def test_every_refusal_names_the_file_and_the_cure(folder, values):
    """Also those of a check that knows no file."""
    folders.edit(folder, **values)
    refused(ValueError, folder, str(folder / "config.json"), "download it again")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_k", 2.5), ("top_p", 0), ("min_p", 2), ("repetition_penalty", 0)],
)
def test_a_sampling_default_out_of_its_range(folder, name, value):
    """`generate` would refuse it, as an argument that nobody has passed."""
    folders.edit(folder, "generation_config.json", do_sample=True, **{name: value})
    refused(ValueError, folder, "generation_config.json", f"{name} is {value};")


def test_do_sample_is_a_text(folder):
    """The string "false" would count as true."""
    folders.edit(folder, "generation_config.json", do_sample="false")
    refused(ValueError, folder, "generation_config.json", 'do_sample is "false"')


SMALL = {"vocab_size": 9, "hidden_size": 8, "mlp_size": 8, "num_layers": 1, "num_heads": 2,
         "num_kv_heads": 1, "head_dim": 4, "max_positions": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "9"), ("num_layers", 10**5), ("head_dim", 0), ("num_heads", 2.0),
        ("rope", "default"), ("ropes", [None]), ("windows", ("4",)), ("sparse", (1,)),
        ("norm", "batch"), ("norm_order", []), ("norm_eps", float("nan")), ("qk_norm", "each"),
        ("activation", "tanh"), ("gated", 1), ("query_scale", 0.0), ("embedding_scale", "1"),
        ("num_experts", -1), ("position_offset", -1), ("family", None), ("embedding_size", 0),
    ],
)  # fmt: skip
def test_a_record_of_another_kind(field, value):
    """A configuration that is built in Python is checked as those of files are."""
    TransformerConfig(**SMALL)
    with pytest.raises(ValueError, match=field):
        TransformerConfig(**{**SMALL, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("theta", 1.0), ("theta", "1e4"), ("kind", []), ("fraction", 2.0), ("factor", 0),
        ("truncate", 1), ("factors", [1.0]), ("factors", ("1",)), ("amplitude", float("inf")),
    ],
)  # fmt: skip
def test_a_rope_of_another_kind(field, value):
    with pytest.raises(ValueError, match=field):
        Rope(**{field: value})


# --- tokenizers -----------------------------------------------------------------------------------


def with_normalizer(folder, normalizer):
    return folders.edit(folder, "tokenizer.json", normalizer=normalizer)


@pytest.mark.parametrize("charsmap", ["", "BAAAAA==", "BAAAAAAAAAAAAAAA", "/////wAAAAAAAAAA"])
def test_a_normalizer_that_panics(folder, charsmap):
    """A panic of Rust passes `except Exception`, some at the first text only."""
    with_normalizer(folder, {"type": "Precompiled", "precompiled_charsmap": charsmap})
    refused(ValueError, folder, str(folder / "tokenizer.json"), "download it")


def test_a_normalizer_that_allocates(folder):
    """Eight replacements of one letter by ten make a letter a hundred million."""
    step = {"type": "Replace", "pattern": {"String": "☃"}, "content": "☃" * 10}
    with_normalizer(folder, {"type": "Sequence", "normalizers": [step] * 8})
    refused(ValueError, folder, str(folder / "tokenizer.json"), "1e+08 times as long")


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                        "stride": 5}},
        {"padding": {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
    ],
)  # fmt: skip
def test_settings_that_would_end_the_process(folder, settings):
    """They are switched off, so the tokens are those of the tokenizer without them."""
    wanted = read_tokenizer(folder / "tokenizer.json").encode("the cat sat").ids
    folders.edit(folder, "tokenizer.json", **settings)
    assert read_tokenizer(folder / "tokenizer.json").encode("the cat sat").ids == wanted


def test_a_text_that_a_tokenizer_cannot_encode(folder):
    """A word without a token, where the file has no token for unknown words, names the prompt."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 0}, unk_token="?"))
    words.normalizer = normalizers.Lowercase()
    target = specjax.load(folder)
    target = specjax.LanguageModel(target.model, target.params, words)
    assert encode(target, ["CAT"]) == [[0]]
    with pytest.raises(ValueError, match=r"prompt 0 .*the tokenizer fails"):
        encode(target, ["dog"])


def test_the_vocabulary_of_a_translation():
    """Arguments of `translate` are checked."""
    words = folders.tokenizer()
    for name, value in (
        ("target", 5),
        ("draft", None),
        ("target_size", 0),
        ("max_pieces", "8"),
        ("same", [1]),
    ):
        arguments = {"target": words, "draft": words, "target_size": 320, "draft_size": 320}
        with pytest.raises(ValueError, match=name):
            specjax.translate(**{**arguments, name: value})


def test_a_process_is_not_needed_twice(folder, monkeypatch):
    """A tokenizer that was tried before is read without a child."""
    read_tokenizer(folder / "tokenizer.json")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    specjax.text.sandbox.close()
    read_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"/nowhere.*may start processes"):
        read_tokenizer(folder / "tokenizer.json")
