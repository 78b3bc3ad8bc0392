"""GGUF files: numbers are those of the package gguf, logits those of transformers."""

import functools
import pathlib
import shutil
import struct

import folders
import gguf_files
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from test_packed_models import IDS, close, leaves, logits, same_numbers, texts
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import specjax
from specjax.cli import main
from specjax.files.gguf.header import read_gguf
from specjax.models import Packed

KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.BF16, Kind.F32)


@functools.cache
def written(architecture, kind):
    path = folders.ROOT / f"{architecture}-{kind.name}.gguf"
    return path, gguf_files.write(path, architecture, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(kind):
    """Bit for bit, packed and dequantised; queries and keys have their rows in another order."""
    path, made = written("llama", kind)
    for dequantise in (False, True):
        model = specjax.load(path, dequantise=dequantise)
        held = leaves(model)
        assert any(isinstance(leaf, Packed) for leaf in held.values()) == (
            not dequantise and kind.name.startswith("Q")
        )
        parts = {"attention/v": "attn_v", "attention/o": "attn_output", "mlp/down": "ffn_down",
                 "mlp/up": "ffn_up", "mlp/gate": "ffn_gate", "attention/q": "attn_q",
                 "attention/k": "attn_k"}  # fmt: skip
        for ours, theirs in parts.items():
            leaf = held[f"layer_1/{ours}/kernel"]
            wide = leaf.dense(jnp.float32) if isinstance(leaf, Packed) else leaf
            rows = made[f"blk.1.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = gguf_files.HEADS if theirs == "attn_q" else gguf_files.KEYS
                rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            np.testing.assert_array_equal(np.asarray(wide).T, rows, err_msg=ours)
        np.testing.assert_array_equal(held["embedding"], made["token_embd.weight"])
    close(specjax.load(path), specjax.load(path, dequantise=True))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_logits_are_those_of_transformers(architecture, kind):
    """For a prompt that is long enough to tell the rotations of heads apart."""
    path, _ = written(architecture, kind)
    # What `from_pretrained(gguf_file=)` does, which asks for another package, too.
    config = dict(load_gguf_checkpoint(path)["config"])
    own = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    theirs = transformers.AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"])
    theirs.eval()
    ids = np.random.default_rng(0).integers(1, 300, 200).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    for how in ({}, {"dequantise": True}):
        found = logits(specjax.load(path, **how), ids)[0]
        assert np.abs(found - wanted).max() < 1e-4 * np.ptp(wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_text(temperature):
    """With one key, prompt lookup and the model's own copy in 4 bits give the plain tokens."""
    model = specjax.load(written("qwen2", Kind.Q4_K)[0])
    how = {"temperature": temperature, "seed": 5}
    expected = texts(model, proposer="none", **how)
    assert texts(model, proposer="ngram", **how) == expected
    assert texts(model, proposer="self-int8", num_drafts=3, **how) == expected


def test_a_folder_of_a_file(tmp_path, capsys):
    """A tokenizer lies beside the file, and `inspect` prints the kinds of its matrices."""
    path = tmp_path / "own" / "model.gguf"
    path.parent.mkdir()
    gguf_files.write(path, "llama", Kind.Q4_0, drop=("output.weight",))
    shutil.copy(folders.tokenizer_file(), path.parent / "tokenizer.json")
    for place in (path, path.parent):
        model = specjax.load(place)
        assert model.tokenizer is not None and model.eos == (2,)
        assert model.model.module.config.tied_embeddings
    main(["inspect", str(path)])
    assert "GGUF: 15 matrices in GGUF Q4_0" in capsys.readouterr().out
    gguf_files.write(path.parent / "other.gguf", "llama", Kind.Q4_0)
    with pytest.raises(ValueError, match=r"holds 2 GGUF files .model\.gguf, other\.gguf"):
        specjax.load(path.parent)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_saved_as_a_folder(tmp_path, kind):
    """Codes of one scale a group are written as compressed-tensors, with the same numbers."""
    model = specjax.load(written("llama", kind)[0])
    specjax.save(model, tmp_path)
    same_numbers(model, specjax.load(tmp_path))


def test_saving_the_numbers_of_k_quants(tmp_path):
    """compressed-tensors has no least number of a group, so they are written dequantised."""
    path, _ = written("llama", Kind.Q4_K)
    with pytest.raises(ValueError, match="is packed in a format that cannot be written"):
        specjax.save(specjax.load(path), tmp_path / "packed")
    plain = specjax.load(path, dequantise=True)
    specjax.save(plain, tmp_path / "plain")
    np.testing.assert_array_equal(logits(specjax.load(tmp_path / "plain")), logits(plain))
    with pytest.raises(ValueError, match="packed already"):
        specjax.quantise_folder(path, tmp_path / "again")


def scaled(fields, extra=None):
    def make(path):
        gguf_files.write(path, "llama", Kind.F32, fields=fields, extra=extra)

    return make


def test_scalings_of_rotations(tmp_path):
    """Of Llama 3.1 by the factors of its frequencies, and linear and yarn by their fields."""
    lengths = 2 * np.pi * 10000.0 ** (np.arange(0, 64, 2) / 64)
    blend = (8192 / lengths - 1) / 3
    factors = np.where(
        lengths < 2048, 1, np.where(lengths > 8192, 8, 1 / ((1 - blend) / 8 + blend))
    )
    scaled({}, {"rope_freqs.weight": factors})(tmp_path / "llama3.gguf")
    rope = specjax.load(tmp_path / "llama3.gguf").model.module.config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("llama3", 8.0, 8192)
    fields = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
              "llama.rope.scaling.original_context_length": 64}  # fmt: skip
    scaled(fields)(tmp_path / "yarn.gguf")
    rope = specjax.load(tmp_path / "yarn.gguf").model.module.config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)


REFUSED = {
    "another architecture": ({"general.architecture": "bert"}, None, "the architecture 'bert'"),
    "experts": ({"llama.expert_count": 8}, None, "does not read for llama: 'expert_count'"),
    "another scaling": ({"llama.rope.scaling.type": "ntk"}, None, "rotations 'ntk' is not read"),
    "own factors": ({}, {"rope_freqs.weight": np.ones(32) * 3}, "other factors than Llama 3.1"),
    "parts": ({"split.count": 3}, None, "one of 3 parts"),
    "another tensor": ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 4))}, "gate_inp.weight is"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_by_name(tmp_path, fault):
    """With the file and the cure."""
    fields, extra, message = REFUSED[fault]
    path = tmp_path / "model.gguf"
    if "general.architecture" in fields:
        gguf_files.write(path, "llama", Kind.F32)
        content = path.read_bytes()
        path.write_bytes(
            content.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 4) + b"bert", 1)
        )
    else:
        scaled(fields, extra)(path)
    with pytest.raises(ValueError, match="gguf") as error:
        specjax.load(path)
    assert message in str(error.value)


