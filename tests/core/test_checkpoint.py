"""Saving and loading folders: round trips, dtypes, defaults, and the memory of loading."""

import dataclasses
import json
import os
import shutil
import stat
import types
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.tree_util import keystr, tree_leaves_with_path

import specjax
from specjax import kernels
from specjax.serve.identity import model_hash


@pytest.fixture
def folder(tmp_path):
    """A valid folder that a test may damage."""
    return shutil.copytree(folders.target(), tmp_path / "model")


def logits(loaded, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    return np.asarray(loaded.model.apply(loaded.params, jnp.asarray(tokens), positions).logits)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["kept", "new"])
@pytest.mark.parametrize("name", folders.SAVED)
def test_round_trip(name, files, tmp_path):
    """load(save(model)) is the model, bit for bit: configuration, weights, tokenizer, EOS,
    sampling defaults."""
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    first = specjax.load(
        folders.write(folders.random_llama(6, **folders.SAVED[name]), f"trip-{name}"), dtype
    )
    first = dataclasses.replace(first, eos=(0, 7), defaults={"temperature": 0.5, "min_p": 0.1})
    specjax.save(first if files == "kept" else dataclasses.replace(first, files={}), tmp_path)
    second = specjax.load(tmp_path, dtype)
    assert second.model == first.model
    assert jax.tree.structure(second.params) == jax.tree.structure(first.params)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert (second.eos, second.defaults) == (first.eos, first.defaults)


