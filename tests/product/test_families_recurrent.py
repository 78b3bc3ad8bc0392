"""Families with recurrent layers compute what transformers computes."""

import shutil

import jax
import numpy as np
import safetensors.numpy
import small_families
from stored_families import RECURRENT, StoredFamilies, pytest_generate_tests  # noqa: F401 - pytest calls it

import specjax


class TestRecurrent(StoredFamilies):
    GROUPS = RECURRENT


def test_the_publishers_spelling_of_olmo_hybrid(tmp_path):
    """transformers cuts the three convolutions into equal parts, and gives norms other names."""
    folder = small_families.folder("olmo_hybrid, rope, bias, positive")
    loaded = specjax.load(folder)
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    names = [f"model.layers.1.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert len({stored[name].shape for name in names}) == 1
    whole = np.concatenate([stored[name] for name in names])
    parts = np.split(whole, [6, 12])
    stored |= dict(zip(names, map(np.ascontiguousarray, parts), strict=True))
    norm = "model.layers.0.feedforward_layer_norm.weight"
    stored["model.layers.0.post_attention_layernorm.weight"] = stored.pop(norm)
    shutil.copytree(folder, tmp_path / "published")
    safetensors.numpy.save_file(stored, tmp_path / "published" / "model.safetensors")
    again = specjax.load(tmp_path / "published")
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
