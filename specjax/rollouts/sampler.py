"""`Sampler`: samples of many prompts under weights that change, with old texts as drafts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.checks import listed, typed, whole
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
from specjax.methods import BoundDrafter, Drafter, first_of
from specjax.models import LanguageModel
from specjax.parallel import mesh_of, row_parts, to_host
from specjax.proposers import FirstOf, NGram, NoProposer
from specjax.rollouts.depths import Depths, Row
from specjax.rollouts.keys import prompt_digest
from specjax.rollouts.narrow import Narrow
from specjax.rules import Match
from specjax.sampling import Sampling, keys_of_rows
from specjax.types import ABSENT, Block, DecodeState, Params, Weights

_DEPTH = 16
"""The most drafts of a pass by default."""

_MODEL = 0.6
"""The acceptance rate of a user's drafter before anything was measured."""


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
    expected: Sequence[int]
    most: int  # new tokens


@dataclasses.dataclass(frozen=True)
class _Drafting:
    """What drafts, and how many drafts a pass reads of a row."""

    drafter: Drafter
    depths: Depths

    def narrowed(self, depth: int) -> Proposer:
        """Returns the proposer of a program with this number of drafts."""
        whole = self.drafter.proposer
        if depth == self.depths.options[-1] and not whole.narrower:
            return whole
        return Narrow(whole, whole.num_nodes if depth == whole.max_depth else depth + 1)


