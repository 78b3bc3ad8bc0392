"""Language models over tables, with the tokenizers of `folders.py`.

They stand for loaded models where a test is about what is done with one: they need no file, and
cost next to nothing to trace and to compile.
"""

from __future__ import annotations

import functools
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from table_model import PLACES, WIDTH, TableModel, tables

from specjax import LanguageModel, MedusaAdapter
from specjax.methods import MedusaHeads, initial_medusa

SEED = 0
"""Of the target: greedy texts of the prompts of `test_generate.py` vary, and do not end."""


def worded(vocab_size: int, flips: float = 0.0) -> Any:
    """Parameters of the target, or of a copy with noise, for another size of the vocabulary.

    Ids behind those of the tokenizer have the logit 0, and are never the best.
    """
    made, known = tables(320, SEED, flips), folders.tokenizer().get_vocab_size()
    head, embedding = np.zeros((WIDTH, vocab_size), np.float32), np.zeros((vocab_size, WIDTH))
    head[:, :known] = made["head"]["kernel"][:, :known]
    embedding[:known] = made["embedding"][:known]
    return {
        **made, "embedding": jnp.asarray(embedding, jnp.float32),
        "head": {"kernel": jnp.asarray(head)},
    }  # fmt: skip


@functools.cache
def target() -> LanguageModel:
    """320 tokens and 512 positions."""
    model = TableModel(320, max_positions=512)
    return LanguageModel(model, worded(320), folders.tokenizer(), (0,), "target")


@functools.cache
def draft() -> LanguageModel:
    """The target with noise, so that it is right now and then, with less padding of its vocabulary
    and less context."""
    model = TableModel(304, max_positions=256)
    return LanguageModel(model, worded(304, 0.02), folders.tokenizer(), (0,), "draft")


@functools.cache
def padded() -> LanguageModel:
    """The target with more padding of its vocabulary."""
    model = TableModel(352, max_positions=512)
    return LanguageModel(model, worded(352), folders.tokenizer(), (0,), "padded")


@functools.cache
def wordless() -> LanguageModel:
    """The target without a tokenizer."""
    return LanguageModel(target().model, target().params, None, (0,), "wordless")


@functools.cache
def foreign() -> LanguageModel:
    """A model with another tokenizer."""
    words = tokenizers.Tokenizer.from_file(str(folders.tokenizer_file(270)))
    return LanguageModel(
        TableModel(280, max_positions=1024), tables(280, 7), words, (0,), "foreign"
    )


@functools.cache
def scribe(
    text: str, end: bool, words: tokenizers.Tokenizer | None = None, eos: int = 0
) -> LanguageModel:
    """A model that writes `text` after its first token, repeatedly or up to `eos`.

    All tokens of the text must differ.  It sees the last token alone, and the column of each token
    in its head is the embedding of the token before it.
    """
    words = words or folders.tokenizer()
    ids = words.encode(text).ids
    assert len(set(ids)) == len(ids), "a token appears twice"
    ids = [*ids, eos] if end else ids
    size = max(320, words.get_vocab_size())
    rng = np.random.default_rng(3)
    meanings = rng.normal(size=(size, 64)).astype(np.float32)
    meanings /= np.linalg.norm(meanings, axis=1, keepdims=True)
    head = np.zeros((64, size), np.float32)
    for before, after in zip(ids, ids[1:] + ids[:1], strict=True):
        head[:, after] = meanings[before]
    params = {
        "embedding": jnp.asarray(meanings), "place": jnp.zeros((PLACES, 64)),
        "head": {"kernel": jnp.asarray(head)},
    }  # fmt: skip
    model = TableModel(size, memory=0, max_positions=1024)
    return LanguageModel(model, params, words, (eos,), f"scribe of {text[:9]}")


def heads(target: LanguageModel, seed: int = 0) -> MedusaAdapter:
    """Two random Medusa heads, with a tree of three choices."""
    matrix, rng = target.params["head"]["kernel"], np.random.default_rng(seed)
    made = MedusaHeads(2, *matrix.shape)
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32),
        initial_medusa(made, matrix),
    )
    choices = ((0,), (1,), (0, 0))
    return MedusaAdapter(params=params, name=f"heads {seed}", heads=made, choices=choices)
