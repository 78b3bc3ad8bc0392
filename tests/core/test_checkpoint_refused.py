"""Invalid weights, tokenizers and files are refused with the cure, before any compilation."""

import json
import pickle
import shutil

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from folders import refused

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


def test_missing_folder(tmp_path):
    """The missing folder is named."""
    refused(
        FileNotFoundError,
        tmp_path / "nowhere",
        str(tmp_path / "nowhere"),
        "config.json",
        "model.safetensors",
    )


@pytest.mark.parametrize("kind", ["llama", "their_own"])
def test_code_is_never_executed(folder, kind):
    """`auto_map` is refused for every model_type, and the folder's code does not run."""
    marker = folder / "ran"
    (folder / "modeling_evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    )
    folders.edit(folder, model_type=kind, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    refused(ValueError, folder, "auto_map", "never executes", "remove")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(folder, file):
    """Pickled weights are not opened, and the error says how to convert them."""
    marker = folder / "ran"

    class Evil:
        def __reduce__(self):
            return open, (str(marker), "w")

    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Evil()))
    refused(ValueError, folder, "pickled", "safe_serialization=True")
    assert not marker.exists()


def test_no_weights(folder):
    """A folder without any weights is refused."""
    (folder / "model.safetensors").unlink()
    refused(FileNotFoundError, folder, str(folder), "model.safetensors.index.json")


def test_all_that_does_not_fit_is_named_at_once(folder):
    """One error lists missing, misshapen and unexpected tensors."""

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((7, 5), np.float32)
        tensors["model.layers.9.surprise"] = np.zeros(2, np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)

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


def test_bias_without_its_tensor(folder):
    """`attention_bias` requires four tensors per layer."""
    folders.edit(folder, attention_bias=True)
    message = refused(
        ValueError, folder, "model.layers.1.self_attn.o_proj.bias is missing (shape [48])"
    )
    assert message.count("is missing") == 8


@pytest.mark.parametrize("kept", [0, 4, 100, 10_000])
def test_truncated(folder, kept):
    """A file that was cut off is refused."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(ValueError, folder, str(file), "truncated", "download it again")


def test_missing_shards(shards):
    """The error names all missing shards and no others."""
    folder, weight_map = shards
    first, second, *rest = sorted(set(weight_map.values()))
    (folder / first).unlink()
    (folder / second).unlink()
    message = refused(FileNotFoundError, folder, first, second, "download the missing shards")
    assert not any(name in message for name in rest)


def test_tensor_in_two_shards(shards):
    """A tensor that is in two shards is ambiguous."""
    folder, weight_map = shards
    home = weight_map["model.norm.weight"]
    other = next(file for file in weight_map.values() if file != home)
    tensors = safetensors.numpy.load_file(folder / other)
    tensors["model.norm.weight"] = np.ones(48, np.float32)
    folders.save_tensors(tensors, folder / other)
    refused(ValueError, folder, "model.norm.weight is in two files")


@pytest.mark.parametrize("dtype", [np.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
def test_weights_are_no_floats(folder, dtype):
    """Quantised numbers without their scales are refused, whatever config.json says."""
    name = "model.layers.0.mlp.up_proj.weight"
    folders.change_tensors(
        folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)})
    )
    refused(ValueError, folder, name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_are_not_finite(folder, value):
    """The error names the tensors and the cure; such weights would repeat one token for ever."""
    names = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        for name in names:
            tensors[name][3, 5] = value

    folders.change_tensors(folder, spoil)
    refused(ValueError, folder, str(folder), *names, "before its loss diverged")


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.json"])
def test_tokenizer_of_an_older_format(folder, name):
    """Other tokenizer formats are not ignored: the error names the file and how to convert it."""
    (folder / "tokenizer.json").rename(folder / name)
    refused(ValueError, folder, name, "tokenizer.json", "save_pretrained")


def test_tokenizer_larger_than_the_embedding(tmp_path):
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
def test_files_that_cannot_be_read(folder, name):
    """The file is replaced by a folder, which even root cannot read as a file."""
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(IsADirectoryError, folder, str(folder / name), "cannot be read")


def test_without_permission(folder, monkeypatch):
    """The error names the file and says what to do. `open` is patched, since root may read every
    file."""

    def forbid(file, *_):
        raise PermissionError(13, "Permission denied", str(file))

    jax.random.key(0)  # compiled while files can still be opened
    monkeypatch.setattr("builtins.open", forbid)
    refused(
        PermissionError, folder, str(folder / "config.json"), "Permission denied", "you may read"
    )


@pytest.mark.parametrize("value", ["warm", True, [0.5]])
def test_sampling_default_of_another_kind(folder, value):
    """The error names the setting and its value."""
    folders.edit(folder, "generation_config.json", do_sample=True, temperature=value)
    refused(ValueError, folder, "temperature", json.dumps(value))


def test_damaged_tokenizer(folder):
    """A tokenizer.json that is not a tokenizer is refused."""
    (folder / "tokenizer.json").write_text("{")
    refused(ValueError, folder, str(folder / "tokenizer.json"))


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "foo"])
def test_unsupported_dtype(folder, dtype):
    """The error names the dtype and the supported ones."""
    refused(ValueError, folder, dtype, "float32", "bfloat16", "float16", dtype=dtype)


def test_an_unknown_precision(folder):
    """The error names it and those that there are."""
    refused(ValueError, folder, "'float99'", "highest", precision="float99")
