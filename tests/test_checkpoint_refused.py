"""Invalid folders are refused with the fault and the cure, before anything is compiled."""

import json
import shutil

import folders
import jax
import pytest
import safetensors.torch
import torch

import specjax


@pytest.fixture
def folder(tmp_path):
    """A valid folder that a test may damage."""
    return shutil.copytree(folders.target(), tmp_path / "model")


@pytest.fixture
def shards(tmp_path):
    """A valid folder of several weight files, and its weight map."""
    folders.random_llama(5).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    return tmp_path / "shards", index["weight_map"]


@pytest.fixture
def refused():
    """`load` raises, its message holds every word, and nothing was compiled."""
    jax.random.key(0)

    def check(error, folder, *words, **options):
        before = folders.compilations()
        with pytest.raises(error) as caught:
            specjax.load(folder, **options)
        assert folders.compilations() == before
        assert [word for word in words if word not in str(caught.value)] == [], caught.value
        return str(caught.value)

    return check


def test_missing_folder(refused, tmp_path):
    """The missing folder is named."""
    refused(
        FileNotFoundError,
        tmp_path / "nowhere",
        str(tmp_path / "nowhere"),
        "config.json",
        "model.safetensors",
    )


def test_missing_config(refused, folder):
    """A folder without config.json is refused."""
    (folder / "config.json").unlink()
    refused(FileNotFoundError, folder, str(folder / "config.json"), "missing")


@pytest.mark.parametrize("text", ["{", "", "\xff\xfe", "weights: yes"])
def test_config_is_not_json(refused, folder, text):
    """A config.json that is not JSON is refused."""
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(ValueError, folder, str(folder / "config.json"), "not JSON")


def test_config_is_no_object(refused, folder):
    """A config.json that is JSON but not an object is refused."""
    (folder / "config.json").write_text("[1]")
    refused(ValueError, folder, str(folder / "config.json"), "list")


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
)
def test_config_lacks_a_key(refused, folder, key):
    """The error names the key and the model_type that needs it."""
    folders.edit(folder, drop=(key,))
    refused(ValueError, folder, str(folder / "config.json"), key, "llama")


def test_rope_lacks_a_key(refused, folder):
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
def test_config_value_of_another_kind(refused, folder, key, value):
    """The error names the key and its value."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, repr(value))


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
def test_a_number_out_of_its_range(refused, folder, key, value):
    """The error names key and value; with many of these values decoding would repeat one token
    for ever."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, *named(value))


@pytest.mark.parametrize("value", [NAN, INFINITY, 0, 1.0, -1e4, "1e4"])
@pytest.mark.parametrize("form", ["new", "old"])
def test_a_base_out_of_its_range(refused, folder, form, value):
    """`rope_theta` is checked both where transformers 5 writes it and where older files have it."""
    if form == "new":
        folders.edit(folder, rope_parameters={"rope_type": "default", "rope_theta": value})
    else:
        folders.edit(folder, rope_theta=value, drop=("rope_parameters",))
    refused(ValueError, folder, str(folder / "config.json"), "rope_theta", *named(value))


@pytest.mark.parametrize("value", [NAN, 0, 1.5])
def test_a_fraction_out_of_its_range(refused, folder, value):
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
        ("llama3", "high_freq_factor", 1.0),
        *(("yarn", key, -1.0) for key in ("beta_fast", "beta_slow", "attention_factor")),
        ("longrope", "attention_factor", NAN),
    ],
)
def test_a_number_of_a_rope_out_of_its_range(refused, folder, kind, key, value):
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
def test_another_value_of_a_long_rope(refused, folder, key, value, message):
    """Each factor, and the original length that the factors scale, is checked."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    folders.edit(folder, rope_parameters={**rope, **ROPES["longrope"], key: value})
    refused(ValueError, folder, message)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["false", "true", 0, None])
def test_a_switch_is_true_or_false(refused, folder, key, value):
    """The string "false" would count as true, so only JSON booleans are accepted."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, f"{key} is {json.dumps(value)}; it must be true or false")


@pytest.mark.parametrize("kind", ["mamba", None])
def test_unknown_model_type(refused, folder, kind):
    """The error names the type and the supported types."""
    folders.edit(folder, model_type=kind)
    refused(ValueError, folder, repr(kind), "llama")


