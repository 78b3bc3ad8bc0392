"""A pair of table models with a tokenizer: language models whose programs compile at once."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import folders
import pytest
import tokenizers
from table_model import TableModel, tables

import specjax

POSITIONS = 1024


def language_model(like: pathlib.Path | None = None, flips: float = 0.0) -> specjax.LanguageModel:
    """A table model with the tokenizer of the tests, or with that of a folder, and its name.

    Args:
      like: the folder of another model.
      flips: this share of the head differs from that of other calls.
    """
    words, name, eos = folders.tokenizer(), "table", 0
    if like is not None:
        words, name = tokenizers.Tokenizer.from_file(str(like / "tokenizer.json")), like.name
        eos = words.token_to_id(folders.END)
    vocab = -(-words.get_vocab_size() // 64) * 64
    model = TableModel(vocab, max_positions=POSITIONS)
    return specjax.LanguageModel(model, tables(vocab, flips=flips), words, (eos,), name)


@functools.cache
def target() -> specjax.LanguageModel:
    return language_model()


@functools.cache
def draft() -> specjax.LanguageModel:
    return language_model(flips=0.02)


def stand_in(monkeypatch: pytest.MonkeyPatch, pair: pathlib.Path) -> None:
    """`specjax.load` gives table models for the target and the draft of a folder of two."""
    load = specjax.load
    made = functools.cache(lambda name, flips: language_model(pair / name, flips))

    def loaded(folder: Any, *arguments: Any, **options: Any) -> specjax.LanguageModel:
        for name, flips in (("target", 0.0), ("draft", 0.02)):
            if pathlib.Path(folder).resolve() == (pair / name).resolve():
                return made(name, flips)
        return load(folder, *arguments, **options)

    monkeypatch.setattr(specjax, "load", loaded)