def test_a_damaged_file(tmp_path):
    """Another kind of blocks, a missing tensor, a scale that is NaN, and a file that ends early."""
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "llama", Kind.Q4_0, drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        specjax.load(path)
    gguf_files.write(path, "llama", Kind.Q8_0)
    content = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name)
    other = content[: at + 20] + struct.pack("<I", 13) + content[at + 24 :]
    path.write_bytes(other)
    with pytest.raises(
        ValueError, match=r"blk\.0\.ffn_up\.weight is stored as Q5_K; specjax reads F32"
    ):
        specjax.load(path)
    for end in (len(content) - 4000, 500, 30, 3, 0):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            specjax.load(path)
    path.write_bytes(content)
    start = read_gguf(path).entries["blk.0.ffn_up.weight"].start + 34 * 8
    path.write_bytes(content[:start] + b"\xff\xff" + content[start + 2 :])
    with pytest.raises(ValueError, match=r"(?s)not finite.*layers\.0\.mlp\.up_proj"):
        specjax.load(path)


def test_a_file_is_read_as_it_is_now(tmp_path):
    """The header of a file that was replaced is read again."""
    path = tmp_path / "model.gguf"
    for seed in (0, 1):
        made = gguf_files.write(path, "llama", Kind.F16, seed=seed)
        held = leaves(specjax.load(path))["embedding"]
        np.testing.assert_array_equal(held, made["token_embd.weight"])
    assert pathlib.Path(path).exists() and len(IDS) > 8
