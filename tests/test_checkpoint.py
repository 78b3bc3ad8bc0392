"""Folders: what goes in comes out, and what does not fit is named, with the cure, before anything is compiled."""

import json
import shutil

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import specjax


@pytest.fixture
def folder(tmp_path):
    """A good folder, to be spoilt."""
    return shutil.copytree(folders.target(), tmp_path / "model")


@pytest.fixture
def shards(tmp_path):
    """A good folder of several files, and its weight map."""
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


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def logits(loaded, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    return np.asarray(loaded.model.apply(loaded.params, jnp.asarray(tokens), positions).logits)


# --- round trips -----------------------------------------------------------------------------------------------------

SAVED = {
    "float32": {},
    "bfloat16": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 6},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@pytest.mark.parametrize("name", SAVED)
def test_round_trip(name, tmp_path):
    """load(save(model)) is the model, bit for bit: configuration, weights, tokenizer and eos."""
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    first = specjax.load(folders.write(folders.random_llama(6, **SAVED[name]), f"trip-{name}"), dtype)
    specjax.save(tmp_path, first.model, first.params, tokenizer=folders.tokenizer_file(), eos=(0, 7))
    second = specjax.load(tmp_path, dtype)
    assert second.model == first.model
    assert jax.tree.structure(second.params) == jax.tree.structure(first.params)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert second.eos == (0, 7)


@pytest.mark.parametrize("name", SAVED)
def test_transformers_reads_what_save_writes(name, tmp_path):
    """AutoModelForCausalLM loads a saved folder in the saved dtype, and its logits are ours."""
    loaded = specjax.load(folders.write(folders.random_llama(6, **SAVED[name]), f"back-{name}"))
    dtype = jnp.bfloat16 if name == "bfloat16" else None
    specjax.save(tmp_path, loaded.model, loaded.params, eos=(0,), dtype=dtype)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == (torch.bfloat16 if dtype else torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = folders.random_tokens(60)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits(specjax.load(tmp_path), tokens), wanted, rtol=0, atol=1e-4)


def test_transformers_reads_the_saved_tokenizer(tmp_path):
    """AutoTokenizer gives a text the ids that ours gives it."""
    loaded = specjax.load(folders.target())
    specjax.save(tmp_path, loaded.model, loaded.params, tokenizer=folders.tokenizer_file(), eos=(0,))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(folders.TEXT)["input_ids"] == specjax.load(tmp_path).tokenizer.encode(folders.TEXT).ids


def test_save_rounds(tmp_path):
    """`dtype` rounds the weights to nearest, and no further."""
    loaded = specjax.load(folders.target())
    specjax.save(tmp_path, loaded.model, loaded.params, dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32), loaded.params)
    jax.tree.map(np.testing.assert_array_equal, specjax.load(tmp_path).params, rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype):
    """`dtype` is that of every parameter and of the cache."""
    loaded = specjax.load(folders.target(), dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {dtype}
    assert loaded.model.init_cache(1, 4).keys[0].dtype == dtype


def test_num_params():
    """`num_params` counts what transformers counts."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders.target())
    assert specjax.load(folders.target()).num_params == theirs.num_parameters()


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        (5, 6, (5,)),
        ([5, 7], 6, (5, 7)),
        (None, 6, (6,)),
        (None, [6, 8], (6, 8)),
        (None, None, ()),
        ("no file", 6, (6,)),
        (0, 6, (0,)),
    ],
)
def test_eos(folder, generation, config, eos):
    """An id or a list of them; generation_config.json goes before config.json."""
    folders.edit(folder, eos_token_id=config)
    if generation == "no file":
        (folder / "generation_config.json").unlink()
    else:
        folders.edit(folder, "generation_config.json", eos_token_id=generation)
    assert specjax.load(folder).eos == eos


def test_no_tokenizer():
    """A folder without tokenizer.json loads, without a tokenizer."""
    assert specjax.load(folders.wordless()).tokenizer is None


def test_rotary_buffers_are_ignored(folder):
    """Old files hold the rotary frequencies; they are no weights."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(6)}))
    assert specjax.load(folder).num_params == specjax.load(folders.target()).num_params


# --- refusals --------------------------------------------------------------------------------------------------------


def test_missing_folder(refused, tmp_path):
    """A folder that is not there is named."""
    refused(FileNotFoundError, tmp_path / "nowhere", str(tmp_path / "nowhere"), "config.json", "model.safetensors")


def test_missing_config(refused, folder):
    """A folder without config.json."""
    (folder / "config.json").unlink()
    refused(FileNotFoundError, folder, str(folder / "config.json"), "missing")


@pytest.mark.parametrize("text", ["{", "", "\xff\xfe", "weights: yes"])
def test_config_is_not_json(refused, folder, text):
    """A config.json that is not JSON."""
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(ValueError, folder, str(folder / "config.json"), "not JSON")


def test_config_is_no_object(refused, folder):
    """A config.json that is JSON, and no object."""
    (folder / "config.json").write_text("[1]")
    refused(ValueError, folder, str(folder / "config.json"), "list")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_config_lacks_a_key(refused, folder, key):
    """The key is named, and the model_type that needs it."""
    folders.edit(folder, drop=(key,))
    refused(ValueError, folder, str(folder / "config.json"), key, "llama")


def test_rope_lacks_a_key(refused, folder):
    """A scaled rope without its factor."""
    folders.edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    refused(ValueError, folder, str(folder / "config.json"), "factor")


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", "x"), ("num_hidden_layers", None), ("num_attention_heads", 0), ("num_key_value_heads", -2)],
)
def test_config_value_of_another_kind(refused, folder, key, value):
    """The key and its value."""
    folders.edit(folder, **{key: value})
    refused(ValueError, folder, str(folder / "config.json"), key, repr(value))


