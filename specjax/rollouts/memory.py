"""`Memory`: the last text of each sample, which is expected of the next one."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from specjax._internal.checks import shown, whole
from specjax.models import LanguageModel
from specjax.rollouts.keys import prompt_digest
from specjax.text import vocabulary_digest


class Memory:
    """The new tokens of samples by (prompt, sample), bounded in tokens.

    What it returns is expected of `Sampler.sample`, so it is drafts.  A text of it that is wrong
    costs time and changes nothing.  The samples that were used longest ago leave first.

    Example:
      >>> from specjax.rollouts import Memory
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> memory = Memory(target)
      >>> memory.put([[5, 9]], [[7, 7, 3]])
      >>> memory.expected([[5, 9], [1]])
      [[7, 7, 3], None]
    """

    def __init__(self, target: LanguageModel, most_tokens: int = 50_000_000) -> None:
        """Makes an empty memory of texts in the target's tokens.

        Args:
          target: the model; texts of another tokenizer are refused by `load`.
          most_tokens: that are kept.
        """
        self.most_tokens = whole("most_tokens", most_tokens, 1, 2**62, "a whole number, 1 or more")
        self._size = target.model.vocab_size
        words = target.tokenizer
        self._vocabulary = "" if words is None else vocabulary_digest(words)
        self._texts: collections.OrderedDict[tuple[str, int], np.ndarray] = (
            collections.OrderedDict()
        )
        self.tokens = 0

    def put(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], samples: int = 1
    ) -> None:
        """Keeps the new tokens of `samples` samples of each prompt, which follow each other.

        Raises:
          ValueError: there are not `samples` texts for each prompt, or a token is outside of the
            vocabulary.
        """
        samples = whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
        if len(texts) != len(prompts) * samples:
            raise ValueError(
                f"texts has {len(texts)} entries for {len(prompts)} prompts of {samples} samples; "
                f"pass {len(prompts) * samples}"
            )
        for prompt in prompts:
            _ids("prompts", prompt)
        kept = [_ids("texts", text) for text in texts]
        for number, text in enumerate(kept):
            if text.size and not 0 <= text.min() <= text.max() < self._size:
                raise ValueError(
                    f"text {number} holds token ids from {text.min()} to {text.max()}; the "
                    f"vocabulary has {self._size}"
                )
        for number, text in enumerate(kept):
            key = prompt_digest(prompts[number // samples]), number % samples
            self._forget(key)
            self._texts[key] = text.astype(np.int32)
            self.tokens += text.size
        while self.tokens > self.most_tokens:
            self._forget(next(iter(self._texts)))

    def expected(
        self, prompts: Sequence[Sequence[int]], samples: int = 1
    ) -> list[list[int] | None]:
        """Returns the kept text of each sample, or None.

        Raises:
          ValueError: a prompt that is no list of token ids.
        """
        samples = whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
        found: list[list[int] | None] = []
        for prompt in prompts:
            _ids("prompts", prompt)
            digest = prompt_digest(prompt)
            for sample in range(samples):
                text = self._texts.get((digest, sample))
                if text is not None:
                    self._texts.move_to_end((digest, sample))
                found.append(None if text is None else text.tolist())
        return found

    def documents(self, prompts: Sequence[Sequence[int]], samples: int) -> list[list[list[int]]]:
        """Returns the kept texts of all samples of each prompt, to look up in with fresh keys."""
        texts = self.expected(prompts, samples)
        return [
            [text for text in texts[n * samples : (n + 1) * samples] if text]
            for n in range(len(prompts))
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the memory to a file; an interrupted call leaves the old file."""
        file = pathlib.Path(path)
        names = [[digest, sample] for digest, sample in self._texts]
        lengths = [text.size for text in self._texts.values()]
        about = {"vocabulary": self._vocabulary, "size": self._size, "samples": names}
        parts = [*self._texts.values(), np.zeros(0, np.int32)]
        new = file.with_name(f".{file.name}.new")
        with new.open("wb") as stream:
            np.savez_compressed(
                stream,
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                lengths=np.array(lengths, np.int64),
                tokens=np.concatenate(parts),
            )
        new.replace(file)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Adds the texts of a file that `save` wrote.

        Raises:
          ValueError: the file is of another tokenizer, or no memory.  Nothing is added then.
          OSError: it cannot be read.
        """
        try:
            with (
                pathlib.Path(path).open("rb") as stream,
                np.load(stream, allow_pickle=False) as stored,
            ):
                about = json.loads(stored["about"].tobytes())
                lengths, tokens = stored["lengths"], stored["tokens"]
            names = [(str(digest), int(sample)) for digest, sample in about["samples"]]
            vocabulary = about["vocabulary"], about["size"]
            texts = np.split(tokens, np.cumsum(lengths))[: len(names)]
            if len(texts) != len(names) or sum(map(len, texts)) != len(tokens):
                raise ValueError("its parts do not fit each other")
        except (
            EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error
        ) as error:  # fmt: skip
            raise ValueError(
                f"{path} is no memory of rollouts ({shown(str(error))}); pass a file that "
                "Memory.save wrote"
            ) from None
        if vocabulary != (self._vocabulary, self._size):
            raise ValueError(
                f"{path} holds texts of another tokenizer than the target's; pass the memory of "
                "this model, or begin with an empty one"
            )
        for key, text in zip(names, texts, strict=True):
            self._forget(key)
            self._texts[key] = text.astype(np.int32)
            self.tokens += text.size
        while self.tokens > self.most_tokens:
            self._forget(next(iter(self._texts)))

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._texts)

    def _forget(self, key: tuple[str, int]) -> None:
        old = self._texts.pop(key, None)
        self.tokens -= 0 if old is None else old.size


def _ids(name: str, given: object) -> np.ndarray:
    """Returns token ids [T] as int64, or raises ValueError."""
    try:
        made = np.asarray([] if given is None else given)
    except ValueError:  # lists of several lengths
        made = np.zeros((0, 0))
    if made.ndim != 1 or (made.size and made.dtype.kind not in "iu"):
        raise ValueError(f"{name} holds {shown(given)}; pass a list of token ids for each")
    return made.astype(np.int64)
