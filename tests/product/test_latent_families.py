"""Families with latent attention against transformers, however a long text is read."""

import functools
import json

import folders
import jax
import jax.numpy as jnp
import latent_families
import numpy as np
import pytest
import small_families
import test_families
from test_models import ours, theirs

import specjax

LENGTH, VOCAB = 700, 96
FAMILIES = tuple(latent_families.cases(test_families.SIZES, 160))


@functools.cache
def made(family):
    """A random model in our form, a text of 700 tokens, and the logits of transformers."""
    case = next(iter(test_families.CONFIGS[family]))
    model, folder = test_families.make(family, case, max_position_embeddings=768)
    text = folders.random_tokens(LENGTH, vocab_size=VOCAB)
    return specjax.load(folder), text, theirs(model, text)[0]


def close(found, wanted):
    """Logits differ by at most 1e-4 of their greatest number."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def passes(family, rows, sizes):
    """The logits of each row, whose passes read `sizes(step)` [rows] tokens each, and padding."""
    loaded, text, _ = made(family)
    width = int(np.max([sizes(0), sizes(1)]))

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params, cache, part, count):
        out = loaded.model.apply(params, part, cache.next_positions(width), cache)
        return out.logits, out.staged.commit(count)

    cache = loaded.model.init_cache(rows, 768 + width)
    found, done, step = [[] for _ in range(rows)], np.zeros(rows, int), 0
    padded = np.pad(text[0], (0, width))
    while (done < LENGTH).any():
        count = np.minimum(sizes(step), LENGTH - done)
        part = np.stack([padded[n : n + width] for n in done])
        logits, cache = read(loaded.params, cache, jnp.asarray(part), jnp.asarray(count, jnp.int32))
        for row, n in enumerate(count):
            found[row] += list(np.asarray(logits[row, :n]))
        done, step = done + count, step + 1
    return np.array(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_once(family):
    loaded, text, wanted = made(family)
    close(ours(loaded, text)[0], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_chunks(family):
    """Two rows read other parts of each chunk, so each stages padding that is overwritten."""
    for row in passes(family, 2, lambda step: np.array([96, 41] if step % 2 else [57, 96])):
        close(row, made(family)[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token(family):
    close(passes(family, 1, lambda step: np.array([1]))[0], made(family)[2])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_the_layer_that_drafts_is_left_out(family, tmp_path):
    """Folders hold it behind the last layer; a tensor that follows no such layer is refused by
    name."""
    case = next(iter(test_families.CONFIGS[family]))
    loaded = specjax.load(test_families.make(family, case)[1])
    specjax.save(loaded, tmp_path)
    rows = {"eh_proj.weight": (64, 128), "self_attn.kv_b_proj.weight": (52, 10)}
    more = {f"model.layers.2.{name}": np.ones(shape, np.float32) for name, shape in rows.items()}
    folders.change_tensors(tmp_path, lambda tensors: tensors.update(more))
    jax.tree.map(np.testing.assert_array_equal, specjax.load(tmp_path).params, loaded.params)
    further = {"model.layers.4.eh_proj.weight": np.ones((64, 128), np.float32)}
    folders.change_tensors(tmp_path, lambda tensors: tensors.update(further))
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj\.weight is not a tensor"):
        specjax.load(tmp_path)


@pytest.mark.parametrize(
    ("family", "saved", "named"),
    [
        ("kimi_k2", "deepseek_v3", "DeepseekV3ForCausalLM"),
        ("mimo", "qwen2", "Qwen2ForCausalLM"),
    ],
)
def test_a_copy_is_saved_for_transformers(family, saved, named, tmp_path):
    """transformers has neither family, and reads their layouts under other names."""
    folder = small_families.folder(next(c for c in small_families.CONFIGS if c.startswith(family)))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    specjax.save(specjax.load(folder), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == saved
    assert config["architectures"] == [named]
