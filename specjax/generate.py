"""Text in, text out: the tokenizer, batches of ragged prompts, stop strings and streaming around a `Decoder`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint import LanguageModel, vocabulary_digest
from specjax.decoding import Decoder
from specjax.metrics import Summary, summarize
from specjax.proposers import DraftModel, NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.types import DecodeState, Params, Proposer, Rule

_CAPACITY_STEP = 128
_SMALLEST_BUCKET = 16

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Output:
    """New text, a row each."""

    text: list[str]  # empty strings where the target has no tokenizer
    tokens: list[list[int]]  # the new ones; an end-of-text token is among them
    finish: list[str]  # "eos", "stop" or "limit"
    stats: Summary
    exact: bool  # does the rule keep the target's distribution?


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
    prompts: Prompts,
    *,
    draft: LanguageModel | None = None,
    proposer: Proposer | None = None,
    rule: Rule | None = None,
    num_drafts: int = 4,
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | None = (),
    stream: bool = False,
) -> Any:
    """Continue each prompt as `target` alone would, faster.

    Args:
      target: from `specjax.load`.
      prompts: a text, a list of texts, or a list of token-id lists; they may differ in length.
      draft: a smaller model with the same tokenizer, which proposes `num_drafts` tokens a step.
      proposer: instead of `draft`, any proposer that needs no parameters (for example `NGram()`).  With neither,
        plain decoding.
      rule: `Match()` by default: the text depends on the seed alone, not on the draft.  `Rejection()` accepts more at
        temperature 1 on a chain.
      num_drafts: guesses per step (gamma).
      max_new_tokens: per prompt.
      temperature, top_k, top_p, min_p: one value, or one a prompt; 0, 0, 1, 0 switch them off.
      seed: one value in [0, 2^32) (rows then differ by their index), or one a prompt.
      stop: texts at which a row ends; they are not part of the output.
      stream: return a `TextStream` instead.

    Returns:
      An `Output`, or a `TextStream` with `stream=True`.

    Raises:
      ValueError: what does not fit, and the cure; before anything is compiled.
    """
    for name, model in (("target", target), ("draft", draft)):
        if not isinstance(model, LanguageModel | None):
            raise ValueError(f"{name} is a {type(model).__name__}; pass what specjax.load(folder) returns")
    if proposer is not None and draft is not None:
        raise ValueError("pass either draft= or proposer=, not both: a draft is a proposer")
    if isinstance(proposer, DraftModel):
        raise ValueError("a DraftModel comes without its weights: pass the loaded model as draft= instead")
    if draft is not None:
        check_same_tokenizer(target, draft)
        proposer = DraftModel(draft.model, target.model.vocab_size, num_drafts)
    proposer, rule = proposer or NoProposer(), rule or Match()
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise ValueError("stop contains an empty string, which every text contains; remove it")
    if stops and target.tokenizer is None:
        raise ValueError(f"stop={stops} needs a tokenizer, and {target.name} has none")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; it must be at least 1")
    ids = encode(target, prompts)
    _check_length(target, draft, ids, max_new_tokens)
    sampling = Sampling.create(len(ids), temperature, top_k, top_p, min_p)
    keys = _keys(seed, len(ids))

    lengths = np.array([len(row) for row in ids], np.int32)
    width = _SMALLEST_BUCKET
    while width < lengths.max():
        width *= 2
    # Rounded up, so that other lengths find the compiled programs of these.
    capacity = -(-max(width, int(lengths.max()) + max_new_tokens) // _CAPACITY_STEP) * _CAPACITY_STEP
    decoder = Decoder(target.model, proposer, rule, target.eos, capacity)
    params = Params(target.params, draft.params if draft else None)
    prompt = np.zeros((len(ids), width), np.int32)
    for row, found in zip(prompt, ids, strict=True):
        row[: len(found)] = found

    def prefill() -> DecodeState:
        return decoder.prefill(
            params, prompt, lengths, limit=lengths + np.int32(max_new_tokens), sampling=sampling, key=keys
        )

    texts = _Texts(target, [row[-1] for row in ids], stops)
    if stream or stops:
        pieces = _stream(texts, decoder, params, prefill, lengths)
        if stream:
            return TextStream(pieces, isinstance(prompts, str))
        return _exhaust(pieces)
    started = time.perf_counter()
    state = jax.block_until_ready(decoder.run(params, prefill()))
    seconds = time.perf_counter() - started
    return _output(texts, decoder, state, lengths, seconds)


def encode(target: LanguageModel, prompts: Prompts) -> list[list[int]]:
    """Token ids of each prompt.  Raises ValueError for an empty one, or for ids outside the vocabulary."""
    rows: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not rows:
        raise ValueError("prompts is empty; pass at least one prompt")
    encoded = []
    for index, row in enumerate(rows):
        if not isinstance(row, str | Sequence | np.ndarray):
            raise ValueError(f"prompts holds {row!r}; pass a text, a list of texts, or a list of lists of token ids")
        if isinstance(row, str):
            if target.tokenizer is None:
                raise ValueError(f"{target.name} has no tokenizer.json; pass token ids instead of text")
            row = target.tokenizer.encode(row).ids if row else []
        row = [int(token) for token in row]
        if not row:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        if not 0 <= min(row) <= max(row) < target.model.vocab_size:
            raise ValueError(
                f"prompt {index} holds token ids from {min(row)} to {max(row)}; "
                f"the vocabulary of {target.name} has {target.model.vocab_size}"
            )
        encoded.append(row)
    return encoded


def check_same_tokenizer(target: LanguageModel, draft: LanguageModel) -> None:
    """Raises ValueError unless both give the same tokens the same ids (padded vocabulary sizes may differ)."""
    if target.tokenizer is None or draft.tokenizer is None:
        same = target.tokenizer is draft.tokenizer and target.model.vocab_size == draft.model.vocab_size
    else:
        same = vocabulary_digest(target.tokenizer) == vocabulary_digest(draft.tokenizer)
    if not same:

        def describe(m):
            return (
                f"{m.tokenizer.get_vocab_size()} tokens" if m.tokenizer else f"{m.model.vocab_size} ids, no tokenizer"
            )

        raise ValueError(
            f"the draft {draft.name} ({describe(draft)}) has another tokenizer than the target {target.name} "
            f"({describe(target)}); use a draft of the same family, or proposer=NGram()"
        )


def _check_length(target: LanguageModel, draft: LanguageModel | None, ids: list[list[int]], new: int) -> None:
    for model in (target, draft):
        if model is None:
            continue
        most, longest = model.model.max_positions, max(map(len, ids))
        if longest + new > most:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={new} make {longest + new}, but {model.name} reads "
                f"at most {most}: shorten the prompt, or pass max_new_tokens={max(most - longest, 0)} or less"
            )


def _keys(seed: int | Sequence[int], rows: int) -> jax.Array:
    single = np.ndim(seed) == 0
    seeds = [int(s) for s in np.reshape(np.asarray(seed, object), -1)]
    if not single and len(seeds) != rows:
        raise ValueError(f"seed has {len(seeds)} values for {rows} prompts; pass one, or one a prompt")
    for value in seeds:
        if not 0 <= value < 2**32:
            raise ValueError(f"seed={value} is not allowed; it must lie in [0, 2^32)")
    keys = jax.vmap(jax.random.key)(jnp.array(seeds * rows if single else seeds, jnp.uint32))
    return jax.vmap(jax.random.fold_in)(keys, jnp.arange(rows) if single else jnp.zeros(rows, jnp.int32))


class _Texts:
    """Token ids to text, and where a stop string cuts it."""

    def __init__(self, target: LanguageModel, before: list[int], stops: tuple[str, ...]):
        self.target, self.stops = target, stops
        self._before = before  # the last token of each prompt

    def decode(self, row: int, tokens: list[int]) -> str:
        """The text of the new tokens.  Decoded behind the prompt's last one: alone, some lose a leading space."""
        if self.target.tokenizer is None:
            return ""
        before = self.target.tokenizer.decode([self._before[row]])
        whole = self.target.tokenizer.decode([self._before[row], *tokens])
        return whole[len(before) :] if whole.startswith(before) else self.target.tokenizer.decode(tokens)

    def cut(self, row: int, tokens: list[int]) -> tuple[list[int], str, bool]:
        """The fewest tokens whose text contains a stop string, the text before it, and True; or all, and False."""
        text = self.decode(row, tokens)
        if not any(stop in text for stop in self.stops):
            return tokens, text, False
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            found = any(stop in self.decode(row, tokens[:middle]) for stop in self.stops)
            low, high = (low, middle) if found else (middle + 1, high)
        text = self.decode(row, tokens[:low])
        return tokens[:low], text[: min(at for at in map(text.find, self.stops) if at >= 0)], True

    def certain(self, text: str) -> str:
        """What of a growing text cannot change any more: no half character, no beginning of a stop string."""
        text = text.rstrip("\ufffd")
        held = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - held]


def _output(texts: _Texts, decoder: Decoder, state: DecodeState, lengths: np.ndarray, seconds: float) -> Output:
    text, tokens, finish = [], [], []
    for row, new in enumerate(_new_tokens(state, lengths)):
        kept, written, stopped = texts.cut(row, new)
        text.append(written)
        tokens.append(kept)
        finish.append("stop" if stopped else "eos" if kept and kept[-1] in decoder.eos else "limit")
    stats = summarize(jax.device_get(state.stats), sum(map(len, tokens)), seconds)
    return Output(text, tokens, finish, stats, decoder.rule.exact)


def _new_tokens(state: DecodeState, lengths: np.ndarray) -> list[list[int]]:
    tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
    return [tokens[row, lengths[row] : ends[row]].tolist() for row in range(len(lengths))]


def _stream(
    texts: _Texts, decoder: Decoder, params: Params, prefill: Any, lengths: np.ndarray
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
        stopped, done = np.zeros(len(lengths), bool), np.asarray(state.done)
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
