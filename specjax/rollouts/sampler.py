"""`Sampler`: samples of many prompts under weights that change, with old texts as drafts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.checks import listed, typed, whole
from specjax.contract import Proposer
from specjax.decoding import Decoder
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
from specjax.parallel import mesh_of, row_parts
from specjax.proposers import NGram, NoProposer
from specjax.rollouts.depths import Depths
from specjax.rollouts.keys import prompt_digest
from specjax.rollouts.narrow import Narrow
from specjax.rollouts.running import Job, Programs, run
from specjax.rules import Match
from specjax.sampling import Sampling, keys_of_rows
from specjax.types import ABSENT, Params, Weights

_DEPTH = 15
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
          ValueError: a setting that cannot be used, or `slots` that do not divide among the devices
            over which the target's mesh splits rows.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        self.target = target
        self.slots = whole("slots", slots, 1, 2**16, "a whole number, 1 or more")
        self._parts = row_parts(mesh_of(target.params))
        if slots % self._parts:
            raise ValueError(
                f"slots={slots} do not divide among the {self._parts} devices along the mesh axis "
                f"of rows: pass slots={slots + -slots % self._parts}"
            )
        most = target.model.max_positions
        self.new = whole("max_new_tokens", max_new_tokens, 1, most, f"in [1, {most}]")
        self._drafting = self._looking = _drafting(target, num_drafts, drafter, self._parts)
        if self._drafting is not None and drafter is None:
            # Samples of other keys are looked up with noise.
            depth = self._drafting.depths.options[-1]
            found = BoundDrafter(expecting(depth, drawn=True))
            self._looking = _Drafting(found, Depths(depth, together=self._parts))
        self._proposed = None if self._drafting is None else self._drafting.drafter.arrays(target)
        self._always = drafter is not None  # it drafts for rows without documents, too
        self._plain = _Drafting(BoundDrafter(NoProposer()), Depths(0, together=self._parts))
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
            lists, such as `Memory.documents` returns: those of other keys.  Without `expected` a
            draft is drawn from what followed there, with the row's noise (`NGram(drawn=True)`).

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
        # Where there is nothing to draft from, rows decode plainly.
        drafting = self._looking if expected is None else self._drafting
        looks = bool((found != ABSENT).any())
        if drafting is None or not (self._always or looks):
            drafting = self._plain
        elif drafting.drafter.reader is not None:
            check_length("draft", drafting.drafter.reader, rows, self.new)
        carries = self._always and drafting is not self._plain
        longest = max(map(len, rows))
        width = padded_length(longest)
        largest = (self._drafting or self._plain).drafter.proposer
        capacity = capacity_for(largest, width, longest + self.new)

        def decoder(proposer: Proposer) -> Decoder:
            ends = tuple(self._ends)
            model = self.target.model
            return Decoder(model, proposer, Match(), ends, capacity, None, 0, draws_at_once=True)

        drafts = {depth: decoder(drafting.narrowed(depth)) for depth in drafting.depths.options}
        reads = drafts[drafting.depths.options[-1]]
        if not carries:
            drafts[0] = decoder(NoProposer())
            reads = decoder(NoProposer(largest.num_nodes))
        programs = Programs(
            reads, drafts, drafting.depths, carries, self._weights(params, drafting), width,
            self.slots, self.new, self._settings, self._ends,
        )  # fmt: skip
        words = np.asarray(jax.random.key_data(keys))
        jobs = [
            Job(
                n, rows[n // samples], words[n], found[n] if carries or looks else None, given[n],
                most[n],
            )
            for n in range(count)
        ]  # fmt: skip
        made, passes = run(programs, _ordered(jobs))
        return Rollouts(
            made.tokens, made.mask, made.logprobs, made.raw_logprobs, made.ended, passes
        )

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
        # What no sample has of its own is encoded once for all samples of a prompt.
        own = 1 if expected is None else samples
        lists = [listed("documents", some, kinds) for some in each for _ in range(own)]
        given = [None] * len(lists) if expected is None else expected
        found = documents_of(self.target, lists, len(lists), NGram(), given)
        assert found is not None
        return np.repeat(_padded(found, self.new + 2), count // len(lists), axis=0)

    def _weights(self, params: Weights | None, drafting: _Drafting) -> Params:
        own = self.target.params
        if params is not None:
            _check_weights(self.target, params, own)
        proposed = None if drafting is self._plain else self._proposed
        if params is not None and mesh_of(own) is not None:
            params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, own))
        return Params(own if params is None else params, proposed)


def _drafting(
    target: LanguageModel, num_drafts: int | None, given: Drafter | Proposer | None, parts: int
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
        return _Drafting(BoundDrafter(expecting(depth)), Depths(depth, together=parts))
    both = first_of(expecting(depth), given)
    return _Drafting(both, Depths(depth, both.proposer.is_chain, _MODEL, parts))


def _ordered(jobs: Sequence[Job]) -> list[Job]:
    """Returns the samples of which nothing is expected, and then the longest expected texts first.

    Rows with much to draft then share passes, and no long text begins last.  The samples of a
    prompt stay together, to share its reading.
    """
    most = collections.defaultdict[tuple[int, ...], int](int)
    for job in jobs:
        name = tuple(job.prompt)
        most[name] = max(most[name], len(job.expected))

    def rank(job: Job) -> tuple[bool, int, int]:
        length = most[tuple(job.prompt)]
        return length > 0, -length, job.number

    return sorted(jobs, key=rank)


def _check_weights(target: LanguageModel, params: object, own: Weights) -> None:
    """Raises ValueError unless the arrays have the names, shapes and dtypes of `own`."""
    given, wanted = (
        {
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        for tree in (params, own)
    )
    start = f"params are no weights of {target.name}: "
    for path in [*wanted, *given]:
        if path not in wanted or path not in given:
            which = "has no place" if path in given else "is missing"
            raise ValueError(f"{start}{path or 'params'} {which}; pass a tree like target.params")
        if not hasattr(given[path], "dtype"):
            raise ValueError(f"{start}{path} is no array; pass a tree like target.params")
        kinds = [(np.shape(x), x.dtype.name) for x in (given[path], wanted[path])]
        if kinds[0] != kinds[1]:
            (shape, dtype), (own_shape, own_dtype) = kinds
            cure = "pass a tree like target.params"
            if target.keeps_bfloat16 and dtype != own_dtype:  # to round them would be no cure
                cure = f"load {target.name} without keep_bfloat16=True"
            raise ValueError(
                f"{start}{path} is {dtype}{list(shape)}, and must be {own_dtype}{list(own_shape)}; "
                f"{cure}"
            )


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
