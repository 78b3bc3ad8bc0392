"""`Evaluation`: the texts of checkpoint after checkpoint on the same prompts, kept in a folder.

    settings.json       what the texts depend on, except for the weights
    MARK.jsonl          the texts of the checkpoint with this mark, a line for each sample

A call that was stopped goes on behind the last line that is whole.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from jax import Array

from specjax._internal.checks import shown, whole
from specjax.generation import check_length, encode
from specjax.measure import Interval, mean_interval
from specjax.rollouts.keys import NEVER, prompt_digest, rollout_keys
from specjax.rollouts.sampler import Sampler
from specjax.text import Texts, vocabulary_digest
from specjax.types import Weights

_SETTINGS = "settings.json"
_SLOTS = 16
"""The samples that are decoded between two writes, in fills of the sampler's rows."""


class Decoded(TypedDict):
    """The texts of a checkpoint."""

    tokens: list[list[int]]  # of each sample; the samples of a prompt follow each other
    text: list[str]  # empty if the target has no tokenizer
    ended: list[bool]  # by an EOS
    passes: int  # of the target, in this call
    new: int  # texts of this call; the others were there


class Evaluation:
    """Decodes prompts with the weights of checkpoint after checkpoint, each sample with its key.

    The keys stay, so the texts of a checkpoint are nearly those of the next one, which gets them as
    drafts, and differences between checkpoints have less noise.  Each text is that of plain
    decoding.  Do not train on the prompts: the weights would have seen the noise.

    Example:
      >>> from specjax.rollouts import Evaluation, Sampler
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> evaluation = Evaluation(Sampler(target, max_new_tokens=8), [[5, 9], [7]], samples=2)
      >>> len(evaluation.texts("first", target.params)["tokens"])
      4
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        samples: int = 1,
        *,
        seed: int = 0,
        folder: pathlib.Path | None = None,
    ) -> None:
        """Makes an evaluation, and reads what it finds in its folder.

        Args:
          sampler: draws the texts.
          prompts: the token ids of P prompts.
          samples: of each prompt.
          seed: of the keys.
          folder: keeps the texts, so that a call that was stopped can go on; None keeps nothing.

        Raises:
          ValueError: prompts that cannot be used, or the texts in the folder were made with other
            settings.
        """
        self.sampler = sampler
        self.prompts = encode(sampler.target, [list(prompt) for prompt in prompts])
        check_length("target", sampler.target, self.prompts, sampler.new)
        self.samples = whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
        self._keys: Array = rollout_keys(seed, self.prompts, samples, refresh=NEVER)
        self._words = Texts(sampler.target, [prompt[-1] for prompt in self.prompts], ())
        self._last: list[list[int]] | None = None
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._check_settings(folder / _SETTINGS, seed)

    def texts(self, mark: str, params: Weights | None = None) -> Decoded:
        """Returns the texts under some weights; those that the folder has are not drawn again.

        Args:
          mark: a name that no other weights have, such as `Checkpoint.mark()`.
          params: the weights; None, where the folder has all texts of this mark.
        """
        found = self._read(mark)
        portion = -(-_SLOTS * self.sampler.slots // self.samples)
        begin, passes = len(found) // self.samples, 0
        for first in range(begin, len(self.prompts), portion):
            some = self.prompts[first : first + portion]
            at = slice(first * self.samples, (first + len(some)) * self.samples)
            expected = None if self._last is None else self._last[at]
            made = self.sampler.sample(
                some, self._keys[at], samples=self.samples, params=params, expected=expected
            )
            ended = np.asarray(made.ended).tolist()
            new = list(zip(made.texts, ended, strict=True))
            self._write(mark, new, at.start)
            found, passes = [*found, *new], passes + made.passes
        self._last = [tokens for tokens, _ in found]
        new = len(found) - begin * self.samples
        return {
            "tokens": self._last,
            "text": [self._text(number, tokens) for number, (tokens, _) in enumerate(found)],
            "ended": [ended for _, ended in found],
            "passes": passes,
            "new": new,
        }

    def is_complete(self, mark: str) -> bool:
        """Returns whether the folder has all texts of this mark."""
        return len(self._read(mark)) == len(self.prompts) * self.samples

    def _read(self, mark: str) -> list[tuple[list[int], bool]]:
        """Returns the texts of the folder, of whole prompts; what follows is cut off."""
        path = None if self._folder is None else self._folder / f"{mark}.jsonl"
        if path is None or not path.exists():
            return []
        found: list[tuple[list[int], bool]] = []
        lines = path.read_text().split("\n")
        for line in lines[:-1]:  # a line that was not finished has no end
            entry = json.loads(line)
            found.append(([*map(int, entry["tokens"])], bool(entry["ended"])))
        kept = len(found) - len(found) % self.samples
        if kept < len(found) or lines[-1]:
            path.write_text("".join(f"{line}\n" for line in lines[:kept]))
        return found[:kept]

    def _write(self, mark: str, texts: list[tuple[list[int], bool]], first: int) -> None:
        if self._folder is None:
            return
        with (self._folder / f"{mark}.jsonl").open("a") as stream:
            for number, (tokens, ended) in enumerate(texts, start=first):
                prompt, sample = divmod(number, self.samples)
                entry = {
                    "prompt": prompt, "sample": sample, "text": self._text(number, tokens),
                    "tokens": tokens, "ended": ended,
                }  # fmt: skip
                stream.write(json.dumps(entry) + "\n")

    def _text(self, number: int, tokens: list[int]) -> str:
        return self._words.decode(number // self.samples, tokens)

    def _check_settings(self, path: pathlib.Path, seed: int) -> None:
        words = self.sampler.target.tokenizer
        settings = {
            "prompts": prompt_digest([n for row in self.prompts for n in (len(row), *row)]),
            "samples": self.samples,
            "seed": seed,
            "tokenizer": None if words is None else vocabulary_digest(words),
            **self.sampler.settings,
        }
        settings = json.loads(json.dumps(settings))  # as the file has them
        if not path.exists():
            path.write_text(json.dumps(settings, indent=1) + "\n")
            return
        kept = json.loads(path.read_text())
        other = [name for name in settings if kept.get(name) != settings[name]]
        if other:
            raise ValueError(
                f"{path.parent} holds texts with another {', '.join(other)} "
                f"({', '.join(f'{shown(kept.get(n))} and not {shown(settings[n])}' for n in other)}"
                "): choose another --out, or the settings of before"
            )


class Compared(TypedDict):
    """The scores of a checkpoint beside those of the others, with 95 % intervals over prompts."""

    mean: float
    interval: tuple[float, float] | None  # None for a single prompt
    to_first: Interval | None  # the mean difference, of the same prompts and keys
    to_previous: Interval | None


def compare_scores(scores: Array | np.ndarray) -> list[Compared]:
    """Returns the mean score of each checkpoint, and paired differences.

    Each prompt counts once, with the mean of its samples.  See `specjax.measure.mean_interval`.

    Args:
      scores: [C, P, S] of C checkpoints, P prompts and S samples.

    Example:
      >>> from specjax.rollouts import compare_scores
      >>> [round(row["mean"], 2) for row in compare_scores([[[0.0], [1.0]], [[0.5], [1.0]]])]
      [0.5, 0.75]
    """
    means = np.asarray(scores, float).mean(-1)
    rows: list[Compared] = []
    for number, own in enumerate(means):
        around = mean_interval(own)
        rows.append(
            {
                "mean": float(own.mean()),
                "interval": None if around is None else around[1:],
                "to_first": mean_interval(own - means[0]) if number else None,
                "to_previous": mean_interval(own - means[number - 1]) if number else None,
            }
        )
    return rows
