"""Text in, text out: a checked call is decoded at once, or streamed piece by piece."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.drafters import MedusaAdapter, MedusaBank
from specjax.logprobs import Logprobs
from specjax.metrics import Summary, summarize
from specjax.models import LanguageModel
from specjax.parallel import to_host
from specjax.processors import LogitsProcessor
from specjax.requests import Call, Prompts, check
from specjax.text import Messages
from specjax.types import DecodeState, Proposer, Rule


@dataclasses.dataclass(frozen=True)
class Output:
    """New text, a row each."""

    text: list[str]  # empty strings where the target has no tokenizer
    tokens: list[list[int]]  # the new ones; an end-of-text token is among them
    finish: list[str]  # "eos", "stop" or "limit"
    stats: Summary
    exact: bool  # does the rule keep the target's distribution?
    logprobs: list[Logprobs] | None = None  # a row each, of `tokens`, where they were asked for


class TextStream:
    """An iterator over pieces of text; `output` holds the whole once it is exhausted.

    For a single prompt a piece is a string; for a list of prompts, a list with a string a row.
    """

    def __init__(self, pieces: Generator[list[str], None, Output], single: bool):
        self._pieces, self._single = pieces, single
        self.output: Output | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            piece = next(self._pieces)
        except StopIteration as end:
            self.output = end.value if end.value is not None else self.output
            raise StopIteration from None
        return piece[0] if self._single else piece


def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    messages: Messages | Sequence[Messages] | None = None,
    draft: LanguageModel | None = None,
    draft_dtype: Literal["int8"] | None = None,
    proposer: Proposer | MedusaAdapter | MedusaBank | Literal["self-int8"] | None = None,
    adapter: str | Sequence[str | None] | None = None,
    rule: Rule | None = None,
    num_drafts: int | Sequence[int] | None = None,
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    min_p: float | Sequence[float] | None = None,
    repetition_penalty: float | Sequence[float] | None = None,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
    bad_words: Sequence[str | Sequence[int]] = (),
    logits_processor: LogitsProcessor | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    eos: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | None = (),
    logprobs: int | None = None,
    stream: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Continue each prompt as `target` alone would, faster.

    Args:
      target: from `specjax.load`.
      prompts: a text, a list of texts, or a list of token-id lists; they may differ in length.
      messages: instead of `prompts`, a conversation [{"role": "user", "content": "..."}, ...], or a list of them,
        written out by the tokenizer's own chat template; the output is the assistant's turn.
      draft: a smaller model, which proposes a chain of `num_drafts` tokens a step.  One with another
        tokenizer proposes what both vocabularies hold; a warning says once how much that is.
      draft_dtype: "int8" quantises the draft's weights; the text stays the same.
      proposer: any other proposer, for example `NGram()`, or `EarlyExit(target.model, 2)`; with a draft one that was
        made from it, as `DraftTree(draft.model, target.model.vocab_size)`; what `load_medusa` returns, or a bank of
        such, also as a part of a `FirstOf`; or "self-int8": the target with its weights in int8 as
        its own draft.  With neither, plain decoding.
      adapter: which of a bank's adapters, one name, or one or None (plain decoding) a prompt.
      rule: `Match()` by default: the text depends on the seed alone, not on the draft.  `BlockVerification()` accepts
        more at temperature 1 on a chain; `Typical()` and `Threshold()` more still, but are not lossless.
      num_drafts: guesses are at most so deep (gamma); one value, or one a prompt; 0 decodes plainly.
        A draft alone guesses as deep as the greatest value, by default 4.  A `proposer` has a depth of
        its own: deeper guesses are dropped, a greater value changes nothing, and None drops nothing.
      max_new_tokens: per prompt.
      temperature, top_k, top_p, min_p: one value, or one a prompt; 0, 0, 1, 0 switch them off.  None: the target's own
        default (`generation_config.json`), or off.
      repetition_penalty: of the tokens of prompt and output: above 1 discourages them, 1 is off; None as above.
      presence_penalty, frequency_penalty: subtracted from the logits of the tokens of the output, once and as often as
        they stand there; 0 is off.
      logit_bias: {token id: what is added to its logit}, for all rows or one a prompt; -inf bans it.
      bad_words: texts, or token-id lists, that are not written.  A text stands for its tokens at the beginning of a
        text and after a space; other spellings have other tokens.
      logits_processor: your own JAX function `(logits [V], text, counts [V]) -> logits [V]` of one node, applied after
        all of these: see `specjax.processors.LogitsProcessor`.  Another function is another compilation.
      min_new_tokens: no end of text before so many; one value, or one a prompt.
      eos: token ids that end a row instead of the target's own, for all rows or a list a prompt; [] for none.
      seed: one value in [0, 2^32) (rows then differ by their index), or one a prompt.
      stop: texts at which a row ends; they are not part of the output.
      logprobs: record the log-probability of each token, and of so many most probable ones, in `Output.logprobs`.
      stream: return a `TextStream` instead.
      mesh: decode on its devices: rows are split along `data`, and the target's parameters along `model`.  A target
        that was loaded with a mesh asks for nothing here; another one is moved in every call.  The draft is split as it
        was loaded, or else copied onto each device.

    Returns:
      An `Output`, or a `TextStream` with `stream=True`.

    Raises:
      ValueError: an argument that cannot be used, by name, with its value and the cure; before
        anything is compiled.
    """
    return decode(check(**locals()))


