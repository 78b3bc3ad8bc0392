"""`run`: one call of `Sampler.sample`, whose rows come and go and take turns with drafts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import NamedSharding

from specjax.decoding import Decoder, eos_of_rows, put_row
from specjax.parallel import constrain_like, layout, to_host
from specjax.proposers import Aligned, FirstOf
from specjax.rollouts.depths import Depths, Row
from specjax.rollouts.narrow import Narrow
from specjax.sampling import Sampling
from specjax.types import Block, DecodeState, Params

_Layout: TypeAlias = tuple[NamedSharding | None, ...] | None


@struct.dataclass
class Made:
    """The new tokens of N samples, as arrays on the device: fields of `Rollouts`."""

    tokens: Array  # [N, T] int32
    mask: Array  # [N, T] bool
    logprobs: Array  # [N, T] float32
    raw_logprobs: Array  # [N, T] float32
    ended: Array  # [N] bool


@dataclasses.dataclass(frozen=True)
class Job:
    """A sample that is to be drawn."""

    number: int
    prompt: list[int]
    key: np.ndarray  # [2] uint32, the words of its key
    documents: np.ndarray | None  # [X] int32
    expected: Sequence[int]
    most: int  # new tokens


@dataclasses.dataclass(frozen=True)
class Programs:
    """The decoders of a call, which share a state, and what they need besides it."""

    reads: Decoder  # reads prompts, and says how large the state is
    drafts: Mapping[int, Decoder]  # by the number of drafts; 0 is plain decoding
    depths: Depths
    carries: bool  # the drafter's state is kept in every step, and not made when it drafts
    params: Params
    width: int  # of padded prompts
    slots: int
    new: int  # the most new tokens of a sample
    settings: tuple[float, int, float, float]  # temperature, top-k, top-p, min-p
    ends: Sequence[int]


@dataclasses.dataclass
class _Held:
    """A sample that has a row of the batch."""

    job: Job
    known: Row
    seen: tuple[int, ...] = (0, 0, 0)  # emitted tokens, passes, accepted drafts


@dataclasses.dataclass
class _Apart:
    """Rows that take turns with drafts, with the drafter's state."""

    slots: list[int]
    state: DecodeState


def run(programs: Programs, jobs: Sequence[Job]) -> tuple[Made, int]:
    """Returns the new tokens of all samples, and the passes of the target over all rows."""
    return _Run(programs, jobs).until_done()