@pytest.mark.parametrize("kind", ["mamba", None])
def test_unknown_model_type(refused, folder, kind):
    """The type, and the types that are read."""
    folders.edit(folder, model_type=kind)
    refused(ValueError, folder, repr(kind), "llama")


def test_unknown_rope(refused, folder):
    """The rope type, and those that are read."""
    folders.edit(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    refused(ValueError, folder, "'yarn'", "default", "linear", "llama3")


def test_unknown_activation(refused, folder):
    """The activation, and the one that is read."""
    folders.edit(folder, hidden_act="gelu")
    refused(ValueError, folder, "'gelu'", "silu")


def test_heads_do_not_divide(refused, folder):
    """Query heads that are no multiple of the key heads."""
    folders.edit(folder, num_key_value_heads=3)
    refused(ValueError, folder, "num_heads=4", "num_kv_heads=3")


def test_quantised(refused, folder):
    """A quantised folder."""
    folders.edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(ValueError, folder, "quantization_config", "unquantised")


@pytest.mark.parametrize("kind", ["llama", "their_own"])
def test_code_is_never_executed(refused, folder, kind):
    """`auto_map` is refused whatever the model_type, and the folder's code does not run."""
    marker = folder / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    folders.edit(folder, model_type=kind, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    refused(ValueError, folder, "auto_map", "never executes", "remove")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(refused, folder, file):
    """Pickled weights are refused, with the way to convert them, and not opened."""
    marker = folder / "ran"

    class Evil:
        def __reduce__(self):
            return open, (str(marker), "w")

    (folder / "model.safetensors").unlink()
    torch.save(Evil(), folder / file)
    refused(ValueError, folder, "pickled", "safe_serialization=True")
    assert not marker.exists()


def test_no_weights(refused, folder):
    """A folder without any weights."""
    (folder / "model.safetensors").unlink()
    refused(FileNotFoundError, folder, str(folder), "model.safetensors.index.json")


def test_all_that_does_not_fit_is_named_at_once(refused, folder):
    """Missing, misshapen and unexpected tensors are one error."""

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(7, 5)
        tensors["model.layers.9.surprise"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)

    change_tensors(folder, spoil)
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
    """`attention_bias` promises four tensors a layer."""
    folders.edit(folder, attention_bias=True)
    message = refused(ValueError, folder, "model.layers.1.self_attn.o_proj.bias is missing (shape [48])")
    assert message.count("is missing") == 8


@pytest.mark.parametrize("kept", [0, 4, 100, 10_000])
def test_truncated(refused, folder, kept):
    """A file of which only the beginning is there."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(ValueError, folder, str(file), "truncated", "download it again")


def test_missing_shards(refused, shards):
    """The shards that are not there, all of them, and those alone."""
    folder, weight_map = shards
    first, second, *rest = sorted(set(weight_map.values()))
    (folder / first).unlink()
    (folder / second).unlink()
    message = refused(FileNotFoundError, folder, first, second, "download the missing shards")
    assert not any(name in message for name in rest)


def test_tensor_in_two_shards(refused, shards):
    """Which of two is meant cannot be known."""
    folder, weight_map = shards
    home = weight_map["model.norm.weight"]
    other = next(file for file in weight_map.values() if file != home)
    tensors = safetensors.torch.load_file(folder / other)
    tensors["model.norm.weight"] = torch.ones(48)
    safetensors.torch.save_file(tensors, folder / other, metadata={"format": "pt"})
    refused(ValueError, folder, "model.norm.weight is in two files")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_weights_are_no_floats(refused, folder, dtype):
    """Quantised numbers without their scales are not weights, whatever config.json says."""
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(ValueError, folder, name)


def test_damaged_tokenizer(refused, folder):
    """A tokenizer.json that is none."""
    (folder / "tokenizer.json").write_text("{")
    refused(ValueError, folder, str(folder / "tokenizer.json"))


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "foo"])
def test_unsupported_dtype(refused, folder, dtype):
    """The dtype, and those that are supported."""
    refused(ValueError, folder, dtype, "float32", "bfloat16", "float16", dtype=dtype)
