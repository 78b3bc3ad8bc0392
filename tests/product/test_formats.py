"""Heads in every format: what the engines' loaders read, round trips bit for bit, and every
known trap."""

import itertools
import pathlib
import shutil
import sys
from typing import Any

import folders
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from engines import (
    HEAD,
    READERS,
    E,
    V,
    as_numpy,
    config_of,
    heads_of,
    original_reader,
    same_bits,
    vllm_reader,
)

from specjax.methods.medusa.engines import HEAD_FORMATS as FORMATS
from specjax.methods.medusa.exports import read_heads, write_heads

CASES = {"v1": (1, True), "v1 deep": (2, True), "v2": (1, False), "v2 deep": (2, False)}


def can_say(name, case):
    """Whether the format can express the case; the traps below show that it refuses the others."""
    return not (name == "original" and "deep" in case) and not (name == "tgi" and case == "v2 deep")


ALL = [(name, case) for name in FORMATS for case in CASES if can_say(name, case)]


def test_every_format_has_a_reader():
    """A new format needs an independent statement of its reader."""
    assert set(READERS) == set(FORMATS)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_the_reader_finds_the_heads(tmp_path, name, case):
    """Every block, bias and map is at the head and depth where the loader looks, with nothing
    extra or missing."""
    heads = heads_of(*CASES[case])
    write_heads(tmp_path, name, heads, HEAD)
    read = READERS[name](tmp_path)
    layers, own = CASES[case]
    assert len(read) == 3
    for h, (blocks, matrix) in enumerate(read):
        assert len(blocks) == layers
        for k, (weight, bias) in enumerate(blocks):
            same_bits(weight, heads.tensors[f"{h}.{k}.linear.weight"])
            same_bits(bias, heads.tensors[f"{h}.{k}.linear.bias"])
        if own:
            same_bits(matrix, heads.tensors[f"{h}.{layers}.weight"])
        elif name in ("vllm", "tensorrt-llm", "model-optimizer"):
            same_bits(matrix, HEAD.astype(jnp.bfloat16))
        else:
            assert matrix is None  # the loader uses the target's


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "case"), ALL)
def test_the_way_back_is_bit_for_bit(tmp_path, name, case, kind):
    """Export and import give equal arrays, configuration and choices; a second export has the
    same bytes."""
    heads = heads_of(*CASES[case], kind)
    write_heads(tmp_path / "a", name, heads, HEAD)
    back = read_heads(tmp_path / "a", name, HEAD)
    assert back.form == heads.form
    assert set(back.tensors) == set(heads.tensors)
    for there, tensor in heads.tensors.items():
        same_bits(back.tensors[there], tensor)
    write_heads(tmp_path / "b", name, back, HEAD)
    for file in ("config.json", FORMATS[name].file):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def stored_in(folder, name):
    path = folder / FORMATS[name].file
    if path.suffix == ".pt":
        return {k: as_numpy(v) for k, v in torch.load(path, weights_only=True).items()}
    return safetensors.numpy.load_file(path)


def store(folder, name, tensors):
    path = folder / FORMATS[name].file
    if path.suffix == ".pt":
        torch.save({k: torch.from_numpy(v.astype(np.int32 if v.dtype == np.int32 else np.float32))
                    for k, v in tensors.items()}, path)  # fmt: skip
    else:
        safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "integers"])
def test_what_a_loader_would_skip_is_refused(tmp_path, name, fault):
    """vLLM leaves heads of unknown names random (acceptance 0); here the error names the tensor."""
    write_heads(tmp_path, name, heads_of(1, True, "float32"), HEAD)
    tensors = stored_in(tmp_path, name)
    last = sorted(tensors)[-1]
    if fault == "missing":
        del tensors[last]
    elif fault == "unknown":
        tensors["medusa_head.0.0.linear.weight"] = np.zeros((E, E), np.float32)
        last = "medusa_head.0.0.linear.weight"
    elif fault == "shape":
        tensors[last] = np.ascontiguousarray(tensors[last][:-1])
    else:
        tensors[last] = tensors[last].astype(np.int32)
    store(tmp_path, name, tensors)
    with pytest.raises(AssertionError):
        READERS[name](tmp_path)
    words = {
        "missing": "is missing",
        "unknown": "is not a tensor",
        "shape": "has shape",
        "integers": "stored as int32",
    }
    with pytest.raises(ValueError, match=words[fault]) as caught:
        read_heads(tmp_path, name, HEAD)
    assert last in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_another_vocabulary_or_width_is_refused(tmp_path, name):
    """Heads for another target than the given one are refused."""
    write_heads(tmp_path, name, heads_of(1, True), HEAD)
    for other in (np.zeros((V + 1, E), np.float32), np.zeros((V, E + 1), np.float32)):
        with pytest.raises(ValueError, match=r"shape|pass the target"):
            read_heads(tmp_path, name, other)


@pytest.mark.parametrize("name", ["vllm", "tensorrt-llm", "model-optimizer"])
def test_a_target_of_other_weights_is_refused(tmp_path, name):
    """A file of version 2 repeats the target's map, which must be that of this target."""
    write_heads(tmp_path, name, heads_of(1, False), HEAD)
    with pytest.raises(ValueError, match="is not the target's own linear map"):
        read_heads(tmp_path, name, HEAD + 1)


