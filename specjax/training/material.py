"""What a job with a target learns from: text, conversations, and what the target wrote."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.files import find_folder
from specjax.models import LanguageModel
from specjax.training import dataset
from specjax.training.conversations import SUFFIX, read_conversations
from specjax.training.corpus import Tokens, digest, prepare
from specjax.training.dataset import Written, model_hashes


@dataclasses.dataclass(frozen=True)
class Material:
    """Text as a stream, sequences with masks, what is held out of the two, and hashes of all that is read."""

    text: Tokens | None
    written: Written | None
    held_out: Tokens | Written
    inputs: dict[str, str]


def gather(options: Any, target: LanguageModel, settings: dict[str, Any] | None = None) -> Material:
    """Read `options.data`: folders and files of text, datasets of train.generate, and files of conversations (.jsonl).

    Args:
      options: of a job: `target`, `data`, `source`, `out` and `sequence_length`.
      target: the model in `options.target`.
      settings: those that the target must have drawn with (None: any, and conversations may be anybody's).

    Raises:
      ValueError: a sequence that the target cannot read, data of another target, a file that is not what it should be.
    """
    out, length = pathlib.Path(options.out), options.sequence_length
    if target.tokenizer is None:
        raise ValueError(f"--target {options.target} has no tokenizer.json, which tokenises --data")
    if length > target.model.max_positions:
        raise ValueError(
            f"--sequence-length is {length}; the target reads at most {target.model.max_positions}"
        )
    made = [path for path in map(pathlib.Path, options.data) if (path / dataset.MANIFEST).exists()]
    chats = [
        path for path in map(pathlib.Path, options.data) if path.suffix == SUFFIX and path.is_file()
    ]
    text = written = held_out = None
    hashes = model_hashes(options.target)
    inputs = dict(hashes)
    if folders := tuple(path for path in options.data if pathlib.Path(path) not in made + chats):
        source = dataclasses.replace(options.source, folders=folders)
        tokenizer = str(find_folder(options.target) / "tokenizer.json")
        _, text, held_out = prepare(source, out / "corpus", target.model.vocab_size, tokenizer)
        inputs = {**text.inputs, **hashes}
    if chats and settings is not None:
        raise ValueError(
            f"{chats[0]} holds what anybody said, and this loss is a mean over what the target says: "
            "let it answer them with train.generate --prompts"
        )
    if made or chats:
        rows = [row for path in made for row in dataset.read_masked(path, hashes, settings)]
        cuts = [cut for path in made for cut in dataset.cuts(path)]
        said = [row for path in chats for row in read_conversations(target, path)]
        written = Written.of(rows + said, length, cuts + [length + 1] * len(said))
        inputs["dataset"] = digest(
            *(shard for path in made for shard in sorted(path.glob("*.safetensors"))), *chats
        )
        if held_out is None:
            written, held_out = written.split()
    assert held_out is not None  # options have at least one thing to read
    return Material(text, written, held_out, inputs)


def held_out_rows(
    held_out: Tokens | Written, index: int, rows: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, length + 1] and `drawn` [rows, length], as in a batch; of text nothing is drawn."""
    if isinstance(held_out, Written):
        found = held_out.rows(index * rows, rows, 0)
        return found.tokens, found.drawn
    return held_out.batch(index, rows, length, 0), np.zeros((rows, length), np.float32)


def held_out_prompts(
    held_out: Tokens | Written, count: int, length: int, prompt: int, longest: int
) -> list[list[int]]:
    """Prompts to continue: `prompt` tokens of text, or what stands before an answer, at most `longest` tokens."""
    tokens, drawn = held_out_rows(held_out, 0, count, length)
    starts = np.where(drawn.any(1), drawn.argmax(1) + 1, prompt)
    return [
        row[: min(start, longest)].tolist()
        for row, start in zip(tokens, starts.tolist(), strict=True)
    ]


def learned(drawn: Any, prompts: bool = False) -> Array:
    """[B, T] 1 where the next token is learned: what was drawn, and all of a sequence that is text.

    Nothing of a prompt is, unless `prompts`, and nothing of what pads a sequence that ended.
    """
    drawn = jnp.asarray(drawn)
    text = drawn.sum(1, keepdims=True) == 0
    if prompts:
        drawn = jnp.flip(jax.lax.cummax(jnp.flip(drawn, 1), axis=1), 1)
    return drawn + text
