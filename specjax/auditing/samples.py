"""Batches of the audited decoder: rows of many kinds, which end at different times.

    row      0       1       2      3      4    5    6      7      8 ...
    prompt   0       1       0      1      0    1    0      1      0 ...      (two prompts)
    kind     greedy  greedy  asked  asked  hot  hot  asked  asked  cold ...

So every row has neighbours with other prompts, other settings and another end.  A decoder that
mixes up rows then breaks a claim about its texts.  All batches run one compiled program: settings,
limits and keys are data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.auditing.warping import Settings
from specjax.decoding import Decoder
from specjax.parallel import to_host
from specjax.processors import Processors
from specjax.sampling import Sampling, make_key
from specjax.types import DecodeState, Params

GREEDY, ASKED, HOT, COLD = range(4)

_TEXTS = np.array([GREEDY, ASKED, GREEDY, HOT, GREEDY, ASKED, GREEDY, COLD])
_SAMPLES = np.array([GREEDY, ASKED, HOT, ASKED, COLD, ASKED, HOT, COLD])


def kinds_beside(asked: Settings, vocab_size: int) -> tuple[Settings, ...]:
    """Returns the settings of the kinds of rows: greedy, as asked, hot top-p, cold top-k."""
    few = max(2, min(20, vocab_size // 2))
    return (
        Settings(0.0),
        asked,
        dataclasses.replace(
            asked, temperature=1.6 * asked.temperature, top_p=min(asked.top_p, 0.85)
        ),
        dataclasses.replace(
            asked,
            temperature=0.7 * asked.temperature,
            top_k=min(few, asked.top_k or few),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch, on the host.

    Attributes:
      prompts: token ids.
      prompt_of: [B] the number of each row's prompt.
      kind: [B] indices of `settings`.
      settings: of each kind.
      limit: [B] the length at which each row ends.
      key: [B] PRNG keys.
      new_tokens: the most new tokens of a row.
    """

    prompts: Sequence[Sequence[int]]
    prompt_of: np.ndarray
    kind: np.ndarray
    settings: tuple[Settings, ...]
    limit: np.ndarray
    key: Array
    new_tokens: int

    @property
    def width(self) -> int:
        """The most tokens of a text; it does not depend on the limits of this batch."""
        return max(map(len, self.prompts)) + self.new_tokens

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[B] int32 of the prompts."""
        return np.array([len(prompt) for prompt in self.prompts], np.int32)[self.prompt_of]

    @property
    def tokens(self) -> np.ndarray:
        """[B, P] the prompts, padded on the right."""
        padded = np.zeros((len(self.prompt_of), max(map(len, self.prompts))), np.int32)
        for row, prompt in zip(padded, self.prompt_of, strict=True):
            row[: len(self.prompts[prompt])] = self.prompts[prompt]
        return padded

    @property
    def sampling(self) -> Sampling:
        """The settings of the rows."""
        fields = [dataclasses.asdict(settings) for settings in self.settings]
        of_rows = {name: np.array([one[name] for one in fields])[self.kind] for name in fields[0]}
        return Sampling.create(len(self.kind), **of_rows)

    def shuffled(self, order: np.ndarray) -> Rows:
        """Returns these rows in another order."""
        return dataclasses.replace(
            self,
            prompt_of=self.prompt_of[order],
            kind=self.kind[order],
            limit=self.limit[order],
            key=self.key[order],
        )


def batch(
    prompts: Sequence[Sequence[int]],
    settings: tuple[Settings, ...],
    rows: int,
    new_tokens: int,
    seed: int,
    number: int,
    spread: int,
) -> Rows:
    """Makes batch `number` of an audit: `rows` rows with at most `new_tokens` new tokens.

    In batch 0 half of the rows are greedy, in the others one of eight.  Row by row, limits are up
    to `spread` tokens lower; greedy rows have any limit.
    """
    row = np.arange(rows)
    turns = _SAMPLES if number else _TEXTS
    kind = turns[(row // len(prompts) + number) % len(turns)]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)[row % len(prompts)]
    random = np.random.default_rng([seed, number])
    fewer = np.where(
        kind == GREEDY, random.integers(0, new_tokens, rows), random.integers(0, spread + 1, rows)
    )
    key = jax.random.split(jax.random.fold_in(make_key(seed), number), rows)
    return Rows(
        prompts,
        row % len(prompts),
        kind,
        settings,
        (lengths + new_tokens - fewer).astype(np.int32),
        key,
        new_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of a batch: prompt and output of each row, and the start of the output."""

    rows: Rows
    texts: list[list[int]]
    state: DecodeState

    @functools.cached_property
    def new(self) -> list[list[int]]:
        """The new tokens of each row."""
        return [text[start:] for text, start in zip(self.texts, self.rows.lengths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Runner:
    """A decoder with its arrays and processors; every batch runs the same two programs."""

    decoder: Decoder
    params: Params
    processing: Mapping[str, Any]

    def start(self, rows: Rows) -> DecodeState:
        """Reads the prompts."""
        processors = Processors.create(
            len(rows.kind), self.decoder.target.vocab_size, **self.processing
        )
        return self.decoder.prefill(
            self.params,
            rows.tokens,
            rows.lengths,
            limit=rows.limit,
            sampling=rows.sampling,
            key=rows.key,
            processors=processors,
        )

    def run(self, rows: Rows, start: DecodeState | None = None) -> Texts:
        """Decodes a batch; `start` is the state of a batch with the same prompts in the same rows.

        Nothing is donated, because many batches start from one state.
        """
        begun = self.start(rows) if start is None else start
        state = _decode(self.decoder, self.params, begun, rows.limit, rows.sampling, rows.key)
        tokens, ends = to_host((state.tokens, state.length))
        texts = [row[:end].tolist() for row, end in zip(tokens, ends, strict=True)]
        return Texts(rows, texts, state)


@functools.partial(jax.jit, static_argnums=0)
def _decode(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    limit: np.ndarray,
    sampling: Sampling,
    key: Array,
) -> DecodeState:
    """Runs a prefilled batch with these settings."""
    state = dataclasses.replace(
        state, limit=limit, done=state.length >= limit, sampling=sampling, key=key
    )
    # A decoder that never ends a row must not hang the audit.
    return decoder.run(params, state, jnp.int32(decoder.capacity))
