"""Logits processors: settings of a row that depend on its text, such as penalties and banned words.

The text of a node is the prompt, the output, and the *path* of drafts from below the root to the
node.  Every processor reads that text only, so it is exact at every node of a chain or a tree, and
the emitted text does not depend on the drafts.

    logits -> bias -> penalties -> banned phrases -> min length -> user's function -> constraint
    -> sampling.warp

That is the order of transformers.  A processor that is off is None and costs nothing: a state
without it has another structure than a state with it, so each has a compiled program of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.bit_masks import keep_packed
from specjax._internal.checks import (
    each,
    is_count,
    listed,
    number,
    per_row,
    shown,
    tokens_of,
    typed,
)
from specjax._internal.control_flow import apply_if
from specjax._internal.platforms import on_cpu
from specjax.constraints import Automata, Automaton
from specjax.types import ABSENT, DecodeState

_LARGEST = float(np.finfo(np.float32).max)

LogitsProcessor = Callable[[Array, Array, Array], Array]
"""A user's function about ONE node, called under jit and vmap:
`(logits [V] float32, text [capacity] int32, counts [V] int32) -> logits [V]`.

`text` is prompt, output and path, padded on the left with ABSENT: `text[-1]` is the token at the
node.  `counts` says how often each token occurs in output and path.
"""

_Host = Array | np.ndarray  # settings are NumPy arrays on the host until `prefill`
_Numbers = float | Sequence[float] | np.ndarray | Array


@struct.dataclass
class Penalties:
    """Penalties against repetition, per row."""

    # [B] divides positive logits and multiplies negative ones of all tokens of the text; 1 is off.
    repetition: _Host
    presence: _Host  # [B] subtracted once from each token of the output; 0 is off
    frequency: _Host  # [B] subtracted as often as a token occurs in the output; 0 is off
    in_prompt: Array | None = None  # [B, V] bool; `begin` fills it


@struct.dataclass
class Processors:
    """Processors of every row, and the counts of its tokens.  Axis 0 of every leaf is the row."""

    penalties: Penalties | None = None
    bias: _Host | None = None  # [B, V] added to the logits; -inf bans a token
    phrases: _Host | None = None  # [B, W, K] banned token sequences, padded on the left with ABSENT
    min_length: _Host | None = None  # [B] of prompt and output; no EOS before it
    counts: Array | None = None  # [B, V] int32; how often each token occurs in the output
    automata: Automata | None = None  # what each row may write
    # [B, N, W] uint32, the packed bits of what may follow each node of a proposal, where the host
    # says so (`guided`); only while that proposal is verified.
    masks: _Host | None = None
    # [B] bool: whether any setting of the row is on; None: unknown, so any row's may be.
    used: _Host | None = None

    @classmethod
    def create(
        cls,
        batch: int,
        vocab_size: int,
        *,
        repetition_penalty: _Numbers = 1.0,
        presence_penalty: _Numbers = 0.0,
        frequency_penalty: _Numbers = 0.0,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        min_new_tokens: _Numbers = 0,
        constraint: Automaton | Sequence[Automaton | None] | None = None,
        constraint_size: tuple[int, int] | None = None,
        every: bool = False,
    ) -> Processors | None:
        """Makes the settings for `batch` rows, still on the host; None where all are off.

        Args:
          batch: B.
          vocab_size: V, of the target.
          repetition_penalty: on the tokens of prompt and output (Keskar et al. 2019, arXiv
            1909.05858, section 4.1).
          presence_penalty, frequency_penalty: on the tokens of the output, as in OpenAI's API.
          logit_bias: {token id: number to add to its logit}, for all rows or one per row; -inf
            bans.
          bad_words: token sequences that no row may emit: the last token of each is banned after
            the others.
          min_new_tokens: EOS is banned until a row has this many new tokens.
          constraint: the texts that a row may emit, for all rows or one per row; None allows all.
          constraint_size: states and classes of padded tables, as in `Automata.of_rows`.
          every: keep the arrays of settings that are off, so that any row can be put into any
            batch (`Decoder.insert`).

        Raises:
          ValueError: a value outside its range, or a token outside the vocabulary.

        Example:
          >>> Processors.create(1, 8, logit_bias={3: 2.0}).bias[0, 3]
          np.float32(2.0)
        """

        def number(
            name: str,
            value: _Numbers,
            accept: Callable[[float], bool],
            wanted: str,
            dtype: type[np.integer] | type[np.floating] = np.float32,
        ) -> np.ndarray:
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
        padded = _pad_left([word for word in words if len(word) > 1])
        phrases = np.tile(padded, (batch, 1, 1))

        def needed(default: float, *settings: np.ndarray) -> bool:
            return every or any(bool((setting != default).any()) for setting in settings)

        penalised = needed(1, repetition) or needed(0, presence, frequency)
        automata = each("constraint", constraint, batch, "row")
        confined = constraint_size is not None or any(one is not None for one in automata)
        made = cls(
            penalties=Penalties(repetition, presence, frequency) if penalised else None,
            bias=bias if needed(0, bias) else None,
            phrases=phrases if needed(ABSENT, phrases) else None,
            min_length=least if needed(0, least) else None,
            automata=Automata.of_rows(automata, vocab_size, constraint_size) if confined else None,
        )
        if every:
            on = (repetition != 1) | (presence != 0) | (frequency != 0) | (least > 0)
            on = on | (bias != 0).any(1) | (phrases != ABSENT).any((1, 2))
            on = on | np.array([automaton is not None for automaton in automata])
            made = dataclasses.replace(made, used=on)
        return made if jax.tree.leaves(made) else None

    def begin(
        self,
        prompt: Array,
        prompt_length: Array,
        vocab_size: int,
        counted: bool,
        eos: Array | None = None,
    ) -> Processors:
        """Returns the settings with the arrays that depend on the prompts, for `prefill`.

        Args:
          prompt: [B, P] int32.
          prompt_length: [B] int32.
          vocab_size: V.
          counted: count tokens even without penalties, for a user's function.
          eos: [B, ids] int32; the tokens that end each row, for a constraint.
        """
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
        if self.automata is not None and eos is not None:
            made = dataclasses.replace(made, automata=self.automata.begin(eos))
        return made

    def observe(self, emitted: Array, count: Array) -> Processors:
        """Returns the state after the first `count` [B] of the tokens `emitted` [B, T]."""
        made = self
        if self.automata is not None:
            made = dataclasses.replace(made, automata=self.automata.observe(emitted, count))
        if self.counts is None:
            return made
        tokens = jnp.where(jnp.arange(emitted.shape[1]) < count[:, None], emitted, ABSENT)
        return dataclasses.replace(made, counts=_count(self.counts, tokens))


def word_list(bad_words: object) -> list[Any]:
    """Returns the entries of `bad_words`, or raises ValueError if it is not a list."""
    return listed("bad_words", bad_words, "a list of texts or of token-id lists")


def process(
    state: DecodeState,
    logits: Array,
    path: Array | None = None,
    function: LogitsProcessor | None = None,
    window: int = 0,
) -> Array:
    """Applies the processors to the logits [B, M, V] of M nodes; the result is float32.

    Args:
      state: of the rows; `Processors.begin` was called on its `processors`.
      logits: after each node.
      path: [B, M, D] tokens from below the root to each node, padded on the right with ABSENT;
        None: every node is the root.
      function: the user's function, applied after all but the constraint.
      window: the length of the text that `function` gets; it is the decoder's capacity.
    """
    processors: Processors = state.processors
    x = jnp.asarray(logits, jnp.float32)
    path = jnp.full((*logits.shape[:2], 0), ABSENT) if path is None else path
    apply = functools.partial(_process, state, path, function, window)
    if processors.used is None or processors.masks is not None or function is not None:
        return apply(x)
    # A setting that is off changes no number.  On an accelerator it costs less than to ask.
    wanted = jnp.any(processors.used & ~state.done)
    return on_cpu(lambda x: apply_if(wanted, apply, x), apply, x)


def _process(
    state: DecodeState, path: Array, function: LogitsProcessor | None, window: int, x: Array
) -> Array:
    """Applies all processors to logits [B, M, V] in float32."""
    processors: Processors = state.processors
    if processors.bias is not None:
        x = x + processors.bias[:, None]
    if processors.penalties is not None:
        assert processors.counts is not None  # `begin` made them
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
        assert processors.counts is not None
        counts = _count(jnp.repeat(processors.counts[:, None], x.shape[1], axis=1), path)
        x = jax.vmap(jax.vmap(function))(x, _text(state, path, window), counts).astype(jnp.float32)
    if processors.automata is not None:
        least = 0 if processors.min_length is None else processors.min_length
        x = processors.automata.allow(x, path, state.length, state.limit, least)
    if processors.masks is not None:
        # A pass over fewer nodes reads the first ones.
        x = keep_packed(x, jnp.asarray(processors.masks[:, : x.shape[1]]))
    return x


def forced_tokens(state: DecodeState) -> Callable[[int], tuple[Array, Array]] | None:
    """Returns the tokens that the rows' constraints force, as `Context.forced`."""
    processors: Processors | None = state.processors
    if processors is None or processors.automata is None:
        return None
    return functools.partial(processors.automata.drafts, eos=state.eos)


