"""Reads the training data of a job: text, conversations, and datasets of the target."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models import LanguageModel
from specjax.training import dataset
from specjax.training.conversations import read_conversations
from specjax.training.corpus import Tokens, files_of
from specjax.training.dataset import model_hashes
from specjax.training.mixture import DataOptions, Mixture
from specjax.training.ordering import Rows, batches
from specjax.training.rows import has_rows, holds_conversations
from specjax.training.shards import digest
from specjax.training.targets import TargetOptions
from specjax.training.tokenising import prepare
from specjax.training.written import Written


@dataclasses.dataclass(frozen=True)
class Material:
    """The data of a job."""

    text: Tokens | Mixture | None  # a stream of text
    written: Written | None  # sequences with masks
    held_out: Tokens | Mixture | Written  # held-out text if there is text, else sequences
    inputs: dict[str, str]  # hashes of everything that was read, by name
    share: float | None = None  # of the sequences with answers, by --weights

    def batches(
        self, length: int, size: int, seed: int, share: float, own: float = 0.0, whole: bool = False
    ) -> Rows:
        """Returns the batches of a run by their steps; see `ordering.batches`.

        If sequences with answers are packed, rows of text have `starts`, too.
        """
        windows = None if self.text is None else self.text.rows(length, seed)
        answers = None if self.written is None or not share else self.written.rows(seed)
        if windows is not None and self.written is not None and self.written.starts is not None:
            windows = windows.map(lambda row: {**row, "starts": np.zeros(length, bool)})
        return batches(windows, answers, size, share, own, whole)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Returns [V] the count of each token in the text, or learned in sequences with answers."""
        counts = np.zeros(vocab_size, np.int64)
        if self.text is not None:
            for ids in self.text.blocks():
                counts += np.bincount(ids, minlength=vocab_size)[:vocab_size]
        if self.written is not None:
            tokens, drawn = self.written.tokens[:, 1:], self.written.drawn > 0
            counts += np.bincount(tokens[drawn], minlength=vocab_size)[:vocab_size]
        return counts

    def test(self, length: int, size: int) -> Rows:
        """Returns batches of held-out rows."""
        return rows_of(self.held_out, length, 0).batch(size)


@dataclasses.dataclass(frozen=True)
class TargetDataOptions(DataOptions, TargetOptions):
    """The data of a job, and the target that reads them."""


