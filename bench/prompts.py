"""What the contestants continue: the ends of real prompts, or random tokens; all of one length, as a batch asks."""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

import specjax
from specjax.call import encode
from specjax.flags import read_prompts

RANDOM_LENGTH, REAL_LENGTH = 32, 96
SHIPPED = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode" / "prompts.jsonl"


def batches(
    target: specjax.LanguageModel,
    path: pathlib.Path | None,
    rows: int,
    length: int | None,
    limit: int = 0,
) -> list[np.ndarray]:
    """Token ids [rows, length] of each batch: one of random tokens without a `path`, else all that its prompts fill.

    Args:
      target: whose tokens they are.
      path: as `--prompt-file` of `specjax bench`.
      rows: of a batch.
      length: of a prompt, of which the last tokens are taken; None is 32 random ones, or 96 real ones.
      limit: use the first so many prompts only; 0: all.

    Raises:
      ValueError: a prompt that is shorter, or fewer prompts than rows.
    """
    if path is None:
        shape = (rows, length or RANDOM_LENGTH)
        return [
            np.random.default_rng(0).integers(1, target.model.vocab_size, shape, dtype=np.int32)
        ]
    texts = read_prompts(argparse.Namespace(prompt=[], prompt_file=path))
    ids, length = encode(target, texts[: limit or len(texts)]), length or REAL_LENGTH
    for number, prompt in enumerate(ids):
        if len(prompt) < length:
            raise ValueError(
                f"prompt {number} of {path} has {len(prompt)} tokens, fewer than the {length} that are asked for: pass "
                f"--prompt-length {min(map(len, ids))}"
            )
    if len(ids) < rows:
        raise ValueError(f"--batch {rows} asks for more prompts than the {len(ids)} of {path}")
    found = np.array([prompt[-length:] for prompt in ids], np.int32)
    return [found[at : at + rows] for at in range(0, len(found) - rows + 1, rows)]
