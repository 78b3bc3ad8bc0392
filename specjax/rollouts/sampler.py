"""`Sampler`: samples of many prompts under weights that change, with old texts as drafts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.checks import typed, whole
from specjax.contract import Proposer
from specjax.decoding import Decoder, eos_of_rows
from specjax.drafters import expecting
from specjax.generation import (
    capacity_for,
    check_length,
    documents_of,
    encode,
    ends_of,
    padded_length,
)
from specjax.models import LanguageModel
from specjax.parallel import mesh_of, row_parts, to_host
from specjax.proposers import NGram, NoProposer
from specjax.rollouts.depths import Depths
from specjax.rollouts.keys import prompt_digest
from specjax.rules import Match
from specjax.sampling import Sampling, keys_of_rows
from specjax.types import ABSENT, Block, DecodeState, Params, Weights

_TURN = 4
"""Steps between two looks of the host at the rows that are done."""


@struct.dataclass
class Rollouts:
    """The new tokens of N samples, as arrays on the device."""

    tokens: Array  # [N, T] int32; 0 behind the last token
    mask: Array  # [N, T] bool; True for the tokens of the text
    logprobs: Array  # [N, T] float32; of each token under the distribution it was drawn from
    raw_logprobs: Array  # [N, T] float32; under the target's own, at temperature 1
    ended: Array  # [N] bool; by an EOS, which is the last token
    passes: int = struct.field(pytree_node=False, default=0)  # of the target, over all rows

    @property
    def texts(self) -> list[list[int]]:
        """Returns the new tokens of each sample."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.mask).sum(1)
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Job:
    number: int
    prompt: list[int]
    key: Array  # []
    documents: np.ndarray  # [1, X]