class Sampler:
    """Draws samples of prompts with some rows at a time; a row that ends makes room for the next.

    The text of a sample depends on the weights, its prompt, its key and the settings.  It is that
    of plain decoding with this key, whatever is expected of it: `expected` texts are drafts.  Where
    a text differs, its row looks up how the expected text and the `documents` go on.  How many
    drafts a pass reads follows from what was accepted and from what steps take (`Depths`); a call
    without either decodes plainly.  The longest expected texts begin first.  When no prompt waits,
    rows that are done leave, so the last rows have the device for themselves.

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
        num_drafts: int | None = None,
        drafter: Drafter | Proposer | None = None,
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
          num_drafts: the most drafts of a pass, by default 16 or those of `drafter`; 0 is plain
            decoding.
          drafter: drafts for a row that has neither an expected token nor found one, such as
            `specjax.load_drafter(folder, target)` or `NGram(8)`.  Its weights stay.
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
        self._drafting = _drafting(target, num_drafts, drafter)
        self._proposed = None if self._drafting is None else self._drafting.drafter.arrays(target)
        self._always = drafter is not None  # it drafts for rows without documents, too
        self._plain = _Drafting(BoundDrafter(NoProposer()), Depths(0))
        self._settings = (temperature, top_k, top_p, min_p)
        Sampling.on_host(1, *self._settings)
        self._ends = ends_of(target, None if eos is None else list(eos), 1)[0]

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
        max_new_tokens: Sequence[int] | np.ndarray | None = None,
        params: Weights | None = None,
        expected: Sequence[Sequence[int] | None] | None = None,
        documents: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Rollouts:
        """Draws `samples` samples of each of P prompts: N = P * samples.

        Args:
          prompts: token ids of each prompt.
          keys: [N] PRNG keys, from `rollout_keys`; the samples of a prompt follow each other.
          samples: of each prompt; they share one reading of it.
          max_new_tokens: of each sample, a list of N numbers, at most the sampler's own; by default
            that one.
          params: the weights, of the shapes of the target's own; by default these.
          expected: the texts that are expected of the samples, a list of N with token ids or None,
            such as `Memory.expected` returns: those of the same keys, position by position.
          documents: texts in which the rows of a prompt look up how they may go on, a list of P
            lists, such as `Memory.documents` returns: those of other keys.

        Raises:
          ValueError: prompts, numbers of tokens or expected texts that cannot be used, weights of
            other shapes, or two samples of one prompt with one key, which would be clones.
        """
        samples = whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
        rows = encode(self.target, [list(prompt) for prompt in prompts])
        count = len(rows) * samples
        check_length("target", self.target, rows, self.new)
        keys = keys_of_rows(keys, count)
        _refuse_clones(rows, keys, samples)
        most = self._most(max_new_tokens, count)
        found = self._documents(rows, samples, expected, documents)
        given = [() if text is None else text for text in expected or [None] * count]
        # Where there is nothing to draft from, plain decoding has the faster program.
        drafting = self._drafting
        if drafting is None or not (self._always or (found != ABSENT).any()):
            drafting = self._plain
        elif drafting.drafter.reader is not None:
            check_length("draft", drafting.drafter.reader, rows, self.new)
        weights = self._weights(params, drafting)
        longest = max(map(len, rows))
        width = padded_length(longest)
        jobs = [
            _Job(n, rows[n // samples], keys[n], found[n : n + 1], given[n], most[n])
            for n in range(count)
        ]
        capacity = capacity_for(drafting.drafter.proposer, width, longest + self.new)
        ends = tuple(self._ends)
        decoders = {
            depth: Decoder(
                self.target.model, drafting.narrowed(depth), Match(), ends, capacity, None, 0
            )
            for depth in drafting.depths.options
        }
        return _Run(self, decoders, drafting.depths, weights, width, _ordered(jobs)).until_done()

    def _most(self, given: Sequence[int] | np.ndarray | None, count: int) -> list[int]:
        """Returns the most new tokens of each sample."""
        if given is None:
            return [self.new] * count
        wanted = f"a list of {count} numbers, one a sample"
        numbers = listed("max_new_tokens", given, wanted)
        if len(numbers) != count:
            raise ValueError(f"max_new_tokens has {len(numbers)} entries; pass {wanted}")
        bounds = f"in [1, {self.new}], the most of the sampler"
        return [
            whole(f"max_new_tokens[{n}]", number, 1, self.new, bounds)
            for n, number in enumerate(numbers)
        ]

    def _documents(
        self, rows: list[list[int]], samples: int, expected: object, documents: object
    ) -> np.ndarray:
        """Returns what each sample looks up in [N, X]; the last document is the expected text."""
        count = len(rows) * samples
        kinds = "a list of lists of token ids for each prompt"
        each = listed("documents", [[]] * len(rows) if documents is None else documents, kinds)
        if len(each) != len(rows):
            raise ValueError(
                f"documents has {len(each)} entries for {len(rows)} prompts; pass {kinds}"
            )
        lists = [listed("documents", some, kinds) for some in each for _ in range(samples)]
        given = [None] * count if expected is None else expected
        found = documents_of(self.target, lists, count, NGram(), given)
        assert found is not None
        return _padded(found, self.new + 2)

    def _weights(self, params: Weights | None, drafting: _Drafting) -> Params:
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
        proposed = self._proposed if drafting is self._drafting else None
        return Params(own if params is None else params, proposed)


def _drafting(
    target: LanguageModel, num_drafts: int | None, given: Drafter | Proposer | None
) -> _Drafting | None:
    """Returns what drafts; None for plain decoding."""
    if given is not None:
        typed("what a loader such as load_drafter returns", Drafter | Proposer, drafter=given)
        given = given if isinstance(given, Drafter) else BoundDrafter(given)
        given.check(target)
    own = None if given is None else given.proposer.max_depth
    most = target.model.max_positions
    wanted = f"in [0, {most}]" if own is None else f"0 or {own}, the depth of the drafter"
    asked = (_DEPTH if own is None else own) if num_drafts is None else num_drafts
    depth = whole("num_drafts", asked, 0, most, wanted)
    if own is not None and depth not in (0, own):
        raise ValueError(f"num_drafts={depth} is not allowed; it must be {wanted}")
    if depth == 0:
        return None
    if given is None:
        return _Drafting(BoundDrafter(expecting(depth)), Depths(depth))
    both = first_of(expecting(depth), given)
    return _Drafting(both, Depths(depth, both.proposer.is_chain, others=_MODEL))


@dataclasses.dataclass
class _Held:
    """A sample that has a row of the batch."""

    job: _Job
    known: Row


class _Run:
    """One call of `Sampler.sample`."""

    def __init__(
        self, sampler: Sampler, decoders: Mapping[int, Decoder], depths: Depths, params: Params,
        width: int, jobs: Sequence[_Job],
    ) -> None:  # fmt: skip
        self.sampler, self.decoders, self.depths = sampler, decoders, depths
        self.params, self.width = params, width
        self.widest = decoders[max(decoders)]
        self.jobs = collections.deque(jobs)
        shape = len(jobs), sampler.new
        self.made = Rollouts(
            jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape, jnp.float32), jnp.zeros(len(jobs), bool),
        )  # fmt: skip
        self.passes = 0
        self.read: tuple[list[int], DecodeState] | None = None

    def until_done(self) -> Rollouts:
        rows = min(self.sampler.slots, len(self.jobs))
        held: list[_Held | None] = [None] * rows
        state = None
        while self.jobs or any(row is not None for row in held):
            for slot, row in enumerate(held):
                if row is None and self.jobs:
                    job = self.jobs.popleft()
                    held[slot] = _Held(job, self.depths.row(job.expected))
                    new = self._row(job)
                    state = _emptied(rows, new) if state is None else state
                    state = self.widest.insert(state, slot, new)
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
            state = self.widest.prefill(
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
        limit = np.array([len(job.prompt) + job.most], np.int32)
        return _as_sample(
            self.widest, self.params.proposer, self.read[1], job.documents, job.key, limit
        )

    def _fewer(
        self, state: DecodeState, held: list[_Held | None]
    ) -> tuple[DecodeState, list[_Held | None]]:
        """Leaves out rows that are done, once no prompt waits and half of the rows suffice."""
        live = [slot for slot, row in enumerate(held) if row is not None]
        rows = 1 << (len(live) - 1).bit_length()
        if self.jobs or rows >= len(held):
            return state, held
        free = [slot for slot in range(len(held)) if held[slot] is None]
        kept = [*live, *free[: rows - len(live)]]
        return _taken(state, np.array(kept)), [held[slot] for slot in kept]

    def _turn(
        self, state: DecodeState, held: list[_Held | None]
    ) -> tuple[DecodeState, list[_Held | None]]:
        size, live = len(held), [row for row in held if row is not None]
        depth, steps = self.depths.best(size, [row.known for row in live])
        before = to_host(state.stats)
        started = time.perf_counter()
        state = self.decoders[depth].run(self.params, state, steps)
        done, after = to_host((state.done, state.stats))
        spent = time.perf_counter() - started
        new = jax.tree.map(np.subtract, after, before)
        self.depths.learn(size, depth, spent / max(int(new.target_passes.max()), 1))
        looks = not depth and any(row.known.left for row in live)
        text = to_host((state.tokens, state.length)) if looks else None
        at, begins = np.full(size, len(self.made.tokens), np.int32), np.zeros(size, np.int32)
        for slot, row in enumerate(held):
            if row is None:
                continue
            emitted, passes = int(new.emitted[slot]), max(int(new.target_passes[slot]), 1)
            if text is not None:
                tokens, length = text[0][slot], int(text[1][slot])
                self.depths.decoded(row.known, tokens[length - emitted : length].tolist())
            self.depths.accepted(row.known, depth, float(new.accepted[slot]) / passes)
            row.known.done += emitted
            if done[slot]:
                at[slot], begins[slot] = row.job.number, len(row.job.prompt)
                held[slot] = None
        if (at < len(self.made.tokens)).any():
            self.passes += int(after.target_passes[at < len(self.made.tokens)].sum())
            self.made = _collected(self.made, state, at, begins)
        return state, held


def _ordered(jobs: Sequence[_Job]) -> list[_Job]:
    """Returns the samples of which nothing is expected, and then the longest expected texts first.

    Rows with much to draft then share passes, and no long text begins last.  The samples of a
    prompt stay together, to share its reading.
    """
    most = collections.defaultdict[tuple[int, ...], int](int)
    for job in jobs:
        name = tuple(job.prompt)
        most[name] = max(most[name], len(job.expected))

    def rank(job: _Job) -> tuple[bool, int, int]:
        length = most[tuple(job.prompt)]
        return length > 0, -length, job.number

    return sorted(jobs, key=rank)


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
    decoder: Decoder, weights: Any, row: DecodeState, documents: Array, key: Array, limit: Array
) -> DecodeState:
    """Returns a row that read its prompt, with the key, expected text and limit of a sample."""
    count, tokens = row.length - 1, row.tokens
    block = Block(tokens, jnp.zeros((*tokens.shape, 1)), count, None, documents)

    def begun(proposer: Proposer, weights: Any, state: Any) -> Any:
        """Returns the state with other documents; what was read of the prompt stays."""
        if isinstance(proposer, Narrow):
            return begun(proposer.inner, weights, state)
        if not proposer.reads_documents:
            return state
        if isinstance(proposer, FirstOf):
            parts = (proposer.first, proposer.second)
            own = weights or (None, None)
            return tuple(begun(*each) for each in zip(parts, own, state, strict=True))
        return proposer.start(weights, block, decoder.capacity)

    made = begun(decoder.proposer, weights, row.proposer)
    return dataclasses.replace(row, proposer=made, key=key[None], limit=limit)


@jax.jit
def _taken(state: DecodeState, rows: Array) -> DecodeState:
    return jax.tree.map(lambda x: x[rows], state)


@functools.partial(jax.jit, donate_argnums=0)
def _collected(made: Rollouts, state: DecodeState, at: Array, begins: Array) -> Rollouts:
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
    tokens, mask, logprobs, raw, ended = (
        old.at[at].set(part, mode="drop") for old, part in zip(kept, parts, strict=True)
    )
    return Rollouts(tokens, mask, logprobs, raw, ended)