def test_unknown_rope(refused, folder):
    """The error names the rope type and the supported ones."""
    folders.edit(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refused(ValueError, folder, "'dynamic'", "default", "linear", "llama3")


def test_unknown_activation(refused, folder):
    """The error names the activation and the supported one."""
    folders.edit(folder, hidden_act="quick_gelu")
    refused(ValueError, folder, "'quick_gelu'", "silu")


def test_heads_do_not_divide(refused, folder):
    """The number of query heads must be a multiple of the number of key heads."""
    folders.edit(folder, num_key_value_heads=3)
    refused(ValueError, folder, "num_heads=4", "num_kv_heads=3")


def test_quantised(refused, folder):
    """A quantised folder is refused."""
    folders.edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(ValueError, folder, "quantization_config", "unquantised")


@pytest.mark.parametrize("kind", ["llama", "their_own"])
def test_code_is_never_executed(refused, folder, kind):
    """`auto_map` is refused for every model_type, and the folder's code does not run."""
    marker = folder / "ran"
    (folder / "modeling_evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    )
    folders.edit(folder, model_type=kind, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    refused(ValueError, folder, "auto_map", "never executes", "remove")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(refused, folder, file):
    """Pickled weights are not opened, and the error says how to convert them."""
    marker = folder / "ran"

    class Evil:
        def __reduce__(self):
            return open, (str(marker), "w")

    (folder / "model.safetensors").unlink()
    torch.save(Evil(), folder / file)
    refused(ValueError, folder, "pickled", "safe_serialization=True")
    assert not marker.exists()


def test_no_weights(refused, folder):
    """A folder without any weights is refused."""
    (folder / "model.safetensors").unlink()
    refused(FileNotFoundError, folder, str(folder), "model.safetensors.index.json")


def test_all_that_does_not_fit_is_named_at_once(refused, folder):
    """One error lists missing, misshapen and unexpected tensors."""

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(7, 5)
        tensors["model.layers.9.surprise"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)

    folders.change_tensors(folder, spoil)
    message = refused(
        ValueError,
        folder,
        str(folder),
        "model.norm.weight is missing (shape [48])",
        "model.layers.1.mlp.up_proj.weight is missing (shape [64, 48])",
        "model.layers.0.self_attn.q_proj.weight has shape [7, 5] instead of [48, 48]",
        "model.layers.9.surprise is not a tensor of this architecture",
        "model.layers.0.self_attn.q_proj.bias is not a tensor of this architecture",
    )
    assert message.count("\n") == 5


def test_bias_without_its_tensor(refused, folder):
    """`attention_bias` requires four tensors per layer."""
    folders.edit(folder, attention_bias=True)
    message = refused(
        ValueError, folder, "model.layers.1.self_attn.o_proj.bias is missing (shape [48])"
    )
    assert message.count("is missing") == 8


@pytest.mark.parametrize("kept", [0, 4, 100, 10_000])
def test_truncated(refused, folder, kept):
    """A file that was cut off is refused."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(ValueError, folder, str(file), "truncated", "download it again")


def test_missing_shards(refused, shards):
    """The error names all missing shards and no others."""
    folder, weight_map = shards
    first, second, *rest = sorted(set(weight_map.values()))
    (folder / first).unlink()
    (folder / second).unlink()
    message = refused(FileNotFoundError, folder, first, second, "download the missing shards")
    assert not any(name in message for name in rest)


def test_tensor_in_two_shards(refused, shards):
    """A tensor that is in two shards is ambiguous."""
    folder, weight_map = shards
    home = weight_map["model.norm.weight"]
    other = next(file for file in weight_map.values() if file != home)
    tensors = safetensors.torch.load_file(folder / other)
    tensors["model.norm.weight"] = torch.ones(48)
    safetensors.torch.save_file(tensors, folder / other, metadata={"format": "pt"})
    refused(ValueError, folder, "model.norm.weight is in two files")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_weights_are_no_floats(refused, folder, dtype):
    """Quantised numbers without their scales are refused, whatever config.json says."""
    name = "model.layers.0.mlp.up_proj.weight"
    folders.change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(ValueError, folder, name)


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_weights_are_not_finite(refused, folder, value):
    """The error names the tensors and the cure; such weights would repeat one token for ever."""
    names = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        for name in names:
            tensors[name][3, 5] = value

    folders.change_tensors(folder, spoil)
    refused(ValueError, folder, str(folder), *names, "before its loss diverged")


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.json"])
def test_tokenizer_of_an_older_format(refused, folder, name):
    """Other tokenizer formats are not ignored: the error names the file and how to convert it."""
    (folder / "tokenizer.json").rename(folder / name)
    refused(ValueError, folder, name, "tokenizer.json", "save_pretrained")


def test_tokenizer_larger_than_the_embedding(refused, tmp_path):
    """The tokenizer belongs to another model."""
    folder = shutil.copytree(folders.foreign(), tmp_path / "model")
    shutil.copy(folders.tokenizer_file(), folder / "tokenizer.json")
    refused(
        ValueError, folder, str(folder / "tokenizer.json"), "up to 289", "280 rows", "another model"
    )


def test_an_added_token_beyond_the_embedding(tmp_path):
    """Gemma 3 has such a token: the folder loads, and a prompt that uses the token is refused."""
    tokenizer = folders.tokenizer()
    size = tokenizer.get_vocab_size()
    folders.random_llama(2, vocab_size=size).save_pretrained(tmp_path)
    assert tokenizer.add_special_tokens(["<image>"]) == 1
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"to {size}; the vocabulary of .* has {size}"):
        specjax.generate(specjax.load(tmp_path), "a cat <image>")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_files_that_cannot_be_read(refused, folder, name):
    """The file is replaced by a folder, which even root cannot read as a file."""
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(IsADirectoryError, folder, str(folder / name), "cannot be read")


def test_without_permission(refused, folder, monkeypatch):
    """The error names the file and says what to do. `open` is patched, since root may read every
    file."""

    def forbid(file, *_):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("builtins.open", forbid)
    refused(
        PermissionError, folder, str(folder / "config.json"), "Permission denied", "you may read"
    )


@pytest.mark.parametrize("value", ["warm", True, [0.5]])
def test_sampling_default_of_another_kind(refused, folder, value):
    """The error names the setting and its value."""
    folders.edit(folder, "generation_config.json", do_sample=True, temperature=value)
    refused(ValueError, folder, "temperature", repr(value))


def test_damaged_tokenizer(refused, folder):
    """A tokenizer.json that is not a tokenizer is refused."""
    (folder / "tokenizer.json").write_text("{")
    refused(ValueError, folder, str(folder / "tokenizer.json"))


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "foo"])
def test_unsupported_dtype(refused, folder, dtype):
    """The error names the dtype and the supported ones."""
    refused(ValueError, folder, dtype, "float32", "bfloat16", "float16", dtype=dtype)
