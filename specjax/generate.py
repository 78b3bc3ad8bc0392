"""`generate`: from prompts to text, all at once or streamed piece by piece."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Generator, Iterator
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.call import Call, check
from specjax.logprobs import Logprobs
from specjax.metrics import Summary, summarize
from specjax.models import LanguageModel
from specjax.parallel import to_host
from specjax.programs import Recent
from specjax.request import Options, Prompts, Request, make_request
from specjax.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Output:
    """The new text of each row."""

    text: list[str]  # empty strings if the target has no tokenizer
    tokens: list[list[int]]  # the new tokens, an EOS included
    finish: list[str]  # "eos", "stop" or "limit"
    stats: Summary
    exact: bool  # True if the rule keeps the target's distribution
    logprobs: list[Logprobs] | None = None  # of `tokens`, one per row, if they were requested

    def __str__(self) -> str:
        """The texts, and a line of figures."""
        law = "lossless" if self.exact else "this rule changes the distribution"
        rows = self.text if any(self.text) else list(map(str, self.tokens))
        return "\n".join([*rows, f"[{self.stats}; {law}]"])


class TextStream:
    """An iterator over pieces of text; `output` holds the complete result once it is exhausted.

    For a single prompt a piece is a string; for a list of prompts, a list with one string per row.
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


@overload
def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    stream: Literal[False] = False,
    mesh: Mesh | None = None,
    **options: Unpack[Options],
) -> Output: ...


@overload
def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    stream: Literal[True],
    mesh: Mesh | None = None,
    **options: Unpack[Options],
) -> TextStream: ...


def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    stream: bool = False,
    mesh: Mesh | None = None,
    **options: Any,
) -> Output | TextStream:
    """Continue each prompt with the text that `target` alone would generate, but faster.

    Args:
      target: from `specjax.load`.
      prompts: a text, a list of texts, or a list of token-id lists; they may differ in length.
      stream: return a `TextStream` instead of an `Output`.
      mesh: decode on its devices: rows are split along `data`, and the target's parameters
        along `model`.  A target that was loaded with a mesh needs no mesh here; any other target is
        moved in every call.  The draft is split as it was loaded, or else copied onto each device.
      **options: the fields of `specjax.Request`: how to draft (`draft`, `drafter`, `proposer`,
        `num_drafts`), how to draw tokens (`temperature`, `seed`, ...), and where rows end.

    Returns:
      An `Output`, or a `TextStream` with `stream=True`.

    Raises:
      ValueError: an argument cannot be used.  The message has its name, its value and the fix, and
        comes before anything is compiled.
    """
    return decode(prepared(target, prompts, stream=stream, mesh=mesh, **options))


def prepared(
    target: LanguageModel,
    prompts: Any = None,
    *,
    stream: bool = False,
    mesh: Mesh | None = None,
    **options: Any,
) -> Call:
    """The checked call of `generate` with these arguments, for `decode`."""
    return check(target, make_request(prompts, options), stream, mesh)


def _signature() -> inspect.Signature:
    """The signature of `generate` with every option by name, for `help` and editors."""
    own = list(inspect.signature(generate).parameters.values())[:-1]
    more = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(Request)
        if field.name != "prompts"
    ]
    return inspect.Signature([*own, *more], return_annotation=Output | TextStream)


generate.__signature__ = _signature()  # type: ignore[attr-defined]


def decode(call: Call) -> Output | TextStream:
    """Decode: returns an `Output`, or a `TextStream` if the call has `stream=True`."""
    if call.stream or call.texts.stops:
        pieces = _stream(call)
        return TextStream(pieces, call.single) if call.stream else _exhaust(pieces)
    params, compiled = call.params, compile_first(call)
    started = time.perf_counter()
    state = jax.block_until_ready(call.decoder.run(params, call.prefill()))
    return _output(call, state, time.perf_counter() - started, compiled)


_compiled: Recent[Any, None] = Recent()


def compile_first(call: Call) -> float:
    """Compile what decoding will run, unless a call with the same decoder and shapes came before.

    Returns:
      The seconds that this took; 0.0 if there was such a call.
    """
    inputs = call.prompt, call.sampling, call.processors, call.eos, call.num_drafts
    leaves, structure = jax.tree.flatten(inputs)
    kind = (call.decoder, call.mesh, structure, tuple((x.shape, x.dtype.name) for x in leaves))
    if kind in _compiled:
        _compiled.get(kind, lambda: None)  # used last, as its programs are
        return 0.0
    started = time.perf_counter()
    call.compile()
    _compiled.get(kind, lambda: None)
    return time.perf_counter() - started


def _output(call: Call, state: DecodeState, seconds: float, compiled: float) -> Output:
    text, tokens, finish, ends, lengths = [], [], [], to_host(state.eos), call.lengths
    for row, new in enumerate(_new_tokens(state, lengths)):
        kept, written, stopped = call.texts.cut(row, new)
        text.append(written)
        tokens.append(kept)
        finish.append("stop" if stopped else "eos" if kept and kept[-1] in ends[row] else "limit")
    stats = summarize(to_host(state.stats), sum(map(len, tokens)), seconds, compiled)
    recorded = to_host(state.logprobs)
    logprobs = recorded and [
        recorded.row(row, lengths[row], len(kept)) for row, kept in enumerate(tokens)
    ]
    return Output(text, tokens, finish, stats, call.decoder.rule.exact, logprobs)


def _new_tokens(state: DecodeState, lengths: np.ndarray) -> list[list[int]]:
    tokens, ends = to_host((state.tokens, state.length))
    return [tokens[row, lengths[row] : ends[row]].tolist() for row in range(len(lengths))]


def _stream(call: Call) -> Generator[list[str], None, Output]:
    """Pieces of text as they become certain; the Output is the generator's return value."""
    texts, sent, params = call.texts, [""] * len(call.lengths), call.params
    compiled = compile_first(call)
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
            # The time that the caller spends with a piece does not count as decoding.
            seconds += time.perf_counter() - started
            yield pieces
            started = time.perf_counter()
    return _output(call, state, seconds + time.perf_counter() - started, compiled)


def _exhaust(pieces: Generator[list[str], None, Output]) -> Output:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