def test_biases_need_medusa_fc_bias(tmp_path):
    """vLLM drops biases without it, so such a folder is refused; ours sets it."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    assert config_of(tmp_path)["medusa_fc_bias"] is True
    changes: list[dict[str, Any]] = [{"medusa_fc_bias": False}, {"drop": ("medusa_fc_bias",)}]
    for change in changes:
        folders.edit(tmp_path, **change)
        with pytest.raises(AssertionError):
            vllm_reader(tmp_path)
        with pytest.raises(ValueError, match="medusa_fc_bias"):
            read_heads(tmp_path, "vllm", HEAD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"truncated_vocab_size": V - 1}, "truncated_vocab_size is smaller"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        (
            {"vocab_size": V + 1, "truncated_vocab_size": V + 1},
            "vocab_size is 11, and the target's 10",
        ),
    ],
)
def test_what_vllm_alone_can_say_is_refused(tmp_path, change, words):
    """A reduced vocabulary, scaled logits and another size are refused."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    folders.edit(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        read_heads(tmp_path, "vllm", HEAD)


def test_vllm_counts_by_parts_of_names(tmp_path):
    """`medusa_num_heads` is read; with two such keys it would be ambiguous which one counts."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    folders.edit(tmp_path, drop=("num_heads",), medusa_num_heads=3)
    assert read_heads(tmp_path, "vllm", HEAD).form.num_heads == 3
    folders.edit(tmp_path, num_heads=3)
    with pytest.raises(ValueError, match="one key with 'num' and 'heads'"):
        read_heads(tmp_path, "vllm", HEAD)


def test_version_2_for_tgi_has_one_block(tmp_path):
    """Its loader asserts one block, so other heads are refused and nothing is written."""
    with pytest.raises(
        ValueError,
        match=r"--format tgi: the heads have 2 blocks .* choose specjax, vllm, tensorrt-llm",
    ):
        write_heads(tmp_path / "out", "tgi", heads_of(2, False), HEAD)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [True, False])
def test_the_authors_code_repeats_one_block(tmp_path, own):
    """[block] * n is one block: heads with different blocks are refused, equal ones are stored
    separately."""
    with pytest.raises(ValueError, match="the blocks of head 0 differ"):
        write_heads(tmp_path / "out", "original", heads_of(2, own), HEAD)
    assert not (tmp_path / "out").exists()
    write_heads(tmp_path / "out", "original", heads_of(2, own, repeated=True), HEAD)
    for blocks, _ in original_reader(tmp_path / "out"):
        same_bits(blocks[0][0], blocks[1][0])


def test_a_pickle_of_shared_blocks_becomes_separate_arrays(tmp_path):
    """Both blocks in the authors' pickle are one tensor; ours are two, which can be trained
    separately."""
    heads = heads_of(2, True, "float32", repeated=True)
    write_heads(tmp_path, "tensorrt-llm", heads, HEAD)
    loaded = torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)
    for h, end in itertools.product(range(3), ("weight", "bias")):
        loaded[f"{h}.1.linear.{end}"] = loaded[f"{h}.0.linear.{end}"]
    torch.save(loaded, tmp_path / "medusa_lm_head.pt")
    back = read_heads(tmp_path, "tensorrt-llm", HEAD)
    for one, other in itertools.combinations(back.tensors.values(), 2):
        assert not np.shares_memory(one, other)
    same_bits(back.tensors["0.1.linear.weight"], heads.tensors["0.0.linear.weight"])


class _Runs:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("executed"),))


def test_a_pickle_executes_nothing(tmp_path, monkeypatch):
    """A file that holds anything but tensors is refused, and nothing in it runs."""
    monkeypatch.chdir(tmp_path)
    write_heads(tmp_path, "tensorrt-llm", heads_of(1, True), HEAD)
    torch.save({"0.0.linear.weight": _Runs()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="more than tensors"):
        read_heads(tmp_path, "tensorrt-llm", HEAD)
    assert not (tmp_path / "executed").exists()


def test_without_torch(tmp_path, monkeypatch):
    """Only the pickle needs torch, to read and to write, and the error says so."""
    write_heads(tmp_path, "tensorrt-llm", heads_of(1, True), HEAD)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="pip install torch"):
        read_heads(tmp_path, "tensorrt-llm", HEAD)
    with pytest.raises(ValueError, match="pip install torch"):
        write_heads(tmp_path / "out", "tensorrt-llm", heads_of(1, True), HEAD)
    write_heads(tmp_path / "other", "vllm", heads_of(1, True), HEAD)


def test_damaged_folders(tmp_path):
    """Truncated or missing files, another format's configuration and impossible numbers are each
    named."""
    write_heads(tmp_path, "original", heads_of(1, True), HEAD)
    with pytest.raises(ValueError, match=r"config.json: medusa_fc_bias"):
        read_heads(tmp_path, "vllm", HEAD)
    with pytest.raises(ValueError, match="lacks 'medusa'"):
        read_heads(tmp_path, "model-optimizer", HEAD)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"version": 3}, "version is 3"), ({"medusa_num_heads": 0}, "0 heads"),
        ({"version": "two"}, "two"),
    ]  # fmt: skip
    for change, words in faults:
        shutil.copytree(tmp_path, tmp_path / "changed", dirs_exist_ok=True)
        folders.edit(tmp_path / "changed", **change)
        with pytest.raises(ValueError, match=words):
            read_heads(tmp_path / "changed", "original", HEAD)
        shutil.rmtree(tmp_path / "changed")
    weights = tmp_path / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        read_heads(tmp_path, "original", HEAD)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="of another format"):
        read_heads(tmp_path, "original", HEAD)
