"""Folders of Medusa heads: round trips under the authors' names, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from heads import TINY, random_heads

import specjax


@pytest.mark.parametrize("own_heads", [False, True])
def test_heads_come_back_from_their_folder(tmp_path, own_heads):
    """Numbers, tree and figures come back; names, shapes and orientation are those of the
    authors' files."""
    target = specjax.load(TINY)
    adapter = random_heads(target, 0, num_layers=2, own_heads=own_heads)
    adapter = dataclasses.replace(adapter, acceptance=(0.5, 0.25, 0.75))
    specjax.save_medusa(tmp_path, adapter, "tiny/target")
    loaded = specjax.load_medusa(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, adapter.params)
    assert (loaded.heads, loaded.choices, loaded.acceptance) == (
        adapter.heads,
        adapter.choices,
        adapter.acceptance,
    )
    stored = safetensors.numpy.load_file(tmp_path / "medusa_lm_head.safetensors")
    names = {
        f"{k}.{n}.linear.{part}" for k in range(2) for n in range(2) for part in ("weight", "bias")
    }
    assert set(stored) == names | ({"0.2.weight", "1.2.weight"} if own_heads else set())
    np.testing.assert_array_equal(stored["1.0.linear.weight"], adapter.params["kernel"][0, 1].T)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 2)
    assert config["base_model_name_or_path"] == "tiny/target"
    assert config.get("version") == (None if own_heads else "2")


def test_rounded_heads_are_half_as_large(tmp_path):
    """bfloat16 folders, as training saves them, are half as large."""
    adapter = random_heads(specjax.load(TINY), 0)
    for dtype in (None, jnp.bfloat16):
        specjax.save_medusa(tmp_path / str(dtype), adapter, "t", dtype)
    sizes = [
        (tmp_path / str(d) / "medusa_lm_head.safetensors").stat().st_size
        for d in (None, jnp.bfloat16)
    ]
    assert 1.8 < sizes[0] / sizes[1] < 2.1
    loaded = specjax.load_medusa(tmp_path / str(jnp.bfloat16), specjax.load(TINY))
    np.testing.assert_allclose(
        loaded.params["kernel"], adapter.params["kernel"], rtol=0.01, atol=1e-4
    )


def spoil(folder, change):
    """Change the tensors or the configuration of a folder."""
    path, config = folder / "medusa_lm_head.safetensors", folder / "config.json"
    tensors = safetensors.numpy.load_file(path)
    settings = json.loads(config.read_text())
    change(tensors, settings)
    safetensors.numpy.save_file(tensors, path)
    config.write_text(json.dumps(settings))


SPOILED = {
    "a tensor is missing": (
        lambda t, c: t.pop("1.0.linear.bias"),
        r"1\.0\.linear\.bias is missing \(shape \[64\]\)",
    ),
    "another shape": (
        lambda t, c: t.update({"0.0.linear.bias": np.zeros(3, np.float32)}),
        r"bias has shape \[3\] instead of \[64\]",
    ),
    "too many": (
        lambda t, c: t.update({"7.0.x": np.zeros(3, np.float32)}),
        r"7\.0\.x is not a tensor of such heads",
    ),
    "integers": (
        lambda t, c: t.update({"0.0.linear.bias": np.zeros(64, np.int32)}),
        "stored as I32; specjax reads",
    ),
    "no finite number": (
        lambda t, c: t["1.0.linear.bias"].__setitem__(7, np.nan),
        r"1\.0\.linear\.bias hold NaN or infinities in float32: download it again",
    ),
    "more heads": (lambda t, c: c.update(medusa_num_heads=3), r"2\.0\.linear\.weight is missing"),
    "no heads": (lambda t, c: c.update(medusa_num_heads=0), "medusa_num_heads is 0"),
    "no number": (lambda t, c: c.pop("medusa_num_layers"), "lacks 'medusa_num_layers'"),
    "version": (lambda t, c: c.update(version="3"), 'version is "3"; it must be one of 1, 2'),
    "version 1": (lambda t, c: c.pop("version"), r"0\.1\.weight is missing \(shape \[512, 64\]\)"),
    "choices": (
        lambda t, c: c["specjax"].update(choices=[[1]]),
        r"config\.json: choice \(1,\) has no better sibling",
    ),
    "acceptance": (lambda t, c: c["specjax"].update(acceptance=[0.5]), "acceptance has 1 values"),
    "no text": (
        lambda t, c: c.update(medusa_num_heads="x"),
        'medusa_num_heads is "x"; it must be a whole number',
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, case):
    """The error names the file, the fault and the expected value."""
    change, message = SPOILED[case]
    target = specjax.load(TINY)
    specjax.save_medusa(tmp_path, random_heads(target, 0), "t")
    spoil(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        specjax.load_medusa(tmp_path, target)


def test_a_folder_that_is_none_is_refused(tmp_path):
    """Missing folders and files, damage, and pickles (which are never read) are refused."""
    target = specjax.load(TINY)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        specjax.load_medusa(tmp_path / "nowhere", target)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        specjax.load_medusa(tmp_path, target)
    specjax.save_medusa(tmp_path, random_heads(target, 0), "t")
    weights = tmp_path / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or truncated"):
        specjax.load_medusa(tmp_path, target)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no medusa_lm_head"):
        specjax.load_medusa(tmp_path, target)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="pickled weights"):
        specjax.load_medusa(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        specjax.load_medusa(tmp_path, target)
