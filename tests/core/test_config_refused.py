"""Invalid config.json files are refused with fault and cure, before anything is compiled."""

import json
import shutil

import folders
import pytest
from folders import refused

import specjax


@pytest.fixture
def folder(tmp_path):
    """A valid folder that a test may damage."""
    return shutil.copytree(folders.target(), tmp_path / "model")


def test_missing_config(folder):
    """A folder without config.json is refused."""
    (folder / "config.json").unlink()
    refused(FileNotFoundError, folder, str(folder / "config.json"), "missing")


@pytest.mark.parametrize("text", ["{", "", "\xff\xfe", "weights: yes"])
def test_config_is_not_json(folder, text):
    """A config.json that is not JSON is refused."""
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(ValueError, folder, str(folder / "config.json"), "not JSON")


def test_config_is_no_object(folder):
    """A config.json that is JSON but not an object is refused."""
    (folder / "config.json").write_text("[1]")
    refused(ValueError, folder, str(folder / "config.json"), "list")


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
)
def test_config_lacks_a_key(folder, key):
    """The error names the key and the model_type that needs it."""
    folders.edit(folder, drop=(key,))
    refused(ValueError, folder, str(folder / "config.json"), key, "llama")


def test_rope_lacks_a_key(folder):
    """A scaled rope without its factor is refused."""
    folders.edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    refused(ValueError, folder, str(folder / "config.json"), "factor")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "x"),
        ("num_hidden_layers", None),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
    ],
)
def test_config_value_of_another_kind(folder, key, value):
    """The error names the key and its value."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, json.dumps(value))


NAN, INFINITY = float("nan"), float("inf")


def named(value):
    """The words of an error: the value as the file has it, and the requirement."""
    return f"is {json.dumps(value)}", "finite number"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rms_norm_eps", value) for value in (NAN, INFINITY, -1e-6, 1e39, 10**400)),
        *(("rms_norm_eps", value) for value in ("1e-6", None, True)),
        *(("initializer_range", value) for value in (NAN, -1)),
    ],
)
def test_a_number_out_of_its_range(folder, key, value):
    """The error names key and value; with many of these values decoding would repeat one token
    for ever."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, *named(value))


@pytest.mark.parametrize("value", [NAN, INFINITY, 0, 1.0, -1e4, "1e4"])
@pytest.mark.parametrize("form", ["new", "old"])
def test_a_base_out_of_its_range(folder, form, value):
    """`rope_theta` is checked both where transformers 5 writes it and where older files have it."""
    if form == "new":
        folders.edit(folder, rope_parameters={"rope_type": "default", "rope_theta": value})
    else:
        folders.edit(folder, rope_theta=value, drop=("rope_parameters",))
    refused(ValueError, folder, str(folder / "config.json"), "rope_theta", *named(value))


@pytest.mark.parametrize("value", [NAN, 0, 1.5])
def test_a_fraction_out_of_its_range(folder, value):
    """The share of a head's dimensions that are rotated is checked."""
    folders.edit(folder, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": value})
    refused(ValueError, folder, str(folder / "config.json"), "partial_rotary_factor", *named(value))


ROPES = {
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
    "longrope": {"short_factor": [1.0] * 6},
}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *((kind, "factor", value) for kind in ROPES for value in (0, NAN, -2.0, "8")),
        ("llama3", "low_freq_factor", -1.0),
        ("llama3", "high_freq_factor", 0.5),
        *(("yarn", key, -1.0) for key in ("beta_fast", "beta_slow", "attention_factor")),
        ("longrope", "attention_factor", NAN),
    ],
)
def test_a_number_of_a_rope_out_of_its_range(folder, kind, key, value):
    """The numbers that scale the positions are checked in every rope type."""
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    rope["original_max_position_embeddings"] = 64
    specjax.load(folders.edit(folder, rope_parameters=rope))
    folders.edit(folder, rope_parameters={**rope, key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, *named(value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("short_factor", [1.0, 0.0], "short_factor is 0.0"),
        ("original_max_position_embeddings", -64, "original_max_position_embeddings is -64"),
    ],
)
def test_another_value_of_a_long_rope(folder, key, value, message):
    """Each factor, and the original length that the factors scale, is checked."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    folders.edit(folder, rope_parameters={**rope, **ROPES["longrope"], key: value})
    refused(ValueError, folder, message)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["false", "true", 0])
def test_a_switch_is_true_or_false(folder, key, value):
    """The string "false" would count as true, so only JSON booleans are accepted."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, f"{key} is {json.dumps(value)}; it must be true or false")


@pytest.mark.parametrize("kind", ["mamba", None])
def test_unknown_model_type(folder, kind):
    """The error names the type and the supported types."""
    folders.edit(folder, model_type=kind)
    refused(ValueError, folder, json.dumps(kind), "llama")


def test_unknown_rope(folder):
    """The error names the rope type and the supported ones."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}
    folders.edit(folder, rope_parameters=rope)
    refused(ValueError, folder, '"proportional"', "default", "linear", "llama3")


def test_unknown_activation(folder):
    """The error names the activation and the supported one."""
    folders.edit(folder, hidden_act="quick_gelu")
    refused(ValueError, folder, '"quick_gelu"', "silu")


def test_heads_do_not_divide(folder):
    """The number of query heads must be a multiple of the number of key heads."""
    folders.edit(folder, num_key_value_heads=3)
    refused(ValueError, folder, "num_heads=4", "num_kv_heads=3")


def test_quantised(folder):
    """A quantisation that is not supported is refused by its name, and so are its fields."""
    for method in ("bitsandbytes", "hqq", None):
        folders.edit(folder, quantization_config={"quant_method": method, "load_in_4bit": True})
        refused(ValueError, folder, f"of the method {method!r}", "gptq", "unquantised")
    fields = [
        ("gptq", "bits", 3, "bits is 3"),
        ("gptq", "group_size", 0, "group_size is 0"),
        ("gptq", "checkpoint_format", "marlin", 'checkpoint_format is "marlin"'),
        ("gptq", "dynamic", {"+:.*": {"bits": 8}}, "dynamic gives"),
        ("gptq", "rotation", "hadamard", "'rotation'"),
        ("awq", "version", "gemv", "version is 'gemv'"),
        ("awq", "zero_point", False, "zero_point is false"),
        ("fp8", "fmt", "e5m2", 'fmt is "e5m2"'),
        ("fp8", "weight_block_size", [128], "weight_block_size is [128]"),
        ("modelopt", "quant_algo", "W4A8_AWQ", 'quant_algo is "W4A8_AWQ"'),
        ("compressed-tensors", "format", "marlin-24", 'format is "marlin-24"'),
        ("compressed-tensors", "format", [], "format is []"),
        ("compressed-tensors", "config_groups", [1], "config_groups is [1]"),
        ("gptq", "dynamic", [3], "dynamic is [3]"),
        ("gptq", "bits", [], "bits is []"),
        ("awq", "version", {"a": 1}, "version is {'a': 1}"),
    ]
    for method, name, value, message in fields:
        base = {"compressed-tensors": {"format": "pack-quantized"}, "fp8": {}, "modelopt": {}}
        settings = {"quant_method": method, **base.get(method, {"bits": 4}), name: value}
        folders.edit(folder, quantization_config=settings)
        refused(ValueError, folder, message, "config.json", "unquantised")


def test_plain_weights_that_are_said_to_be_packed(folder):
    """The cure is to say nothing."""
    folders.edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(ValueError, folder, "no tensor is", "remove its quantization_config")
