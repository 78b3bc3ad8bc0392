"""Every family computes what transformers computes, which `fixtures/make_families.py` stored."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import small_families

import specjax


def test_every_family_is_here():
    assert {family for family, _ in small_families.CONFIGS.values()} == set(specjax.FAMILIES)


@pytest.mark.parametrize("case", small_families.CONFIGS)
def test_logits_and_features(case):
    """Logits differ by at most 1e-5 of their size, and tap i is the input of layer i, within the
    same bound; windows and long positions are reached."""
    loaded = specjax.load(small_families.folder(case))
    arrays = small_families.stored()[1]
    logits, states = arrays[f"{case}: logits"], arrays[f"{case}: states"]
    tokens, places = small_families.text(), np.array(small_families.PLACES)
    taps = tuple(range(len(states)))

    @jax.jit
    def read(params):
        out = loaded.model.apply(params, tokens, jnp.arange(tokens.shape[1])[None], taps=taps)
        return out.logits[0], out.features[0]

    found, features = (np.asarray(x)[places] for x in read(loaded.params))
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    wanted = states.swapaxes(0, 1).reshape(len(places), -1)
    np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


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


@pytest.mark.parametrize("case", small_families.CONFIGS)
def test_what_is_written_is_read_again(case, tmp_path):
    """A saved copy is the same model, bit for bit, with all of its tensors under their names."""
    loaded = specjax.load(small_families.folder(case))
    specjax.save(loaded, tmp_path)
    again = specjax.load(tmp_path)
    assert again.model == loaded.model
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    shapes = small_families.stored()[0][case]["shapes"]
    assert again.num_params == sum(int(np.prod(shape)) for shape in shapes.values())