class Sampler:
    """Draws samples of prompts with some rows at a time; a row that ends makes room for the next.

    The text of a sample depends on the weights, its prompt, its key and the settings.  It is that
    of plain decoding with this key, whatever is expected of it: `expected` texts are drafts.  How
    many of them a pass reads follows from recent acceptance and from what steps take; a call
    without expected texts decodes plainly.  When no prompt waits, rows that are done leave, so the
    last rows have the device for themselves.

    Example:
      >>> from specjax.rollouts import Sampler, rollout_keys
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> sampler = Sampler(target, slots=2, max_new_tokens=12)
      >>> keys = rollout_keys(0, [[5, 9], [7]], samples=2)
      >>> old = sampler.sample([[5, 9], [7]], keys, samples=2)
      >>> new = sampler.sample([[5, 9], [7]], keys, samples=2, expected=old.texts)
      >>> new.texts == old.texts
      True
    """

    def __init__(
        self,
        target: LanguageModel,
        *,
        slots: int = 8,
        max_new_tokens: int = 128,
        num_drafts: int = 16,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        eos: Sequence[int] | None = None,
    ) -> None:
        """Makes a sampler, which compiles in its first call.

        Args:
          target: the model, with the first weights.
          slots: rows that are decoded at once.
          max_new_tokens: of a sample.
          num_drafts: the most drafts of a pass; 0 is plain decoding.
          temperature, top_k, top_p, min_p: as in `specjax.generate`.
          eos: token ids that end a sample instead of the target's own.

        Raises:
          ValueError: a setting that cannot be used, or a target whose rows are split over devices.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        if row_parts(mesh_of(target.params)) > 1:
            raise ValueError(
                f"the rows of {target.name} are split along the mesh axis data, and a Sampler "
                "fills one row at a time: pass a mesh with data=1"
            )
        self.target = target
        self.slots = whole("slots", slots, 1, 2**16, "a whole number, 1 or more")
        most = target.model.max_positions
        self.new = whole("max_new_tokens", max_new_tokens, 1, most, f"in [1, {most}]")
        self.depth = whole("num_drafts", num_drafts, 0, most, "a whole number, 0 or more")
        self._settings = (temperature, top_k, top_p, min_p)
        Sampling.on_host(1, *self._settings)
        self._ends = ends_of(target, None if eos is None else list(eos), 1)[0]
        drafting = expecting(self.depth) if self.depth else NoProposer()
        self._ways = {
            proposer: Depths(proposer.narrower, proposer.max_depth)
            for proposer in (drafting, NoProposer())
        }

    @property
    def settings(self) -> dict[str, object]:
        """Returns what a text depends on, besides the weights, the prompt and the key."""
        names = "temperature", "top_k", "top_p", "min_p"
        sampled = dict(zip(names, self._settings, strict=True))
        return {**sampled, "max_new_tokens": self.new, "eos": list(self._ends)}

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Array | np.ndarray,
        *,
        samples: int = 1,
        params: Weights | None = None,
        expected: Sequence[Sequence[int] | None] | None = None,
    ) -> Rollouts:
        """Draws `samples` samples of each of P prompts: N = P * samples.

        Args:
          prompts: token ids of each prompt.
          keys: [N] PRNG keys, from `rollout_keys`; the samples of a prompt follow each other.
          samples: of each prompt; they share one reading of it.
          params: the weights, of the shapes of the target's own; by default these.
          expected: the texts that are expected of the samples, a list of N with token ids or None,
            such as `Memory.expected` returns.

        Raises:
          ValueError: prompts or expected texts that cannot be used, weights of other shapes, or two
            samples of one prompt with one key, which would be clones.
        """
        samples = whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
        rows = encode(self.target, [list(prompt) for prompt in prompts])
        count = len(rows) * samples
        check_length("target", self.target, rows, self.new)
        keys = keys_of_rows(keys, count)
        _refuse_clones(rows, keys, samples)
        given = [None] * count if expected is None else expected
        found = documents_of(self.target, None, count, NGram(), given)
        assert found is not None
        documents = _padded(found, self.new + 2)
        # Where nothing is expected, plain decoding has the faster program.
        proposer = next(iter(self._ways)) if (found != ABSENT).any() else NoProposer()
        weights = self._weights(params, proposer)
        longest = max(map(len, rows))
        width = padded_length(longest)
        jobs = collections.deque(
            _Job(n, rows[n // samples], keys[n], documents[n : n + 1]) for n in range(count)
        )
        capacity = capacity_for(proposer, width, longest + self.new)
        ends = tuple(self._ends)
        decoder = Decoder(self.target.model, proposer, Match(), ends, capacity, None, 0)
        return _Run(self, decoder, weights, width, jobs).until_done()

    def _weights(self, params: Weights | None, proposer: Proposer) -> Params:
        own = self.target.params
        if params is not None:
            shapes, wanted = (
                jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
                for tree in (params, own)
            )
            if shapes != wanted:
                raise ValueError(
                    f"params are no weights of {self.target.name}: the names, shapes or dtypes of "
                    "the arrays differ; pass weights as target.params has them"
                )
        return Params(own if params is None else params, proposer.bind(self.target, None))


class _Run:
    """One call of `Sampler.sample`."""

    def __init__(
        self, sampler: Sampler, decoder: Decoder, params: Params, width: int,
        jobs: collections.deque[_Job],
    ) -> None:  # fmt: skip
        self.sampler, self.decoder, self.params, self.width = sampler, decoder, params, width
        self.jobs, self.depths = jobs, sampler._ways[decoder.proposer]
        shape = len(jobs), sampler.new
        self.made = Rollouts(
            jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape, jnp.float32), jnp.zeros(len(jobs), bool),
        )  # fmt: skip
        self.passes = 0
        self.read: tuple[list[int], DecodeState] | None = None

    def until_done(self) -> Rollouts:
        rows = min(self.sampler.slots, len(self.jobs))
        held: list[_Job | None] = [None] * rows
        state = None
        while self.jobs or any(job is not None for job in held):
            for slot, job in enumerate(held):
                if job is None and self.jobs:
                    job = held[slot] = self.jobs.popleft()
                    row = self._row(job)
                    state = _emptied(rows, row) if state is None else state
                    state = self.decoder.insert(state, slot, row)
            assert state is not None
            state, held = self._fewer(state, held)
            state, held = self._turn(state, held)
        return dataclasses.replace(self.made, passes=self.passes)

    def _row(self, job: _Job) -> DecodeState:
        """Returns the state of one row whose prompt was read; equal neighbours share a reading."""
        if self.read is None or self.read[0] != job.prompt:
            prompt = np.zeros((1, self.width), np.int32)
            prompt[0, : len(job.prompt)] = job.prompt
            length = np.array([len(job.prompt)], np.int32)
            state = self.decoder.prefill(
                self.params,
                prompt,
                length,
                limit=length + np.int32(self.sampler.new),
                sampling=Sampling.on_host(1, *self.sampler._settings),
                key=job.key[None],
                eos=eos_of_rows([self.sampler._ends]),
                documents=job.documents,
            )
            self.read = job.prompt, state
        return _as_sample(self.decoder, self.params.proposer, self.read[1], job.documents, job.key)

    def _fewer(
        self, state: DecodeState, held: list[_Job | None]
    ) -> tuple[DecodeState, list[_Job | None]]:
        """Leaves out rows that are done, once no prompt waits and half of the rows suffice."""
        live = [slot for slot, job in enumerate(held) if job is not None]
        rows = 1 << (len(live) - 1).bit_length()
        if self.jobs or rows >= len(held):
            return state, held
        free = [slot for slot in range(len(held)) if held[slot] is None]
        kept = [*live, *free[: rows - len(live)]]
        return _taken(state, np.array(kept)), [held[slot] for slot in kept]

    def _turn(
        self, state: DecodeState, held: list[_Job | None]
    ) -> tuple[DecodeState, list[_Job | None]]:
        rows = len(held)
        depth = self.depths.best(rows)
        state = dataclasses.replace(state, num_drafts=jnp.full(rows, depth, jnp.int32))
        before = to_host(state.stats)
        started = time.perf_counter()
        state = self.decoder.run(self.params, state, _TURN)
        done, after = to_host((state.done, state.stats))
        spent = time.perf_counter() - started
        new = jax.tree.map(np.subtract, after, before)
        self.depths.learn(
            rows,
            depth,
            seconds=spent / max(int(new.target_passes.max()), 1),
            accepted=float(new.accepted.sum() / max(int(new.target_passes.sum()), 1)),
        )
        at = np.full(rows, len(self.made.tokens), np.int32)
        for slot, job in enumerate(held):
            if job is not None and done[slot]:
                at[slot], held[slot] = job.number, None
        if (at < len(self.made.tokens)).any():
            self.passes += int(after.target_passes[at < len(self.made.tokens)].sum())
            self.made = _collected(self.made, state, at)
        return state, held


def _refuse_clones(prompts: list[list[int]], keys: Array, samples: int) -> None:
    words = np.asarray(jax.random.key_data(keys))
    seen: dict[tuple[str, bytes], int] = {}
    for number, word in enumerate(words):
        name = prompt_digest(prompts[number // samples]), word.tobytes()
        if name in seen:
            raise ValueError(
                f"keys: the samples {seen[name]} and {number} have one prompt and one key, so they "
                "would be the same text; pass rollout_keys(run, prompts, samples)"
            )
        seen[name] = number


def _padded(documents: np.ndarray, least: int) -> np.ndarray:
    """Returns the documents with room for every text of a sampler, so that shapes stay."""
    more = (1 << (least - 1).bit_length()) - documents.shape[1]
    return np.pad(documents, ((0, 0), (max(more, 0), 0)), constant_values=ABSENT)


def _emptied(rows: int, row: DecodeState) -> DecodeState:
    """Returns a state of rows that are done."""
    state = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), row)
    return dataclasses.replace(state, done=jnp.ones(rows, bool))


@functools.partial(jax.jit, static_argnums=0)
def _as_sample(
    decoder: Decoder, weights: Any, row: DecodeState, documents: Array, key: Array
) -> DecodeState:
    """Returns a row that read its prompt, with the key and the expected text of a sample."""
    count, tokens = row.length - 1, row.tokens
    block = Block(tokens, jnp.zeros((*tokens.shape, 1)), count, None, documents)
    begun = decoder.proposer.start(weights, block, decoder.capacity)
    return dataclasses.replace(row, proposer=begun, key=key[None])


@jax.jit
def _taken(state: DecodeState, rows: Array) -> DecodeState:
    return jax.tree.map(lambda x: x[rows], state)


@functools.partial(jax.jit, donate_argnums=0)
def _collected(made: Rollouts, state: DecodeState, at: Array) -> Rollouts:
    """Writes the rows of a state to the samples `at` [B]; a number behind the last is dropped."""
    width = made.tokens.shape[1]
    begins = state.limit - width
    place = begins[:, None] + jnp.arange(width)
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
    tokens, mask, logprobs, raw, ended = (
        old.at[at].set(part, mode="drop") for old, part in zip(kept, parts, strict=True)
    )
    return Rollouts(tokens, mask, logprobs, raw, ended)
