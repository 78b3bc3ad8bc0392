"""Logits processors: what a row wants of its text beyond `Sampling`, and therefore what depends on the text so far.

A node of a proposal stands at the end of a text of its own: prompt, output, and the *path* of guesses from below the
root down to it.  Every processor looks at that text alone, so it is exact at every node of a chain or a tree, and what
a row emits does not depend on how it was guessed.

    logits -> bias -> penalties -> banned phrases -> no early end -> the user's function -> sampling.warp

That is the order of transformers.  What is off is None: another structure, another program, and no cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.arguments import each, hashable, is_count, items, number, per_row, shown
from specjax.types import ABSENT, DecodeState

_LARGEST = float(np.finfo(np.float32).max)

LogitsProcessor = Callable[[Array, Array, Array], Array]
"""A user's function about ONE node: `(logits [V] float32, text [capacity] int32, counts [V] int32) -> logits [V]`.

`text` is prompt, output and path, flush right: `text[-1]` is the token at the node; on the left it is padded with
ABSENT.  `counts` says how often each token stands in output and path.  The function is called under jit and vmap.
"""


@struct.dataclass
class Penalties:
    """Against repetition, per row."""

    repetition: Array  # [B] divides positive logits, multiplies negative ones, of all tokens of the text; 1 is off
    presence: Array  # [B] subtracted once from each token of the output; 0 is off
    frequency: Array  # [B] subtracted as often as a token stands in the output; 0 is off
    in_prompt: Any = None  # [B, V] bool, once begun


@struct.dataclass
class Processors:
    """Settings of every row, and what they remember of its text.  Law: axis 0 of every leaf is the row."""

    penalties: Penalties | None = None
    bias: Array | None = None  # [B, V] added to the logits; -inf bans a token
    phrases: Array | None = (
        None  # [B, W, K] banned token sequences, flush right, padded with ABSENT on the left
    )
    min_length: Array | None = None  # [B] of prompt and output; no end of text before it
    counts: Array | None = None  # [B, V] int32; how often each token stands in the output

    @classmethod
    def create(
        cls,
        batch: int,
        vocab_size: int,
        *,
        repetition_penalty: Any = 1.0,
        presence_penalty: Any = 0.0,
        frequency_penalty: Any = 0.0,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        min_new_tokens: Any = 0,
        every: bool = False,
    ) -> Processors | None:
        """Settings for `batch` rows, still on the host; None where all are off.

        Args:
          batch: B.
          vocab_size: V, of the target.
          repetition_penalty: of prompt and output (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
          presence_penalty, frequency_penalty: of the output alone, as in OpenAI's API.
          logit_bias: {token id: what is added}, for all rows or one a row; -inf bans.
          bad_words: token sequences that no row may write: the last token of each is banned behind the others.
          min_new_tokens: a row does not end before it has so many.
          every: keep also what is off, so that rows of all kinds fit into one batch (`Decoder.insert`).

        Raises:
          ValueError: a value outside its range, or a token outside the vocabulary.
        """

        def number(name, value, accept, wanted, dtype: Any = np.float32):
            return per_row(name, value, batch, dtype, accept, wanted)

        repetition = number(
            "repetition_penalty", repetition_penalty, lambda v: v > 0, "above 0; 1 switches it off"
        )
        presence = number(
            "presence_penalty", presence_penalty, lambda v: True, "finite; 0 switches it off"
        )
        frequency = number(
            "frequency_penalty", frequency_penalty, lambda v: True, "finite; 0 switches it off"
        )
        least = number(
            "min_new_tokens",
            min_new_tokens,
            is_count,
            "a whole number, 0 (off) or greater",
            np.int32,
        )
        words = [tokens_of("bad_words", word, vocab_size) for word in word_list(bad_words)]
        if [] in words:
            raise ValueError(
                "bad_words holds an empty sequence, which every text contains; remove it"
            )
        bias = _biases(batch, vocab_size, logit_bias, [word[0] for word in words if len(word) == 1])
        phrases: Any = np.tile(
            _flush_right([word for word in words if len(word) > 1]), (batch, 1, 1)
        )

        def needed(default, *settings):
            return every or any((setting != default).any() for setting in settings)

        punished = needed(1, repetition) or needed(0, presence, frequency)
        made = cls(
            penalties=Penalties(repetition, presence, frequency) if punished else None,
            bias=bias if needed(0, bias) else None,
            phrases=phrases if needed(ABSENT, phrases) else None,
            min_length=least if needed(0, least) else None,
        )
        return made if jax.tree.leaves(made) else None

    def begin(
        self, prompt: Array, prompt_length: Array, vocab_size: int, counted: bool
    ) -> Processors:
        """What `prefill` adds: the memory of each row.  `counted` keeps counts for a user's function too."""
        made, rows = self, len(prompt)
        if self.penalties is not None:
            tokens = jnp.where(
                jnp.arange(prompt.shape[1]) < prompt_length[:, None], prompt, vocab_size
            )
            in_prompt = (
                jnp.zeros((rows, vocab_size), bool)
                .at[jnp.arange(rows)[:, None], tokens]
                .set(True, mode="drop")
            )
            made = dataclasses.replace(
                made, penalties=dataclasses.replace(self.penalties, in_prompt=in_prompt)
            )
        if self.min_length is not None:
            made = dataclasses.replace(made, min_length=self.min_length + prompt_length)
        if counted or self.penalties is not None:
            made = dataclasses.replace(made, counts=jnp.zeros((rows, vocab_size), jnp.int32))
        return made

    def observe(self, emitted: Array, count: Array) -> Processors:
        """Count what was emitted: of `emitted` [B, T] the first `count` [B]."""
        if self.counts is None:
            return self
        tokens = jnp.where(jnp.arange(emitted.shape[1]) < count[:, None], emitted, ABSENT)
        return dataclasses.replace(self, counts=_count(self.counts, tokens))


def word_list(bad_words: Any) -> list[Any]:
    """The entries of `bad_words`.  Raises ValueError where it is no list, such as a text alone."""
    found = items(bad_words)
    if found is None:
        raise ValueError(
            f"bad_words={shown(bad_words)} is not allowed; pass a list of texts or of token-id lists"
        )
    return found


def process(
    state: DecodeState,
    logits: Array,
    path: Array | None = None,
    function: LogitsProcessor | None = None,
    window: int = 0,
) -> Array:
    """Logits [B, M, V] of M nodes, processed: float32.

    Args:
      state: of the rows, with `processors` that have begun.
      logits: after each node.
      path: [B, M, D] tokens from below the root to each node, padded with ABSENT on the right; None: all at the root.
      function: a user's, the last to be applied.
      window: how much of the text it sees, the decoder's capacity.
    """
    processors, x = state.processors, jnp.asarray(logits, jnp.float32)
    path = jnp.full((*logits.shape[:2], 0), ABSENT) if path is None else path
    if processors.bias is not None:
        x = x + processors.bias[:, None]
    if processors.penalties is not None:
        x = _penalise(x, processors.penalties, processors.counts, path)
    if processors.phrases is not None:
        x = _ban_phrases(
            x, processors.phrases, _text(state, path, processors.phrases.shape[-1] - 1)
        )
    if processors.min_length is not None:
        early = state.length[:, None] + (path >= 0).sum(-1) < processors.min_length[:, None]
        end = (state.eos[..., None] == jnp.arange(x.shape[-1])).any(1)
        x = jnp.where(early[..., None] & end[:, None], -jnp.inf, x)
    if function is not None:
        counts = _count(jnp.repeat(processors.counts[:, None], x.shape[1], axis=1), path)
        x = jax.vmap(jax.vmap(function))(x, _text(state, path, window), counts).astype(jnp.float32)
    return x


def check_function(function: LogitsProcessor, vocab_size: int, capacity: int) -> None:
    """Trace a user's function, without running or compiling it.  Raises ValueError unless it maps [V] to [V]."""
    shapes = [((vocab_size,), jnp.float32), ((capacity,), jnp.int32), ((vocab_size,), jnp.int32)]
    wanted = "pass a JAX function (logits [V], text [capacity], counts [V]) -> logits [V]"
    hashable("logits_processor", function)
    try:
        out = jax.eval_shape(function, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    except Exception as error:  # whatever a user's function may raise
        raise ValueError(
            f"logits_processor={shown(function)} cannot be traced ({type(error).__name__}: {error}); {wanted}"
        ) from error
    found = out.shape if isinstance(out, jax.ShapeDtypeStruct) else type(out).__name__
    if found != (vocab_size,):
        raise ValueError(
            f"logits_processor returns {found} for logits of shape ({vocab_size},), but it must return as many logits: "
            "it is about one node, and specjax maps it over nodes and rows"
        )


def _penalise(logits: Array, penalties: Penalties, counts: Array, path: Array) -> Array:
    """By the counts of the row, and then again where the path adds to them: no counts [B, M, V] are ever made."""

    def punish(x, seen, count):
        repetition, presence, frequency = (
            of[:, None, None]
            for of in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        # One division: a product would be contracted with the subtraction behind it, as in `_halves`.
        divided = x / jnp.where(x < 0, 1 / repetition, repetition)
        x = jnp.where(seen | (count > 0), divided, x)
        high, low = _halves(frequency)
        return x - high * count - low * count - jnp.where(count > 0, presence, 0)

    punished = punish(logits, penalties.in_prompt[:, None], counts[:, None])
    if path.shape[-1] == 0:
        return punished
    at = jnp.maximum(path, 0)
    on_path = (path[..., :, None] == path[..., None, :]).sum(-1, dtype=jnp.int32)
    count = counts[jnp.arange(len(counts))[:, None, None], at] + on_path
    again = punish(jnp.take_along_axis(logits, at, axis=2), True, count)
    return punished.at[*_places(path, logits.shape[-1])].set(again, mode="drop")


def _halves(x: Array) -> tuple[Array, Array]:
    """x = high + low, of 12 significant bits each: either times a count up to 4096 is exact.

    XLA contracts a product and the subtraction behind it into one rounding in some programs and
    not in others.  Where the product is exact, both give the same bits.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high


def _ban_phrases(logits: Array, phrases: Array, text: Array) -> Array:
    """Where `text` [B, M, K - 1] ends with all of a phrase but its last token, that token is banned."""
    before, last = phrases[:, None, :, :-1], phrases[:, None, :, -1]
    meets = ((before == ABSENT) | (before == text[:, :, None])).all(-1)
    return logits.at[*_places(jnp.where(meets, last, ABSENT), logits.shape[-1])].set(
        -jnp.inf, mode="drop"
    )


def _text(state: DecodeState, path: Array, window: int) -> Array:
    """[B, M, D] -> [B, M, window] the last tokens up to each node, flush right, padded with ABSENT."""
    slot = state.length[:, None] - window + jnp.arange(window)
    tail = jnp.where(
        slot >= 0, jnp.take_along_axis(state.tokens, jnp.maximum(slot, 0), axis=1), ABSENT
    )
    text = jnp.concatenate([jnp.repeat(tail[:, None], path.shape[1], axis=1), path], axis=-1)
    return jnp.take_along_axis(text, (path >= 0).sum(-1)[..., None] + jnp.arange(window), axis=2)


def _count(counts: Array, tokens: Array) -> Array:
    """Counts [..., V] and tokens [..., T], padded with ABSENT -> counts [..., V]."""
    return counts.at[*_places(tokens, counts.shape[-1])].add(1, mode="drop")


def _places(tokens: Array, size: int) -> tuple[Array, ...]:
    """Where [..., T] tokens stand in an array [..., V]; what is ABSENT lies beyond it, to be dropped."""
    lead = jnp.indices(tokens.shape, sparse=True)[:-1]
    return *lead, jnp.where(tokens < 0, size, tokens)


def _biases(batch: int, vocab_size: int, biases: Any, banned: list[int]) -> Any:
    """[batch, V] float32: what is added to the logits."""
    found = np.zeros((batch, vocab_size), np.float32)
    for row, bias in zip(
        found, each("logit_bias", {} if biases is None else biases, batch, "row"), strict=True
    ):
        if not isinstance(bias, Mapping):
            raise ValueError(
                f"logit_bias={shown(bias)} is not allowed; it must be {{token id: what is added to its logit}}, "
                "or a list of such, one a row"
            )
        for token, value in zip(
            tokens_of("logit_bias", list(bias), vocab_size), bias.values(), strict=True
        ):
            added = number(value)
            if added is None or not (added == -math.inf or abs(added) <= _LARGEST):
                raise ValueError(
                    f"logit_bias={{{token}: {shown(value)}}} is not allowed; it must be finite, or -inf to ban"
                )
            row[token] = added
    found[:, banned] = -np.inf
    return found


def _flush_right(words: list[list[int]]) -> Any:
    """[W, K] padded with ABSENT on the left, and to powers of two: another list of words rarely compiles."""
    width, count = max(map(len, words), default=2), max(len(words), 1)
    found = np.full((max(4, _power_of_two(count)), max(4, _power_of_two(width))), ABSENT, np.int32)
    for row, word in zip(found, words, strict=False):
        row[-len(word) :] = word
    return found


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tokens_of(name: str, tokens: Any, vocab_size: int) -> list[int]:
    """A list of token ids.  Raises ValueError, with the name of the argument, for what is none."""
    found = items(tokens)
    if found is None:
        raise ValueError(f"{name} holds {shown(tokens)}; pass a list of texts or of token-id lists")
    made = []
    for token in found:
        known = number(token)
        if not isinstance(known, int) or not 0 <= known < vocab_size:
            raise ValueError(
                f"{name} holds the token {shown(token)}; the vocabulary has 0 to {vocab_size - 1}"
            )
        made.append(known)
    return made