def _penalise(logits: Array, penalties: Penalties, counts: Array, path: Array) -> Array:
    """Penalises by the counts of the row, then redoes the tokens of the path with their own counts.

    This avoids an array of counts [B, M, V].
    """

    def penalise(x: Array, seen: Array | bool, count: Array) -> Array:
        repetition, presence, frequency = (
            of[:, None, None]
            for of in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        # A division, because XLA would fuse a product with the subtraction below: see `_halves`.
        divided = x / jnp.where(x < 0, 1 / repetition, repetition)
        x = jnp.where(seen | (count > 0), divided, x)
        high, low = _halves(jnp.asarray(frequency))
        return x - high * count - low * count - jnp.where(count > 0, presence, 0)

    assert penalties.in_prompt is not None  # `begin` made it
    penalised = penalise(logits, penalties.in_prompt[:, None], counts[:, None])
    if path.shape[-1] == 0:
        return penalised
    at = jnp.maximum(path, 0)
    on_path = (path[..., :, None] == path[..., None, :]).sum(-1, dtype=jnp.int32)
    count = counts[jnp.arange(len(counts))[:, None, None], at] + on_path
    again = penalise(jnp.take_along_axis(logits, at, axis=2), True, count)
    return penalised.at[*_index(path, logits.shape[-1])].set(again, mode="drop")


def _halves(x: Array) -> tuple[Array, Array]:
    """Splits x = high + low, 12 significant bits each: products with counts up to 4096 are exact.

    XLA rounds a product and the subtraction after it once in some programs and twice in others.  If
    the product is exact, both roundings give the same bits.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high


def _ban_phrases(logits: Array, phrases: _Host, text: Array) -> Array:
    """Bans the last token of a phrase where `text` [B, M, K - 1] ends with all tokens before it."""
    before, last = phrases[:, None, :, :-1], phrases[:, None, :, -1]
    meets = ((before == ABSENT) | (before == text[:, :, None])).all(-1)
    return logits.at[*_index(jnp.where(meets, last, ABSENT), logits.shape[-1])].set(
        -jnp.inf, mode="drop"
    )


def _text(state: DecodeState, path: Array, window: int) -> Array:
    """[B, M, D] -> [B, M, window] the last tokens up to each node, left-padded with ABSENT."""
    slot = state.length[:, None] - window + jnp.arange(window)
    tail = jnp.where(
        slot >= 0, jnp.take_along_axis(state.tokens, jnp.maximum(slot, 0), axis=1), ABSENT
    )
    text = jnp.concatenate([jnp.repeat(tail[:, None], path.shape[1], axis=1), path], axis=-1)
    return jnp.take_along_axis(text, (path >= 0).sum(-1)[..., None] + jnp.arange(window), axis=2)


def _count(counts: Array, tokens: Array) -> Array:
    """Counts [..., V] and tokens [..., T], padded with ABSENT -> counts [..., V]."""
    return counts.at[*_index(tokens, counts.shape[-1])].add(1, mode="drop")


def _index(tokens: Array, size: int) -> tuple[Array, ...]:
    """Indices of tokens [..., T] in an array [..., V]; ABSENT is out of bounds, to be dropped."""
    lead = jnp.indices(tokens.shape, sparse=True)[:-1]
    return *lead, jnp.where(tokens < 0, size, tokens)


def _biases(
    batch: int,
    vocab_size: int,
    biases: Mapping[int, float] | Sequence[Mapping[int, float]] | None,
    banned: list[int],
) -> np.ndarray:
    """Returns [batch, V] float32 numbers to add to the logits."""
    rows = np.zeros((batch, vocab_size), np.float32)
    of_rows = each("logit_bias", {} if biases is None else biases, batch, "row")
    for row, bias in zip(rows, of_rows, strict=True):
        cure = "{token id: number to add to its logit}, or a list of them, one per row"
        typed(cure, Mapping, logit_bias=bias)
        for token, value in zip(
            tokens_of("logit_bias", list(bias), vocab_size), bias.values(), strict=True
        ):
            added = number(value)
            if added is None or not (added == -math.inf or abs(added) <= _LARGEST):
                raise ValueError(
                    f"logit_bias={{{token}: {shown(value)}}} is not allowed; "
                    "it must be finite, or -inf to ban"
                )
            row[token] = added
    rows[:, banned] = -np.inf
    return rows


def _pad_left(words: list[list[int]]) -> np.ndarray:
    """Returns [W, K] padded on the left with ABSENT.

    Sizes are rounded up to powers of two, so that few programs are compiled.
    """
    width, count = max(map(len, words), default=2), max(len(words), 1)
    shape = max(4, _power_of_two(count)), max(4, _power_of_two(width))
    padded = np.full(shape, ABSENT, np.int32)
    for row, word in zip(padded, words, strict=False):
        row[-len(word) :] = word
    return padded


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