class _Run:
    def __init__(self, programs: Programs, jobs: Sequence[Job]) -> None:
        self.programs, self.depths = programs, programs.depths
        self.jobs = collections.deque(jobs)
        shape = len(jobs), programs.new
        self.made = Made(*_nothing(shape))
        self.passes = 0
        # Prompts that were read: the row of each in one state.
        self.read: tuple[dict[tuple[int, ...], int], DecodeState] | None = None
        size = self.depths.padded(min(programs.slots, len(jobs)))
        self.held: list[_Held | None] = [None] * min(size, programs.slots)
        self.state: DecodeState | None = None
        self.apart: _Apart | None = None

    def until_done(self) -> tuple[Made, int]:
        while self.jobs or any(row is not None for row in self.held):
            if self.jobs and None in self.held:
                self._join()
                for slot, row in enumerate(self.held):
                    if row is None and self.jobs:
                        self._fill(slot, self.jobs.popleft())
            self._fewer()
            self._turn()
        return self.made, self.passes

    def _fill(self, slot: int, job: Job) -> None:
        """Puts a sample into a row; equal prompts share a reading."""
        name = tuple(job.prompt)
        if self.read is None or name not in self.read[0]:
            self.read = self._reading(job)
        at, read = self.read[0][name], self.read[1]
        if self.state is None:
            self.state = _emptied(len(self.held), layout(read), read)
        documents = None
        if self.programs.carries and job.documents is not None:
            documents = job.documents[None]
        self.state = _filled(
            self.programs.reads, layout(self.state), self.programs.params.proposer, self.state,
            np.int32(slot), read, np.int32(at), documents, job.key,
            np.int32(len(job.prompt) + job.most),
        )  # fmt: skip
        row = dataclasses.replace(self.depths.row(job.expected), most=job.most)
        self.held[slot] = _Held(job, row)

    def _reading(self, job: Job) -> tuple[dict[tuple[int, ...], int], DecodeState]:
        """Reads the prompt of a job, on each device that of another one that waits."""
        together = self.depths.together
        names = {tuple(job.prompt): 0}
        for other in self.jobs:
            if len(names) == together:
                break
            names.setdefault(tuple(other.prompt), len(names))
        rows = [*names, *[tuple(job.prompt)] * (together - len(names))]
        prompts = np.zeros((together, self.programs.width), np.int32)
        for row, prompt in zip(prompts, rows, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in rows], np.int32)
        documents = None
        if self.programs.carries and job.documents is not None:
            documents = np.repeat(job.documents[None], together, axis=0)
        state = self.programs.reads.prefill(
            self.programs.params,
            prompts,
            lengths,
            limit=lengths + np.int32(self.programs.new),
            num_drafts=np.full(together, max(self.programs.drafts), np.int32),
            sampling=Sampling.on_host(together, *self.programs.settings),
            key=jax.random.wrap_key_data(jnp.asarray(np.repeat(job.key[None], together, axis=0))),
            eos=eos_of_rows([self.programs.ends] * together),
            documents=documents,
        )
        return names, state

    def _fewer(self) -> None:
        """Leaves out rows that are done, once no prompt waits and half of the rows suffice."""
        live = [slot for slot, row in enumerate(self.held) if row is not None]
        size = self.depths.padded(len(live))
        if self.jobs or size >= len(self.held):
            return
        self._join()
        assert self.state is not None
        free = [slot for slot in range(len(self.held)) if self.held[slot] is None]
        kept = [*live, *free[: size - len(live)]]
        self.state = _taken(layout(self.state), self.state, np.array(kept, np.int32))
        self.held = [self.held[slot] for slot in kept]

    def _turn(self) -> None:
        live = [slot for slot, row in enumerate(self.held) if row is not None]
        rows = [self.held[slot].known for slot in live]  # type: ignore[union-attr]
        carries = self.programs.carries
        tries = any(job is not None and job.job.documents is not None for job in self.held)
        turn = self.depths.best(len(self.held), rows, apart=not carries, tries=tries)
        began = time.perf_counter()
        if turn.drafts == 0 or carries:
            self._join()
            slots = list(range(len(self.held)))
        else:
            slots = self._part([live[n] for n in turn.rows])
        state = self.apart.state if self.apart is not None else self.state
        assert state is not None
        state = self.programs.drafts[turn.drafts].run(self.programs.params, state, turn.steps)
        if self.apart is not None:
            self.apart.state = state
        else:
            self.state = state
        looks = any(row.left for row in rows)
        counts = state.stats.emitted, state.stats.target_passes, state.stats.accepted
        text = (state.tokens, state.length) if looks else None
        done, counts, text = to_host((state.done, counts, text))
        spent = time.perf_counter() - began
        ends, steps = np.full(len(slots), len(self.made.tokens), np.int32), 1
        begins = np.zeros(len(slots), np.int32)
        for at, slot in enumerate(slots):
            row = self.held[slot] if slot < len(self.held) else None
            if row is None:
                continue
            seen = tuple(int(count[at]) for count in counts)
            emitted, passes, accepted = (new - old for new, old in zip(seen, row.seen, strict=True))
            row.seen, steps = seen, max(steps, passes)
            self.depths.accepted(row.known, turn.drafts, accepted / max(passes, 1))
            if text is not None:
                length = int(text[1][at])
                self.depths.decoded(row.known, text[0][at, length - emitted : length].tolist())
            row.known.done += emitted
            if done[at]:
                ends[at], begins[at] = row.job.number, len(row.job.prompt)
                self.passes += seen[1]
                self.held[slot] = None
        self.depths.learn(len(slots), turn.drafts, spent / steps, steps)
        if (ends < len(self.made.tokens)).any():
            self.made = _collected(self.made, state, ends, begins)

    def _part(self, slots: list[int]) -> list[int]:
        """Gives rows the drafter's state, apart from the others; returns the slots of the part.

        It is filled up with slots behind the last one.
        """
        if self.apart is not None:
            left = [slot for slot in self.apart.slots if slot in slots]
            if left == slots and self.depths.padded(len(slots)) == len(self.apart.slots):
                return self.apart.slots
            if self._is_whole(self.apart.slots) and len(slots) == sum(
                row is not None for row in self.held
            ):
                return self.apart.slots
        self._join()
        assert self.state is not None
        whole = len(slots) == sum(row is not None for row in self.held)
        if whole:
            slots = list(range(len(self.held)))
        else:
            more = self.depths.padded(len(slots)) - len(slots)
            slots = [*slots, *[len(self.held)] * more]
        jobs = [
            self.held[slot].job if slot < len(self.held) and self.held[slot] else None  # type: ignore[union-attr]
            for slot in slots
        ]
        width = next(len(job.documents) for job in jobs if job and job.documents is not None)
        documents = np.full((len(slots), width), -1, np.int32)
        prompts = np.ones(len(slots), np.int32)
        for row, job in enumerate(jobs):
            if job is not None and job.documents is not None:
                documents[row], prompts[row] = job.documents, len(job.prompt)
        part = self.state
        if not whole:
            part = _taken(layout(part), part, np.array(slots, np.int32))
        drafter = self.programs.drafts[self.depths.options[-1]]
        state = _drafter_state(
            drafter, self.programs.params.proposer, part.tokens, part.length, documents, prompts
        )
        self.apart = _Apart(slots, dataclasses.replace(part, proposer=state))
        return slots

    def _is_whole(self, slots: list[int]) -> bool:
        """Returns whether these are all rows; a part that is filled up may be as long."""
        return slots == list(range(len(self.held)))

    def _join(self) -> None:
        """Puts rows that were apart back, without the drafter's state."""
        if self.apart is None:
            return
        part = dataclasses.replace(self.apart.state, proposer=())
        if self._is_whole(self.apart.slots):
            self.state = part
        else:
            assert self.state is not None
            slots = np.array(self.apart.slots, np.int32)
            self.state = _put_back(layout(self.state), self.state, part, slots)
        self.apart = None