def prepared(*given: Any, **options: Any) -> Call:
    """The call `generate(*given, **options)`, checked and not yet decoded: `decode` does that."""
    asked = inspect.signature(generate).bind(*given, **options)
    asked.apply_defaults()
    return check(**asked.arguments)


def decode(call: Call) -> Any:
    """An `Output`, or a `TextStream` of a call that asks for one."""
    if call.stream or call.texts.stops:
        pieces = _stream(call)
        return TextStream(pieces, call.single) if call.stream else _exhaust(pieces)
    params, started = call.params, time.perf_counter()
    state = jax.block_until_ready(call.decoder.run(params, call.prefill()))
    return _output(call, state, time.perf_counter() - started)


def _output(call: Call, state: DecodeState, seconds: float) -> Output:
    text, tokens, finish, ends, lengths = [], [], [], to_host(state.eos), call.lengths
    for row, new in enumerate(_new_tokens(state, lengths)):
        kept, written, stopped = call.texts.cut(row, new)
        text.append(written)
        tokens.append(kept)
        finish.append("stop" if stopped else "eos" if kept and kept[-1] in ends[row] else "limit")
    stats = summarize(to_host(state.stats), sum(map(len, tokens)), seconds)
    found = to_host(state.logprobs)
    logprobs = found and [found.row(row, lengths[row], len(kept)) for row, kept in enumerate(tokens)]
    return Output(text, tokens, finish, stats, call.decoder.rule.exact, logprobs)


def _new_tokens(state: DecodeState, lengths: np.ndarray) -> list[list[int]]:
    tokens, ends = to_host((state.tokens, state.length))
    return [tokens[row, lengths[row] : ends[row]].tolist() for row in range(len(lengths))]


def _stream(call: Call) -> Generator[list[str], None, Output]:
    """Pieces of text as they become certain; the Output is the generator's return value."""
    texts, sent, params = call.texts, [""] * len(call.lengths), call.params
    seconds, started = 0.0, time.perf_counter()
    state = call.prefill()
    states = call.decoder.stream(params, state)
    stopped = None
    while True:
        try:
            state = states.send(stopped)
        except StopIteration:
            break
        done = to_host(state.done)
        stopped = np.zeros_like(done)
        pieces = []
        for row, new in enumerate(_new_tokens(state, call.lengths)):
            _, text, stopped[row] = texts.cut(row, new)
            if not (done[row] or stopped[row]):
                text = texts.certain(text)
            pieces.append(text[len(sent[row]) :])
            sent[row] = text
        if any(pieces):
            # What the reader of a piece does with it is no time of decoding.
            seconds += time.perf_counter() - started
            yield pieces
            started = time.perf_counter()
    return _output(call, state, seconds + time.perf_counter() - started)


def _exhaust(pieces: Generator[list[str], None, Output]) -> Output:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
