"""`Handle`: gives a user the text of a request that an engine serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from specjax.decoding import Logprobs
from specjax.serve.per_row import unpack
from specjax.serve.resuming import Delivered
from specjax.text import Texts


class Busy(Exception):
    """Raised if the queue of an engine is full; try again after `seconds`."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already: try again in {seconds:.0f} s")
        self.seconds = seconds


class Closed(Exception):
    """Raised if the engine takes no more requests, or stopped before it had served this one."""


class Guess(NamedTuple):
    """The proposer of a token, and its depth."""

    depth: int  # as a draft: 1 is the token after the pending one; 0: the target drew it itself
    drafter: str | None  # None at depth 0
    offered: int  # drafts of the step that emitted this token


class Step(NamedTuple):
    """The tokens of one step of the target."""

    offered: int  # drafts
    accepted: int  # of them
    written: int  # tokens: the accepted drafts, and the target's own token unless the text ended


class Counts(NamedTuple):
    """The fields of `specjax.types.Stats`, of one row."""

    target_passes: int
    emitted: int
    accepted: int
    tested: int
    proposed: int
    drafting: int


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a text: its length, its text and the reason."""

    kept: int  # the first tokens, which are the result
    text: str  # of them
    finish: str  # "eos", "stop", "limit" or "cancelled"
    counts: tuple[int, ...]  # the fields of `Counts`


@dataclasses.dataclass(frozen=True)
class Increment:
    """The new tokens of a text, without those whose text a stop string might still cut.

    The texts, tokens, guesses, log-probabilities and pieces of all increments, joined, are those of
    the `Served`.
    """

    text: str
    tokens: list[int]
    guesses: list[Guess]
    logprobs: Logprobs | None  # of the tokens
    start: int  # the tokens of all increments before this one
    offset: int  # the characters of all increments before this one
    _pieces: Callable[[], list[str]] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def pieces(self) -> list[str]:
        """The characters of `text` that each token adds, made when they are first asked for."""
        return self._pieces()


@dataclasses.dataclass(frozen=True)
class Times:
    """Moments of a request, in seconds of `time.perf_counter`; None: not yet."""

    submitted: float
    begun: float | None = None  # reading the prompt
    first: float | None = None  # new token
    ended: float | None = None


@dataclasses.dataclass(frozen=True)
class Served:
    """The whole text of a request, with its tokens and counts."""

    text: str
    tokens: list[int]
    finish: str  # "eos", "stop", "limit" or "cancelled"
    guesses: list[Guess]
    logprobs: Logprobs | None
    stats: Counts  # with what was written after a stop string
    prompt: int  # tokens
    copied: int  # tokens of the prompt that were copied from another row
    times: Times
    texts: Texts  # decodes it
    seed: int
    index: int  # among the texts of its prompt and seed

    @functools.cached_property
    def pieces(self) -> list[str]:
        """The characters of `text` that each token adds."""
        return self.texts.pieces(0, self.tokens, self.text)

    @property
    def steps(self) -> list[Step]:
        """The steps of the target, in their order."""
        made, accepted = [], 0
        for guess in self.guesses:
            accepted = max(accepted, guess.depth)
            if guess.depth == 0:
                made.append(Step(guess.offered, accepted, accepted + 1))
                accepted = 0
        if accepted:  # an end inside of the drafts leaves no token of the target's own
            made.append(Step(self.guesses[-1].offered, accepted, accepted))
        return made


def _unknown(like: Logprobs, count: int) -> Logprobs:
    """Returns the log-probabilities of `count` tokens that are not known: NaN, and token 0."""

    def fill(x: np.ndarray) -> np.ndarray:
        value = np.nan if np.issubdtype(x.dtype, np.floating) else 0
        return np.full((count, *x.shape[1:]), value, x.dtype)

    return jax.tree.map(fill, like)


class Handle:
    """A request that an engine serves: iterate over its increments, or wait for the `result`.

    Several threads may use it.  `async for` and `await handle.wait()` work from an event loop.
    """

    def __init__(
        self,
        texts: Texts,
        drafters: tuple[str | None, ...],
        prompt: int,
        wants: int | None,
        delivered: Delivered | None = None,
        seed: int = 0,
        index: int = 0,
    ) -> None:
        self.texts, self.wants = texts, wants
        self._drafters, self.prompt = drafters, prompt
        self.delivered = delivered or Delivered()
        self.seed, self.index = seed, index
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._tokens: list[int] = []
        self._guesses: list[Guess] = []
        self._known: dict[int, Guess] = {}  # by their codes
        self._drafts = 0  # of the guesses
        self._logprobs: list[Logprobs] = []
        self._times = Times(time.perf_counter())
        self._served: Served | None = None
        self._error: Exception | None = None
        self.copied = 0
        self.cancelled = False  # the engine looks at it before every turn

    def cancel(self) -> None:
        """Stops this text.  Its slot is free after at most two turns: this one and the next."""
        self.cancelled = True

    def done(self) -> bool:
        """True if the whole text is there, or an error has been reported."""
        return self._served is not None or self._error is not None

    def result(self, timeout: float | None = None) -> Served:
        """Waits for the whole text.

        Raises:
          Closed: the engine stopped before the end of the text.
          TimeoutError: it took longer than `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"the text is not finished after {timeout} s")
        return self._outcome()

    async def wait(self) -> Served:
        """Waits for the whole text as `result`, from an event loop."""
        with self._waking() as moved:
            while not self.done():
                await moved.wait()
                moved.clear()
        return self._outcome()

    async def checked(self) -> None:
        """Waits until the tokens that were delivered before are written again.

        Raises:
          Disagreement: they differ.
          Closed: as `result`.
        """
        with self._waking() as moved:
            while not self.done() and len(self._tokens) < self.delivered.count:
                await moved.wait()
                moved.clear()
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[Increment]:
        seen, at, sent = 0, self.delivered.count, None
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._moved(seen))
            increment, seen, ended = self._since(at, sent)
            if increment is not None:
                at += len(increment.tokens)
                sent = increment.offset + len(increment.text)
                yield increment
            if ended:
                return

    async def __aiter__(self) -> AsyncIterator[Increment]:
        seen, at, sent = 0, self.delivered.count, None
        with self._waking() as moved:
            while True:
                if not self._moved(seen):
                    await moved.wait()
                moved.clear()
                increment, seen, ended = self._since(at, sent)
                if increment is not None:
                    at += len(increment.tokens)
                    sent = increment.offset + len(increment.text)
                    yield increment
                if ended:
                    return

    def before(self, new: Increment) -> Increment:
        """Returns all that is before an increment, as one increment.

        The tokens that were delivered before are no part of the increments that a reader gets.
        """
        with self._changed:
            tokens, guesses = self._tokens[: new.start], self._guesses[: new.start]
            logprobs = self._joined(0, new.start)
        text = self.texts.decode(0, tokens)[: new.offset]
        pieces = functools.partial(self._pieces, 0, new.start, 0, new.offset)
        return Increment(text, tokens, guesses, logprobs, 0, 0, pieces)

    @contextlib.contextmanager
    def _waking(self) -> Iterator[asyncio.Event]:
        """Returns an event of the running loop that is set whenever the text has grown or ended."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            yield event
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def _moved(self, seen: int) -> bool:
        return self.done() or len(self._tokens) > seen

    def _since(self, at: int, sent: int | None) -> tuple[Increment | None, int, bool]:
        """Returns the increment since `at` tokens and `sent` characters; None: those of the tokens.

        Returns:
          The increment, or None if nothing new is settled; the number of tokens that it covers; and
          whether the text has ended.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            served, tokens = self._served, list(self._tokens)
        if served is not None:
            count, text = len(tokens), served.text
        elif len(tokens) > at:
            count, text = self.texts.settled(0, tokens, at)
        else:
            count, text = at, ""
        if count <= at:
            return None, len(tokens), served is not None
        if sent is None:
            shown = self.texts.pieces(0, tokens[:count], text)[:at] if at else []
            sent = sum(map(len, shown))
        with self._changed:
            guesses, logprobs = self._guesses[at:count], self._joined(at, count)
        pieces = functools.partial(self._pieces, at, count, sent, len(text))
        increment = Increment(text[sent:], tokens[at:count], guesses, logprobs, at, sent, pieces)
        return increment, len(tokens), served is not None

    def _pieces(self, start: int, stop: int, sent: int, end: int) -> list[str]:
        """Returns the characters, from `sent` to `end`, that tokens from `start` to `stop` add.

        An increment holds these numbers alone: with the tokens before it, those of a text that are
        kept would take memory by the square of its length.
        """
        with self._changed:
            tokens = self._tokens[:stop]
        text = self.texts.decode(0, tokens)[:end]
        return self.texts.pieces(0, tokens, text, start, sent)

    def _joined(self, start: int, stop: int) -> Logprobs | None:
        if self.wants is None or not self._logprobs:
            return None
        whole = jax.tree.map(lambda *x: np.concatenate(x), *self._logprobs)
        return jax.tree.map(lambda x: x[start:stop], whole)

    def _outcome(self) -> Served:
        if self._error is not None:
            raise self._error
        assert self._served is not None
        return self._served

    # The engine calls what follows.

    @property
    def seconds(self) -> float:
        """The seconds from the first chunk of the prompt to the end of the text; 0 before that."""
        begun, ended = self._times.begun, self._times.ended
        return 0.0 if begun is None or ended is None else ended - begun

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return self._tokens

    def trust(self) -> None:
        """Takes the delivered tokens as the beginning of the text, which nobody writes again."""
        self._tokens = list(self.delivered.tokens or ())
        self._guesses = [Guess(0, None, 0)] * len(self._tokens)

    @property
    def begun(self) -> bool:
        """True once the request has begun to be read."""
        return self._times.begun is not None

    def begin(self) -> None:
        """Records that the request has a slot now, for its times."""
        self._times = dataclasses.replace(self._times, begun=time.perf_counter())

    def extend(
        self,
        tokens: list[int],
        codes: list[int],
        accepted: int,
        logprobs: Logprobs | None,
        end: End | None = None,
    ) -> None:
        """Adds tokens with their codes (`several.unpack`), and ends the text with `end`.

        Readers see the last tokens and the end at once: the tokens may hold a stop string.

        Args:
          accepted: the accepted drafts of the whole text so far.
        """
        guesses = self._guesses_of(codes, accepted) if tokens else []
        now = time.perf_counter()
        with self._changed:
            if tokens and self._times.first is None:
                self._times = dataclasses.replace(self._times, first=now)
            self._tokens += tokens
            self._guesses += guesses
            if logprobs is not None:
                missing = len(self._tokens) - len(tokens) - sum(len(x.raw) for x in self._logprobs)
                if missing and not self._logprobs:  # of tokens that were trusted
                    self._logprobs.append(_unknown(logprobs, missing))
                self._logprobs.append(logprobs)
            if end is not None:
                self._times = dataclasses.replace(self._times, ended=now)
                del self._tokens[end.kept :], self._guesses[end.kept :]
                self._served = Served(
                    end.text, list(self._tokens), end.finish, list(self._guesses),
                    self._joined(0, end.kept), Counts(*end.counts), self.prompt, self.copied,
                    self._times, self.texts, self.seed, self.index,
                )  # fmt: skip
            if tokens or end is not None:
                self._changed.notify_all()
            wakers = list(self._wakers)
        for wake in wakers if tokens or end is not None else ():
            wake()

    def _guesses_of(self, codes: list[int], accepted: int) -> list[Guess]:
        """Returns the proposers of the new tokens, of which there is at least one."""
        if not any(codes):  # no step had drafts
            return [self._guess_of(0)] * len(codes)
        guesses = [self._known.get(code) or self._guess_of(code) for code in codes]
        self._drafts += sum(guess.depth > 0 for guess in guesses)
        if self._drafts < accepted:
            # A code says that the last token of a step was drawn by the target.  That is wrong
            # where an EOS or the limit cuts the text at a draft.
            self._drafts += guesses[-1].depth == 0
            before = [*self._guesses[-1:], *guesses][-2:-1]
            depth = 1 + sum(guess.depth for guess in before)
            guesses[-1] = self._guess(depth, *unpack(codes[-1])[1:])
        return guesses

    def _guess_of(self, code: int) -> Guess:
        return self._known.setdefault(code, self._guess(*unpack(code)))

    def _guess(self, depth: int, column: int, offered: int) -> Guess:
        return Guess(depth, self._drafters[column] if depth else None, offered)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless it has ended."""
        with self._changed:
            if not self.done():
                self._error = error
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()
