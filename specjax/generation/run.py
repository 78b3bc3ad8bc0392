"""`generate`: from prompts to text, all at once or streamed piece by piece.

Request -> prepare -> Prepared -> warm_up -> Ready -> decode -> Output
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.decoding import Logprobs, Summary, summarize
from specjax.generation.prepared import Prepared, prepare
from specjax.generation.request import Options, Prompts, Request, load_named, make_request
from specjax.generation.warmup import Ready, count, warm_up
from specjax.models import LanguageModel
from specjax.overlap import OverlapState
from specjax.parallel import to_host
from specjax.proposers import Adaptive
from specjax.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options of an adaptive drafter, and how often each was chosen."""

    options: tuple[tuple[str, int], ...]  # as `Adaptive.options`
    seconds: np.ndarray  # [O] of a step with each of them
    spent: float  # seconds of the measurement, in the first call of the structure

    def __str__(self) -> str:
        each = (
            f"{name} of {depth}: {1e3 * seconds:.2f} ms" if depth else f"{1e3 * seconds:.2f} ms"
            for (name, depth), seconds in zip(self.options, self.seconds, strict=True)
        )
        return f"plain {', '.join(each)}"


@dataclasses.dataclass(frozen=True)
class Output:
    """The new text of each row."""

    text: list[str]  # empty strings if the target has no tokenizer
    tokens: list[list[int]]  # the new tokens, an EOS included
    finish: list[str]  # "eos", "stop" or "limit"
    stats: Summary
    exact: bool  # True if the rule keeps the target's distribution
    logprobs: list[Logprobs] | None = None  # of `tokens`, one per row, if they were requested
    choices: Choices | None = None  # of a drafter that was adaptive by measured times

    def __str__(self) -> str:
        """Returns the texts, and lines of figures."""
        law = "lossless" if self.exact else "this rule changes the distribution"
        rows = self.text if any(self.text) else list(map(str, self.tokens))
        more = [] if self.choices is None else [f"[steps chosen from {self.choices}]"]
        return "\n".join([*rows, f"[{self.stats}; {law}]", *more])


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
    draft_mesh: Mesh | None = None,
    **options: Unpack[Options],
) -> Output: ...


@overload
def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    stream: Literal[True],
    mesh: Mesh | None = None,
    draft_mesh: Mesh | None = None,
    **options: Unpack[Options],
) -> TextStream: ...


def generate(
    target: LanguageModel,
    prompts: Prompts | None = None,
    *,
    stream: bool = False,
    mesh: Mesh | None = None,
    draft_mesh: Mesh | None = None,
    **options: Any,
) -> Output | TextStream:
    """Continues each prompt with the text that `target` would generate by itself, but faster.

    Args:
      target: from `specjax.load`.
      prompts: a text, a list of texts, or a list of token-id lists; they may differ in length.
      stream: return a `TextStream` instead of an `Output`.
      mesh: decode on its devices: rows are split along `data`, and the target's parameters
        along `model`.  A target that was loaded with a mesh needs no mesh here; any other target is
        moved in every call.  The draft is split as it was loaded, or else copied onto each device.
      draft_mesh: devices of the draft model alone, which drafts on them while the target verifies
        (see `specjax.overlap.Overlapped`).  The text is the same.
      **options: the fields of `specjax.Request`: how to draft (`draft`, `drafter`, `proposer`,
        `num_drafts`), how to draw tokens (`temperature`, `seed`, ...), and where rows end.

    Returns:
      An `Output`, or a `TextStream` with `stream=True`.

    Raises:
      ValueError: an argument cannot be used.  The message has its name, its value and the fix, and
        comes before anything is compiled.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> out = specjax.generate(target, "import os", proposer="ngram", max_new_tokens=8)
      >>> len(out.tokens[0])
      8
    """
    request = load_named(target, make_request(prompts, options), mesh, draft_mesh)
    return decode(prepare(target, request, stream=stream, mesh=mesh, draft_mesh=draft_mesh))