@functools.partial(jax.jit, static_argnums=0)
def _nothing(shape: tuple[int, int]) -> tuple[Array, ...]:
    return (
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, jnp.float32), jnp.zeros(shape[0], bool),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def _emptied(rows: int, layout: _Layout, read: DecodeState) -> DecodeState:
    """Returns a state of rows that are done."""
    state = jax.tree.map(lambda x: jnp.repeat(x[:1], rows, axis=0), read)
    return constrain_like(dataclasses.replace(state, done=jnp.ones(rows, bool)), layout)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _filled(
    decoder: Decoder,
    layout: _Layout,
    weights: Any,
    state: DecodeState,
    slot: Array,
    read: DecodeState,
    at: Array,
    documents: Array | None,
    key: Array,
    limit: Array,
) -> DecodeState:
    """Returns a state with a sample in a row: a prompt that was read, a key and a limit."""
    row = jax.tree.map(lambda x: x[at][None], read)
    if documents is not None:
        made = _begun(decoder, weights, row.tokens, row.length, documents, row.proposer)
        row = dataclasses.replace(row, proposer=made)
    words = jax.random.wrap_key_data(key[None], impl="threefry2x32")
    row = dataclasses.replace(row, key=words, limit=limit[None])
    return put_row(layout, state, slot, row)


def _begun(
    decoder: Decoder, weights: Any, tokens: Array, length: Array, documents: Array, state: Any
) -> Any:
    """Returns the drafter's state of rows with these documents; what was read of a text stays."""
    block = Block(tokens, jnp.zeros((*tokens.shape, 1)), length - 1, None, documents)

    def begun(proposer: Any, weights: Any, state: Any) -> Any:
        if isinstance(proposer, Narrow):
            return begun(proposer.inner, weights, state)
        if not proposer.reads_documents:
            return state
        if isinstance(proposer, FirstOf):
            parts = (proposer.first, proposer.second)
            own, states = weights or (None, None), state or ((), ())
            return tuple(begun(*each) for each in zip(parts, own, states, strict=True))
        return proposer.start(weights, block, decoder.capacity)

    return begun(decoder.proposer, weights, state)


@functools.partial(jax.jit, static_argnums=0)
def _drafter_state(
    decoder: Decoder, weights: Any, tokens: Array, length: Array, documents: Array, prompts: Array
) -> Any:
    """Returns the drafter's state of rows that have decoded some tokens after their prompts [B]."""

    def from_prompt(proposer: Any, state: Any) -> Any:
        """Tells aligned drafts where the new tokens begin."""
        if isinstance(proposer, Narrow):
            return from_prompt(proposer.inner, state)
        if isinstance(proposer, FirstOf):
            parts = (proposer.first, proposer.second)
            return tuple(from_prompt(*each) for each in zip(parts, state, strict=True))
        if isinstance(proposer, Aligned):
            return dataclasses.replace(state, prompt=prompts - 1)
        return state

    made = _begun(decoder, weights, tokens, length, documents, None)
    return from_prompt(decoder.proposer, made)


@functools.partial(jax.jit, static_argnums=0)
def _taken(layout: _Layout, state: DecodeState, rows: Array) -> DecodeState:
    """Returns some rows; a number behind the last row gives one that is done."""
    part = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), state)
    part = dataclasses.replace(part, done=part.done | (rows >= len(state.tokens)))
    return constrain_like(part, layout)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put_back(layout: _Layout, state: DecodeState, part: DecodeState, rows: Array) -> DecodeState:
    """Returns the state with some rows; those behind the last one are dropped."""
    put = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, part)
    return constrain_like(put, layout)


@functools.partial(jax.jit, donate_argnums=0)
def _collected(made: Made, state: DecodeState, at: Array, begins: Array) -> Made:
    """Writes the new tokens of rows, from `begins` [B] on, to the samples `at` [B].

    A number behind the last sample is dropped.
    """
    place = begins[:, None] + jnp.arange(made.tokens.shape[1])
    mask = place < state.length[:, None]
    assert state.logprobs is not None

    def cut(x: Array) -> Array:
        return jnp.where(mask, jnp.take_along_axis(x, place, axis=1), 0)

    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    ended = (last == state.eos).any(1)
    parts = (
        cut(state.tokens), mask, cut(state.logprobs.warped), cut(state.logprobs.raw), ended,
    )  # fmt: skip
    kept = (made.tokens, made.mask, made.logprobs, made.raw_logprobs, made.ended)
    return Made(*(old.at[at].set(part, mode="drop") for old, part in zip(kept, parts, strict=True)))
