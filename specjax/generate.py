"""Text in, text out: the tokenizer, batches of ragged prompts, stop strings and streaming around a `Decoder`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.contract import Proposer, Rule
from specjax.decoding import Decoder, eos_of_rows
from specjax.drafters import MedusaAdapter, MedusaBank, pair
from specjax.files import quantise
from specjax.logprobs import Logprobs
from specjax.metrics import Summary, summarize
from specjax.models import LanguageModel
from specjax.parallel import lay, mesh_of, row_parts, to_host
from specjax.processors import LogitsProcessor, Processors
from specjax.proposers import MedusaParams, TranslatedSource
from specjax.requests import (
    Prompts,
    bad_word_ids,
    check_length,
    conversations,
    drafts_of,
    encode,
    ends_of,
    pad_rows,
    seeds_of,
)
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.text import Messages, Texts
from specjax.types import DecodeState, Params

_CAPACITY_STEP = 128
_SMALLEST_BUCKET = 16


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
    num_drafts: int | Sequence[int] = 4,
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
      draft: a smaller model, which proposes `num_drafts` tokens a step.  One with another tokenizer proposes what both
        vocabularies hold; a warning says once how much that is.
      draft_dtype: "int8" quantises the draft's weights; the text stays the same.
      proposer: any other proposer, for example `NGram()`, or `EarlyExit(target.model, 2)`; with a draft one that was
        made from it, as `DraftTree(draft.model, target.model.vocab_size)`; what `load_medusa` returns, or a bank of
        such; or "self-int8": the target with its weights in int8 as its own draft.  With neither, plain decoding.
      adapter: which of a bank's adapters, one name, or one or None (plain decoding) a prompt.
      rule: `Match()` by default: the text depends on the seed alone, not on the draft.  `BlockVerification()` accepts
        more at temperature 1 on a chain; `Typical()` and `Threshold()` more still, but are not lossless.
      num_drafts: guesses per step (gamma).  With one value a prompt, the most of them is gamma, and guesses deeper
        than a prompt's own number are dropped, also those of `proposer`; 0 decodes that prompt plainly.
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
      ValueError: what does not fit, and the cure; before anything is compiled.
    """
    for name, model in (("target", target), ("draft", draft)):
        if not isinstance(model, LanguageModel | None):
            raise ValueError(f"{name} is a {type(model).__name__}; pass what specjax.load(folder) returns")
    if mesh is not None:
        target = dataclasses.replace(target, params=lay(target.model, target.params, mesh))
    mesh = mesh_of(target.params)
    if draft_dtype not in (None, "int8") or (draft_dtype and draft is None):
        raise ValueError(f'draft_dtype={draft_dtype!r} with draft={draft and draft.name}; it takes "int8" and a draft')
    if isinstance(proposer, str):
        if proposer != "self-int8" or draft is not None:
            raise ValueError(
                f"proposer={proposer!r} with draft={draft and draft.name}; pass a proposer such as NGram(), or "
                '"self-int8", which takes no draft'
            )
        draft, proposer = quantise(target), None
    elif draft is not None and draft_dtype:
        draft = quantise(draft)
    rule = rule or Match()
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise ValueError("stop contains an empty string, which every text contains; remove it")
    if stops and target.tokenizer is None:
        raise ValueError(f"stop={stops} needs a tokenizer, and {target.name} has none")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; it must be at least 1")
    single = isinstance(prompts, str)
    if messages is not None:
        single = bool(messages) and isinstance(messages[0], Mapping)
        prompts = conversations(target, prompts, messages)
    ids = encode(target, () if prompts is None else prompts)
    proposer, weights = pair(target, draft, proposer, num_drafts, adapter, len(ids))
    padding = -len(ids) % row_parts(mesh)
    if isinstance(weights, MedusaParams):
        weights = dataclasses.replace(weights, adapter=pad_rows(weights.adapter, padding))
    check_length(
        target, None if isinstance(getattr(proposer, "source", None), TranslatedSource) else draft, ids, max_new_tokens
    )
    drafts, ends, seeds = drafts_of(num_drafts, len(ids)), ends_of(target, eos, len(ids)), seeds_of(seed, len(ids))
    settings = target.settings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    processors = Processors.create(
        len(ids),
        target.model.vocab_size,
        repetition_penalty=settings.pop("repetition_penalty"),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        bad_words=bad_word_ids(target, bad_words, ends),
        min_new_tokens=min_new_tokens,
    )
    if np.max(min_new_tokens) > max_new_tokens:
        raise ValueError(f"min_new_tokens={np.max(min_new_tokens)} is more than max_new_tokens={max_new_tokens}")

    lengths = np.array([len(row) for row in ids], np.int32)
    width = _SMALLEST_BUCKET
    while width < lengths.max():
        width *= 2
    # Rounded up, so that other lengths find the compiled programs of these.
    capacity = -(-max(width, int(lengths.max()) + max_new_tokens) // _CAPACITY_STEP) * _CAPACITY_STEP
    decoder = Decoder(target.model, proposer, rule, target.eos, capacity, logits_processor, logprobs)
    sampling = Sampling.create(len(ids), **settings)
    keys = jax.vmap(lambda seed, row: jax.random.fold_in(make_key(seed), row))(*seeds)
    params = Params(target.params, weights)
    prompt = np.zeros((len(ids), width), np.int32)
    for row, found in zip(prompt, ids, strict=True):
        row[: len(found)] = found

    def prefill() -> DecodeState:
        given = {
            "prompt": prompt,
            "prompt_length": lengths,
            "sampling": sampling,
            "key": keys,
            "num_drafts": drafts,
            "processors": processors,
            "eos": eos_of_rows(ends),
        }
        # A row without room is done at once, and counts nowhere.
        limit = pad_rows(lengths, padding) + np.int32(max_new_tokens) * (np.arange(len(ids) + padding) < len(ids))
        return decoder.prefill(params, limit=limit.astype(np.int32), **pad_rows(given, padding))

    texts = Texts(target, [row[-1] for row in ids], stops)
    if stream or stops:
        pieces = _stream(texts, decoder, params, prefill, lengths)
        if stream:
            return TextStream(pieces, single)
        return _exhaust(pieces)
    started = time.perf_counter()
    state = jax.block_until_ready(decoder.run(params, prefill()))
    seconds = time.perf_counter() - started
    return _output(texts, decoder, state, lengths, seconds)


def _output(texts: Texts, decoder: Decoder, state: DecodeState, lengths: np.ndarray, seconds: float) -> Output:
    text, tokens, finish, ends = [], [], [], to_host(state.eos)
    for row, new in enumerate(_new_tokens(state, lengths)):
        kept, written, stopped = texts.cut(row, new)
        text.append(written)
        tokens.append(kept)
        finish.append("stop" if stopped else "eos" if kept and kept[-1] in ends[row] else "limit")
    stats = summarize(to_host(state.stats), sum(map(len, tokens)), seconds)
    found = to_host(state.logprobs)
    logprobs = found and [found.row(row, lengths[row], len(kept)) for row, kept in enumerate(tokens)]
    return Output(text, tokens, finish, stats, decoder.rule.exact, logprobs)


def _new_tokens(state: DecodeState, lengths: np.ndarray) -> list[list[int]]:
    tokens, ends = to_host((state.tokens, state.length))
    return [tokens[row, lengths[row] : ends[row]].tolist() for row in range(len(lengths))]


def _stream(
    texts: Texts, decoder: Decoder, params: Params, prefill: Any, lengths: np.ndarray
) -> Generator[list[str], None, Output]:
    """Pieces of text as they become certain; the Output is the generator's return value."""
    started = time.perf_counter()
    state = prefill()
    sent = [""] * len(lengths)
    states = decoder.stream(params, state)
    stopped = None
    while True:
        try:
            state = states.send(stopped)
        except StopIteration:
            break
        done = to_host(state.done)
        stopped = np.zeros_like(done)
        pieces = []
        for row, new in enumerate(_new_tokens(state, lengths)):
            _, text, stopped[row] = texts.cut(row, new)
            if not (done[row] or stopped[row]):
                text = texts.certain(text)
            pieces.append(text[len(sent[row]) :])
            sent[row] = text
        if any(pieces):
            yield pieces
    return _output(texts, decoder, state, lengths, time.perf_counter() - started)


def _exhaust(pieces: Generator[list[str], None, Output]) -> Output:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