def _signature() -> inspect.Signature:
    """Returns the signature of `generate` with every option by name, for `help` and editors."""
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


def decode(prepared: Prepared, warm: Callable[[Prepared], Ready] = warm_up) -> Output | TextStream:
    """Decodes, and returns an `Output`, or a `TextStream` if the request streams.

    `warm` places the weights; by default it also compiles.
    """
    if prepared.stream or prepared.texts.stops:
        pieces = _stream(prepared, warm)
        return TextStream(pieces, prepared.single) if prepared.stream else _exhaust(pieces)
    ready = warm(prepared)
    started = time.perf_counter()
    state = jax.block_until_ready(ready.runner.run(ready.params, ready.prefill()))
    return _output(ready, state, time.perf_counter() - started)


def _output(
    ready: Ready, state: DecodeState | OverlapState, seconds: float, searched: Sequence[int] = ()
) -> Output:
    """Returns the result; the first `searched` tokens of each row have no stop string."""
    prepared, learned, choices = ready.prepared, ready.learned, None
    if learned is not None:
        assert isinstance(state, DecodeState) and isinstance(prepared.decoder.proposer, Adaptive)
        count(ready, state, seconds)
        choices = Choices(prepared.decoder.proposer.options, learned.seconds.copy(), learned.spent)
    text, tokens, finish, ends, lengths = [], [], [], to_host(state.eos), prepared.lengths
    for row, new in enumerate(_new_tokens(state, lengths)):
        kept, written, stopped = prepared.texts.cut(row, new, searched[row] if searched else 0)
        text.append(written)
        tokens.append(kept)
        finish.append("stop" if stopped else "eos" if kept and kept[-1] in ends[row] else "limit")
    stats = summarize(to_host(state.stats), sum(map(len, tokens)), seconds, ready.seconds)
    if isinstance(state, OverlapState):
        assert prepared.overlapped is not None
        hits, expected = prepared.overlapped.hit_rates(state)
        stats = dataclasses.replace(stats, hit_rate=hits, expected_hit_rate=expected)
    recorded = to_host(state.logprobs)
    logprobs = recorded and [
        recorded.row(row, lengths[row], len(kept)) for row, kept in enumerate(tokens)
    ]
    ready.ended(state)
    return Output(text, tokens, finish, stats, prepared.decoder.rule.exact, logprobs, choices)


def _new_tokens(state: DecodeState | OverlapState, lengths: np.ndarray) -> list[list[int]]:
    tokens, ends = to_host((state.tokens, state.length))
    return [tokens[row, lengths[row] : ends[row]].tolist() for row in range(len(lengths))]


def _stream(
    prepared: Prepared, warm: Callable[[Prepared], Ready]
) -> Generator[list[str], None, Output]:
    """Yields pieces of text as they become certain; the generator's return value is the Output."""
    texts, sent = prepared.texts, [0] * len(prepared.lengths)
    searched = [0] * len(prepared.lengths)
    ready = warm(prepared)
    seconds, started = 0.0, time.perf_counter()
    state = ready.prefill()
    states = ready.runner.stream(ready.params, state)
    stopped = None
    while True:
        try:
            state = states.send(stopped)
        except StopIteration:
            break
        done = to_host(state.done)
        stopped = np.zeros_like(done)
        pieces = []
        for row, new in enumerate(_new_tokens(state, prepared.lengths)):
            kept, text, stopped[row] = texts.cut(row, new, searched[row])
            searched[row] = len(kept) - bool(stopped[row])
            if not (done[row] or stopped[row]):
                text = texts.certain(row, new)
            pieces.append(text[sent[row] :])
            sent[row] = max(sent[row], len(text))
        if any(pieces):
            # The time that the caller spends with a piece does not count as decoding.
            seconds += time.perf_counter() - started
            yield pieces
            started = time.perf_counter()
    seconds += time.perf_counter() - started
    return _output(ready, state, seconds, searched)


def _exhaust(pieces: Generator[list[str], None, Output]) -> Output:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