def gather(
    options: TargetDataOptions,
    target: LanguageModel,
    out: pathlib.Path,
    length: int,
    settings: Mapping[str, float] | None = None,
    exact: bool = False,
) -> Material:
    """Reads `options.data`: text, datasets of train.generate, and files of rows (`rows.py`).

    Args:
      options: of the job, whose `target` is the model.
      target: that model.
      out: folder of the run.
      length: tokens per sequence.
      settings: the sampling settings that the run learns for; datasets that were drawn with others
        are named.  None: with any.
      exact: the loss is a mean over text drawn with these settings, so datasets with others and
        conversations are refused.

    Raises:
      ValueError: sequences longer than the target can read, data of another target, or a malformed
        file.
    """
    if length > target.model.max_positions:
        raise ValueError(
            f"--sequence-length is {length}; the target reads at most {target.model.max_positions}"
        )
    hashes = model_hashes(options.target, options.lora)

    def read(data: tuple[str, ...], corpus: pathlib.Path) -> _Found:
        """Reads entries of `--data`."""
        made = [path for path in map(pathlib.Path, data) if (path / dataset.MANIFEST).exists()]
        folders = tuple(path for path in data if pathlib.Path(path) not in made)
        source = dataclasses.replace(options.source, folders=folders)
        files, column = files_of(source), options.source.column
        chats = [path for path in files if has_rows(path) and holds_conversations(path, column)]
        text = held_out = written = None
        if folders and (len(files) > len(chats) or not files):
            source = dataclasses.replace(source, conversations=tuple(map(str, chats)))
            size = target.model.vocab_size
            _, text, held_out = prepare(source, corpus, size, options.tokenizer_file)
        if chats and exact:
            raise ValueError(
                f"the target did not draw the answers in {chats[0]}, and this loss is a mean over "
                "text that it drew: let the target answer these prompts with train.generate "
                "--prompts"
            )
        if made or chats:
            masked = (dataset.read_masked(path, hashes, settings, exact) for path in made)
            rows = [row for part in masked for row in part]
            cuts = [cut for path in made for cut in dataset.cuts(path)]
            answers = [row for path in chats for row in read_conversations(target, path, column)]
            written = Written.of(rows + answers, length, cuts + [length + 1] * len(answers))
        shards = [shard for path in made for shard in sorted(path.glob("*.safetensors"))]
        return _Found(text, held_out, written, shards + chats)

    corpus = out / "corpus"
    if options.weights:
        found = [read((path,), corpus / str(i)) for i, path in enumerate(options.data)]
    else:
        found = [read(options.data, corpus)]
    texts = [(i, one.text, one.held_out) for i, one in enumerate(found) if one.text is not None]
    answers = [(i, one.written) for i, one in enumerate(found) if one.written is not None]
    text = written = held_out = share = None
    inputs = dict(hashes)
    if texts:
        numbers, parts, tests = zip(*texts, strict=True)
        shares = tuple(options.weights[i] for i in numbers) if options.weights else (1.0,)
        text, held_out = (
            x[0] if len(x) == 1 else Mixture(tuple(x), shares) for x in (parts, tests)
        )
        inputs = {**text.inputs, **hashes}
    if answers:
        rows = [one for _, one in answers]
        written = rows[0] if len(rows) == 1 else Written.joined(dict(answers), options.weights)
        inputs["dataset"] = digest(*(path for one in found for path in one.files))
        if held_out is None:
            written, held_out = written.split()
        if options.weights:
            whole = math.fsum(options.weights)
            share = 1 - math.fsum(options.weights[i] for i, *_ in texts) / whole
    assert held_out is not None  # `data` is never empty
    if not isinstance(held_out, Written):
        held_out.windows(length)  # refused now, and not where it is read first, after many steps
    return Material(text, written, held_out, inputs, share)


@dataclasses.dataclass(frozen=True)
class _Found:
    """The data in some entries of `--data`."""

    text: Tokens | None
    held_out: Tokens | None
    written: Written | None
    files: list[pathlib.Path]  # of the sequences with answers


def rows_of(data: Tokens | Mixture | Written, length: int, seed: int) -> Rows:
    """Returns endless rows of a text or of sequences; see `ordering`."""
    return data.rows(seed) if isinstance(data, Written) else data.rows(length, seed)


def held_out_prompts(
    held_out: Tokens | Mixture | Written, count: int, length: int, prompt: int, longest: int
) -> list[list[int]]:
    """Returns prompts to continue: `prompt` tokens of text, or all tokens before an answer.

    A prompt has at most `longest` tokens.
    """
    rows = rows_of(held_out, length, 0).batch(count)[0]
    starts = np.where(rows["drawn"].any(1), rows["drawn"].argmax(1) + 1, prompt)
    return [
        row[: min(start, longest)].tolist()
        for row, start in zip(rows["tokens"], starts.tolist(), strict=True)
    ]


def learned(drawn: Array | np.ndarray, prompts: bool = False) -> Array:
    """Returns [B, T] 1 where the next token is learned.

    These are the drawn tokens, and all tokens of a row that is text.  Prompts are learned only with
    `prompts`, and padding after the EOS never is.
    """
    drawn = jnp.asarray(drawn)
    text = drawn.sum(1, keepdims=True) == 0
    if prompts:
        drawn = jnp.flip(jax.lax.cummax(jnp.flip(drawn, 1), axis=1), 1)
    return drawn + text
