"""Prompts of one length: the ends of real prompts, or random tokens."""

from __future__ import annotations

import pathlib

import numpy as np

import specjax
from specjax.generation import encode_file

RANDOM_LENGTH, REAL_LENGTH = 32, 96
SHIPPED = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode" / "prompts.jsonl"


def batches(
    target: specjax.LanguageModel,
    path: pathlib.Path | None,
    rows: int,
    length: int | None,
    limit: int = 0,
) -> list[np.ndarray]:
    """Token ids [rows, length] of each batch that the prompts fill.

    Args:
      target: the model whose tokenizer is used.
      path: of a file as `--prompt-file` of `specjax bench`; None gives one batch of random tokens.
      rows: of a batch.
      length: how many of a prompt's last tokens are used; None is 96, or 32 if they are random.
      limit: use only this many prompts; 0 uses all.

    Raises:
      ValueError: a prompt has fewer tokens than `length`, or there are fewer prompts than `rows`.
    """
    if path is None:
        shape = (rows, RANDOM_LENGTH if length is None else length)
        return [
            np.random.default_rng(0).integers(1, target.model.vocab_size, shape, dtype=np.int32)
        ]
    ids = encode_file(target, path)
    length = REAL_LENGTH if length is None else length
    ids = ids[: limit or len(ids)]
    for number, prompt in enumerate(ids):
        if len(prompt) < length:
            raise ValueError(
                f"prompt {number} of {path} has {len(prompt)} tokens, fewer than the {length} "
                f"requested: pass --prompt-length {min(map(len, ids))}"
            )
    if len(ids) < rows:
        raise ValueError(f"--batch {rows} asks for more prompts than the {len(ids)} of {path}")
    ends = np.array([prompt[-length:] for prompt in ids], np.int32)
    return [ends[at : at + rows] for at in range(0, len(ends) - rows + 1, rows)]
