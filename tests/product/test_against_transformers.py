"""The installed transformers beside `tests/fixtures`, and beside what `specjax.save` writes."""

import dataclasses
import sys

import eagle3_folders
import folders
import jax.numpy as jnp
import numpy as np
import pytest
import small_families
import stored
import torch
import transformers
from test_models import ours

import specjax

sys.path.insert(0, str(stored.FIXTURES))
import make_families
import make_transformers


def test_chats():
    assert make_transformers.said() == stored.said()


def test_warps_and_processors():
    made = make_transformers.arrays()
    assert set(made) == set(stored.arrays())
    for name, array in made.items():
        np.testing.assert_allclose(array, stored.arrays()[name], rtol=1e-6)


def test_every_family_of_the_fixture():
    assert set(small_families.CONFIGS) == set(small_families.stored()[0])


@pytest.mark.parametrize("case", small_families.CONFIGS)
def test_families(case):
    """The stored logits and hidden states, and a folder that specjax has saved again."""
    model, described = make_families.model_of(case)
    facts, arrays = small_families.stored()
    assert described == facts[case]
    logits, states = make_families.computed(model)
    for made, name in ((logits, "logits"), (states, "states")):
        # torch's own sums differ between processors, in proportion to the largest numbers.
        kept = arrays[f"{case}: {name}"]
        np.testing.assert_allclose(made, kept, rtol=0, atol=1e-5 * np.abs(kept).max())


@pytest.mark.parametrize("kind", eagle3_folders.MORE)
def test_the_features_of_eagle3_targets(kind):
    """The reference of EAGLE-3 heads reads its target as transformers does in float64, with at most
    three times the error that transformers has in float32."""
    tokens = folders.random_tokens(60)
    taps = tuple(range(eagle3_folders.LAYERS))

    def theirs(dtype: torch.dtype) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            eagle3_folders.target(kind), attn_implementation="eager", dtype=dtype
        ).eval()
        with torch.no_grad():
            states = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states
        return np.concatenate([states[tap][0].double().numpy() for tap in taps], axis=-1)

    wanted, single = theirs(torch.float64), theirs(torch.float32)
    found = eagle3_folders.features_of(kind, tuple(tokens[0].tolist()), taps)
    assert np.abs(found - wanted).max() < 3 * np.abs(single - wanted).max()
    assert np.abs(single - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_num_params():
    """`num_params` equals the count of transformers."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders.target())
    assert specjax.load(folders.target()).num_params == theirs.num_parameters()


@pytest.mark.parametrize("name", folders.SAVED)
def test_transformers_reads_what_save_writes(name, tmp_path):
    """AutoModelForCausalLM loads a saved folder in the saved dtype with equal logits."""
    loaded = specjax.load(
        folders.write(folders.random_llama(6, **folders.SAVED[name]), f"back-{name}")
    )
    dtype = jnp.bfloat16 if name == "bfloat16" else None
    specjax.save(dataclasses.replace(loaded, files={}), tmp_path, dtype=dtype)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == (
        torch.bfloat16 if dtype else torch.float32
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = folders.random_tokens(60)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(ours(specjax.load(tmp_path), tokens), wanted, rtol=0, atol=1e-4)


def test_transformers_reads_the_saved_tokenizer(tmp_path):
    """AutoTokenizer gives a text the same ids as our tokenizer."""
    loaded = specjax.load(folders.target())
    specjax.save(dataclasses.replace(loaded, files={}), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        theirs(folders.TEXT)["input_ids"]
        == specjax.load(tmp_path).tokenizer.encode(folders.TEXT).ids
    )


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path):
    """As in specjax, truncation and padding in tokenizer.json are ignored."""
    texts, words = [folders.TEXT, "the cat"], folders.tokenizer()
    wanted = [words.encode(text).ids for text in texts]
    words.enable_truncation(4)
    words.enable_padding(length=8)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text)["input_ids"] for text in texts] == wanted