def test_what_came_is_written_as_it_came(tmp_path):
    """Unchanged files keep their bytes, and a changed EOS id changes only its own field."""
    folder = shutil.copytree(folders.target(), tmp_path / "first")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}",   "own": 1}')
    (folder / "special_tokens_map.json").write_text('{"eos_token":\t"<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    folders.edit(
        folder, "generation_config.json", repetition_penalty=1.5, do_sample=True, top_p=0.75
    )
    folders.edit(folder, "config.json", their_own={"note": 1})
    loaded = specjax.load(folder)
    specjax.save(loaded, tmp_path / "second")
    names = {file.name for file in folder.iterdir()}
    assert names == {file.name for file in (tmp_path / "second").iterdir()}
    for name in names - {"model.safetensors"}:  # its tensors may be in another order
        assert (tmp_path / "second" / name).read_bytes() == (folder / name).read_bytes(), name
    specjax.save(dataclasses.replace(loaded, eos=(5,)), tmp_path / "third", dtype="float16")
    config, generation = (
        json.loads((tmp_path / "third" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    came = json.loads((folder / "config.json").read_text())
    assert config == {**came, "dtype": "float16", "eos_token_id": 5}
    assert (generation["eos_token_id"], generation["repetition_penalty"]) == (5, 1.5)


def test_a_tied_embedding_is_written_once(tmp_path):
    """The second copy of the embedding, made for products on a CPU, is not saved."""
    loaded = specjax.load(
        folders.write(folders.random_llama(6, tie_word_embeddings=True), "written-once")
    )
    assert "head" in loaded.params
    specjax.save(loaded, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()
        assert (
            sum(np.prod(file.get_slice(name).get_shape()) for name in file.keys())
            == loaded.num_params
        )


def test_files_can_be_read_by_others(tmp_path):
    """Saved files have the permissions of any new file."""
    specjax.save(specjax.load(folders.target()), tmp_path / "model")
    (tmp_path / "plain").touch()
    wanted = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()} == {
        wanted
    }


@pytest.mark.parametrize("moment", range(14))
def test_an_interrupted_save_never_loads_wrongly(tmp_path, monkeypatch, moment):
    """Interrupted at any change, the folder holds the old model, the new one, or one that does
    not load."""
    folder = tmp_path / "model"
    folders.random_llama(5).save_pretrained(
        folder, max_shard_size="60KB"
    )  # shards and no tokenizer
    (folder / "mine.txt").write_text("kept")
    old, new = specjax.load(folder), specjax.load(folders.target())
    changes, count = {"replace": os.replace, "unlink": os.unlink}, []

    def cut(change):
        def change_or_die(*arguments, **options):
            if str(folder) in str(arguments[0]) and os.path.exists(arguments[0]):
                count.append(arguments)
                if len(count) > moment:
                    raise KeyboardInterrupt
            return change(*arguments, **options)

        return change_or_die

    for name, change in changes.items():
        monkeypatch.setattr(os, name, cut(change))
    monkeypatch.setattr(
        "specjax.files.folder.tempfile.TemporaryDirectory._rmtree", lambda *_, **__: None
    )
    try:
        specjax.save(new, folder)
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    assert (folder / "mine.txt").exists()
    try:
        loaded = specjax.load(folder)
    except FileNotFoundError as error:
        assert "config.json is missing" in str(error)
        assert moment > 0
    else:
        same = old if loaded.tokenizer is None else new
        jax.tree.map(np.testing.assert_array_equal, loaded.params, same.params)
    specjax.save(new, folder)
    jax.tree.map(np.testing.assert_array_equal, specjax.load(folder).params, new.params)
    assert (
        not list(folder.glob("model-*")) and not (folder / "model.safetensors.index.json").exists()
    )


def test_save_refuses(tmp_path):
    """Models that are not a Transformer or that are in int8, and unknown dtypes are refused, and
    nothing is written."""
    loaded = specjax.load(folders.target())
    with pytest.raises(ValueError, match="save_params"):
        specjax.save(dataclasses.replace(loaded, model=object()), tmp_path / "model")
    with pytest.raises(ValueError, match="int8"):
        specjax.save(loaded, tmp_path / "model", dtype="int8")
    with pytest.raises(ValueError, match=r"matrices in int8 .* save the model that was quantised"):
        specjax.save(specjax.quantise(loaded), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_neither_cuts_nor_pads(folder):
    """Truncation and padding in tokenizer.json are ignored, as transformers does."""
    words = specjax.load(folder).tokenizer
    texts = [folders.TEXT, "the cat"]
    wanted = [words.encode(text).ids for text in texts]
    words.enable_truncation(4)
    words.enable_padding(length=8)
    words.save(str(folder / "tokenizer.json"))
    encoded = specjax.load(folder).tokenizer.encode_batch(texts)
    assert [encoding.ids for encoding in encoded] == wanted
    assert len(wanted[0]) > 8 > len(wanted[1])


def test_save_rounds(tmp_path):
    """`dtype` rounds the weights to nearest."""
    loaded = specjax.load(folders.target())
    specjax.save(loaded, tmp_path, dtype=jnp.bfloat16)
    rounded = jax.tree.map(
        lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32), loaded.params
    )
    jax.tree.map(np.testing.assert_array_equal, specjax.load(tmp_path).params, rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype):
    """All parameters and the cache have the given `dtype`."""
    loaded = specjax.load(folders.target(), dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {dtype}
    assert loaded.model.init_cache(1, 4).keys[0].dtype == dtype


def test_num_params():
    """`num_params` is the number of numbers in the file."""
    with safetensors.safe_open(folders.target() / "model.safetensors", "np") as file:
        sizes = [np.prod(file.get_slice(name).get_shape()) for name in file.keys()]
    assert specjax.load(folders.target()).num_params == sum(sizes)


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
    """EOS may be an id or a list of ids; generation_config.json wins over config.json."""
    folders.edit(folder, eos_token_id=config)
    if generation == "no file":
        (folder / "generation_config.json").unlink()
    else:
        folders.edit(folder, "generation_config.json", eos_token_id=generation)
    assert specjax.load(folder).eos == eos


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
            (0.6, 20, 0.95, 0.05, 1.0),
        ),
        ({"do_sample": True}, (1.0, 0, 1.0, 0.0, 1.0)),
        ({"do_sample": True, "temperature": None, "top_p": 0.5}, (1.0, 0, 0.5, 0.0, 1.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, (0.0, 0, 1.0, 0.0, 1.0)),
        (
            {"temperature": 0.6, "repetition_penalty": 1.1},
            (0.0, 0, 1.0, 0.0, 1.1),
        ),  # greedy text uses it too
    ],
)
def test_sampling_defaults(folder, generation, wanted):
    """The defaults come from generation_config.json if it enables sampling; explicit settings
    win."""
    folders.edit(folder, "generation_config.json", **generation)
    loaded, names = (
        specjax.load(folder),
        ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    )
    assert loaded.settings(**dict.fromkeys(names)) == dict(zip(names, wanted, strict=True))
    assert loaded.settings(temperature=0.0, top_k=3) == dict(
        zip(names, (0.0, 3, *wanted[2:]), strict=True)
    )


def test_generate_samples_as_the_model_wants(folder):
    """Without settings the model's own hold, and explicit settings win over them."""
    greedy = specjax.load(folder)
    folders.edit(folder, "generation_config.json", do_sample=True, temperature=2.0, top_k=7)
    eager = specjax.load(folder)
    options = {"max_new_tokens": 12, "seed": 3, "proposer": "none"}
    wanted = specjax.generate(greedy, "the cat", temperature=2.0, top_k=7, **options).tokens
    assert specjax.generate(eager, "the cat", **options).tokens == wanted
    assert specjax.generate(greedy, "the cat", **options).tokens != wanted
    again = specjax.generate(eager, "the cat", temperature=0.0, **options).tokens
    assert again == specjax.generate(greedy, "the cat", **options).tokens


def test_no_tokenizer():
    """A folder without tokenizer.json loads and decodes token ids."""
    loaded = specjax.load(folders.wordless())
    assert loaded.tokenizer is None
    out = specjax.generate(loaded, [[5, 6, 7]], max_new_tokens=4, proposer="none")
    wanted = specjax.generate(
        specjax.load(folders.target()), [[5, 6, 7]], max_new_tokens=4, proposer="none"
    )
    assert out.tokens == wanted.tokens
    assert out.text == [""]


def test_rotary_buffers_are_ignored(folder):
    """Old files hold the rotary frequencies, which are not weights."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folders.change_tensors(folder, lambda tensors: tensors.update({name: np.ones(6, np.float32)}))
    assert specjax.load(folder).num_params == specjax.load(folders.target()).num_params


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("precision", [None, "default", "high", "highest"])
def test_precision(precision, platform):
    """Every product of a pass has it, whatever the process's own setting is.

    On a CPU there is one more product: cosines and sines times the identity matrix.  It must not
    round them, so its precision is always the highest.
    """
    loaded = specjax.load(folders.target(), precision=precision)
    tokens = jnp.zeros((1, 3), jnp.int32)
    with jax.default_matmul_precision("high"):
        traced = jax.jit(loaded.model.apply).trace(loaded.params, tokens, tokens)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    wanted = (precision or "high").upper()
    half = loaded.model.module.config.head_dim // 2
    identity = f"[HIGHEST, HIGHEST] : (tensor<{half}x{half}xf32>, tensor<{half}x{half}xf32>)"
    identities = [line for line in products if identity in line]
    assert len(identities) == (platform == "cpu")
    rest = [line for line in products if line not in identities]
    assert rest and [line for line in rest if f"[{wanted}, {wanted}]" not in line] == []


def test_precision_is_part_of_a_model():
    """Models of different precisions share no compiled program."""
    one, two = (specjax.load(folders.target(), precision=name) for name in ("default", "highest"))
    assert one.model != two.model
    assert specjax.quantise(two).model.precision == "highest"


def test_kernels_can_be_left_out(monkeypatch):
    """On a CPU and on a GPU: then nothing but XLA computes, and the text is the same."""
    from specjax.files import checkpoint
    from specjax.models import attend, dot_general, gpu_attend

    place = specjax.shipped("tiny/target")
    plain, own = (specjax.load(place, own_kernels=flag) for flag in (False, True))
    module = plain.model.module
    assert module.dot_general is dot_general and module.attend is attend and not module.triton
    assert own.model.module.dot_general is not dot_general
    how: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "proposer": "ngram", "eos": []}
    texts = [specjax.generate(made, [[5, 9, 7]], **how).tokens for made in (plain, own)]
    assert texts[0] == texts[1]

    monkeypatch.setattr(checkpoint, "attend_on", lambda device: gpu_attend if device else attend)
    assert specjax.load(place).model.module.triton
    assert not specjax.load(place, own_kernels=False).model.module.triton
    with pytest.raises(ValueError, match="own_kernels='no'"):
        specjax.load(place, own_kernels="no")  # type: ignore[arg-type]


def test_matrices_stay_in_bfloat16_if_asked_for(tmp_path):
    """And nothing else does: texts, the hash, and what is saved are the same."""
    place = specjax.shipped("tiny/target")
    plain, kept = (specjax.load(place, keep_bfloat16=flag) for flag in (False, True))
    leaves = tree_leaves_with_path(kept.params)
    wide = {keystr(path) for path, leaf in leaves if leaf.dtype == jnp.float32}
    if not kernels.widens_columns():
        assert len(wide) == len(leaves)
        return
    matrices = {keystr(path) for path, _ in leaves} - wide
    assert matrices and all("'kernel'" in name for name in matrices)
    assert not any("'kernel'" in name for name in wide)
    assert model_hash(kept) == model_hash(plain)
    for how in ({"proposer": "ngram"}, {"proposer": "self-int8"}, {"proposer": "self-int4"}):
        texts = [
            specjax.generate(
                made,
                [[5, 9, 7, 5, 9, 7], [11, 3]],
                max_new_tokens=24,
                temperature=1.0,
                eos=[],
                **how,
            ).tokens
            for made in (plain, kept)
        ]
        assert texts[0] == texts[1]
    specjax.save(kept, tmp_path / "saved")
    again = specjax.load(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, again.params, plain.params)
    specjax.save(plain, tmp_path / "wide")
    for given, flag in ((tmp_path / "wide", True), (place, False)):
        made = specjax.load(given, own_kernels=flag, keep_bfloat16=True)
        assert {x.dtype.name for x in jax.tree.leaves(made.params)} == {"float32"}
    with pytest.raises(ValueError, match="keep_bfloat16='no'"):
        specjax.load(place, keep_bfloat16="no")  # type: ignore[arg-type]


def test_rounded_activations_are_for_packed_matrices_on_a_cpu(monkeypatch):
    """Everything else is refused before any weight is read."""
    from specjax.files import checkpoint

    monkeypatch.setattr(checkpoint, "read_params", None)
    place = specjax.shipped("tiny/target")
    with pytest.raises(ValueError, match='has none; pass dtype="int4" too'):
        specjax.load(place, activations="int8")
    with pytest.raises(ValueError, match="dequantise=True leaves none packed"):
        specjax.load(place, dequantise=True, activations="int8")
    gpu = types.SimpleNamespace(platform="gpu", device_kind="H100")
    monkeypatch.setattr(checkpoint, "default_devices", lambda: [gpu])
    with pytest.raises(ValueError, match="on a CPU, and this is a gpu"):
        specjax.load(place, "int4", activations="int8")
