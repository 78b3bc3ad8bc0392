"""`Call`: a `Request`, checked on the host before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from specjax._internal.checks import each, flag, hashable, items, shown, whole
from specjax.caches import SPARE_SLOTS
from specjax.constraints import Matcher, check_least, constraints_of, matchers_of
from specjax.contract import Arrays, Rule
from specjax.decoding import Decoder, Guided, eos_of_rows, slots_ahead
from specjax.drafters import AdaptiveDrafter
from specjax.generation.choose_drafter import DEPTH, choose_drafter
from specjax.generation.prompts import (
    bad_word_ids,
    conversations,
    documents_of,
    encode,
    ends_of,
    padded_length,
)
from specjax.generation.request import Request
from specjax.methods import MakeArrays, MedusaParams
from specjax.models import LanguageModel, for_several_devices
from specjax.overlap import Overlapped, overlapped
from specjax.parallel import mesh_holding, mesh_of, replicate, row_parts, shard_params
from specjax.processors import Processors
from specjax.rules import RULES, Match
from specjax.sampling import Sampling, make_key, temperatures
from specjax.text import Texts
from specjax.types import ABSENT, Params

_GREATEST = 2**31 - 1
_SLOTS_STEP = 128
WARM_STEPS = 16
"""The number of steps that `Call.compile` runs.  Several are needed because on a CPU a matrix
product is slow the first time, and prompt lookup runs the wide pass only when it finds a match."""

ArraysT = TypeVar("ArraysT")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A checked call of `generate` with B prompts; nothing has been moved or compiled yet."""

    target: LanguageModel
    decoder: Decoder
    make_arrays: MakeArrays  # for the proposer
    learns: bool  # an `Adaptive` proposer whose costs are to be measured
    mesh: Mesh | None
    overlapped: Overlapped | None  # decodes instead of the decoder, if the draft has its own mesh
    prompt: np.ndarray  # [B, P] int32, padded on the right
    lengths: np.ndarray  # [B] int32
    new: int  # the most new tokens of a row
    num_drafts: np.ndarray | None  # [B] int32; None: no limit below that of the proposer
    documents: np.ndarray | None  # [B, X] int32, as in `Block.documents`
    eos: np.ndarray  # [B, ids] int32
    seeds: tuple[np.ndarray, np.ndarray]  # as `seeds_of` returns them
    sampling: Sampling
    processors: Processors | None
    matchers: list[Callable[[], Matcher] | None] | None  # of each row; None: there is no grammar
    texts: Texts
    stream: bool
    single: bool  # the prompt was given alone, not in a list

    @property
    def params(self) -> Params:
        """The weights on their devices.

        The first access moves the weights and makes those of the proposer, which may compile.
        """
        return self._apart if self.runner is self.overlapped else self._together

    @functools.cached_property
    def _apart(self) -> Params:
        params = Params(self.target.params, self.make_arrays(self.target))
        return params if self.overlapped is None else self.overlapped.place(params)

    @functools.cached_property
    def _together(self) -> Params:
        laid = self.target
        if self.mesh is not None:
            laid = dataclasses.replace(
                laid, params=shard_params(laid.model, laid.params, self.mesh)
            )
        weights = replicate(self.make_arrays(laid), self.mesh)

        def pad(part: Arrays) -> Arrays:
            if not isinstance(part, MedusaParams):
                return part
            return dataclasses.replace(part, adapter=pad_rows(part.adapter, self._padding))

        weights = jax.tree.map(pad, weights, is_leaf=lambda part: isinstance(part, MedusaParams))
        return Params(laid.params, weights)

    @property
    def _padding(self) -> int:
        """Rows to add so that the mesh divides the batch."""
        parts = row_parts(self.mesh)
        if self.overlapped is not None:
            parts = math.lcm(parts, row_parts(self.overlapped.draft_mesh))
        return -len(self.lengths) % parts

    @property
    def runner(self) -> Any:
        """What decodes: the decoder, or one with the same methods for two meshes or grammars."""
        if self.matchers is not None:
            free = [None] * self._padding
            lengths = pad_rows(self.lengths, self._padding)
            return Guided(self.decoder, [*self.matchers, *free], lengths)
        return self.overlapped if self.overlapped and not self.overlapped.alone else self.decoder

    def prefill(self, params: Params, endless: bool = False) -> Any:
        """Read the prompts, with the parameters that will decode.

        With `endless`, a row ends only where it has no more room.
        """
        return self.runner.prefill(params, **self._inputs(endless))

    def _inputs(self, endless: bool = False) -> dict[str, Any]:
        """The arguments of `Decoder.prefill`."""
        seeds, rows = self.seeds
        arrays = {
            "prompt": self.prompt,
            "prompt_length": self.lengths,
            "sampling": self.sampling,
            "key": jax.vmap(lambda seed, row: jax.random.fold_in(make_key(seed), row))(seeds, rows),
            "num_drafts": self.num_drafts,
            "documents": self.documents,
            "processors": self.processors,
            "eos": self.eos,
        }
        # A padding row has no room for new tokens, so it is done at once and is not counted.
        wanted = np.arange(len(rows) + self._padding) < len(rows)
        limit = pad_rows(self.lengths, self._padding) + np.int32(self.new) * wanted
        if endless:
            room = min(self.decoder.capacity, self.target.model.max_positions + 1)
            limit = np.where(wanted, room, limit)
            arrays["eos"] = np.full_like(self.eos, ABSENT)
        return {"limit": limit.astype(np.int32), **pad_rows(arrays, self._padding)}

    def compile(self) -> None:
        """Compile everything that decoding runs, by a prefill and a few steps."""
        if self.overlapped is not None and not self.overlapped.alone:
            self._compile_apart(self.overlapped)
            if not self.overlapped.alone:
                return
        states = self.runner.stream(
            self.params, self.prefill(self.params), steps_per_chunk=WARM_STEPS
        )
        state = next(states)
        with contextlib.suppress(StopIteration):
            states.send(np.ones(state.done.shape, bool))

    def _compile_apart(self, apart: Overlapped) -> None:
        """Compile for two meshes, and find out whether they pay."""
        apart.compile(self.params, self.prefill(self.params))
        if jax.process_count() == 1:  # else each process would measure other times
            endless = functools.partial(self._inputs, endless=True)
            apart.compare(self._apart, self._together, endless)


def check(
    target: LanguageModel,
    request: Request,
    stream: bool = False,
    mesh: Mesh | None = None,
    draft_mesh: Mesh | None = None,
) -> Call:
    """The call that a request asks for, with each of its fields checked.

    Raises:
      ValueError: a field that cannot be used, with its name, its value and what to pass instead.
    """
    if not isinstance(target, LanguageModel):
        raise ValueError(
            f"target is a {type(target).__name__}; pass what specjax.load(folder) returns"
        )
    for name, given in (("mesh", mesh), ("draft_mesh", draft_mesh)):
        if not isinstance(given, Mesh | None):
            raise ValueError(
                f"{name}={shown(given)} is not a mesh; pass what specjax.make_mesh returns"
            )
    mesh = mesh_of(target.params) if mesh is None else mesh
    if mesh is not None and mesh.size > 1:
        target = for_several_devices(target)
    if draft_mesh is not None:
        if mesh is None and jax.process_count() > 1:
            raise ValueError(
                f"draft_mesh= was given, but no mesh of the target, and there are "
                f"{jax.process_count()} processes: pass mesh= too, the same in every process"
            )
        mesh = mesh_holding(target.params) if mesh is None else mesh
        if request.proposer is None and request.drafter is None and request.num_drafts is None:
            # The draft itself, and not a choice between it and others in every step.
            request = dataclasses.replace(request, num_drafts=DEPTH)
    rule, stream, stops = _rule(request.rule), flag("stream", stream), _stops(target, request.stop)
    wanted = f"a whole number, at least 1 and at most {_GREATEST}"
    new = whole("max_new_tokens", request.max_new_tokens, 1, _GREATEST, wanted)
    size, logprobs = target.model.vocab_size, request.logprobs
    if logprobs is not None:
        logprobs = whole("logprobs", logprobs, 0, size, f"a whole number in [0, {size}], or None")
    ids, single = _ids(target, request)
    rows, longest = len(ids), max(map(len, ids))
    ends, seeds = ends_of(target, request.eos, rows), seeds_of(request.seed, rows)
    settings = target.settings(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
    )
    matchers, others = matchers_of(target, request.constraint, ends)
    if matchers is not None:
        _check_host(draft_mesh)
    automata = constraints_of(target, others, ends, new)
    processors = Processors.create(
        rows,
        size,
        repetition_penalty=settings.pop("repetition_penalty"),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        bad_words=bad_word_ids(target, request.bad_words, ends),
        min_new_tokens=request.min_new_tokens,
        constraint=automata,
    )
    least = None if processors is None else processors.min_length
    if least is not None and least.max() > new:
        raise ValueError(f"min_new_tokens={least.max()} is more than max_new_tokens={new}")
    check_least(automata, least)
    heat = temperatures(settings["temperature"], rows)
    drafter, drafts = choose_drafter(
        target, request, rule, heat, mesh if draft_mesh is None else draft_mesh
    )
    check_length("target", target, ids, new)
    if drafter.reader is not None:
        check_length("draft", drafter.reader, ids, new)
    make_arrays = drafter.for_rows(target, request.adapter, rows)
    proposer = drafter.proposer
    documents = documents_of(target, request.documents, rows, proposer)
    width = padded_length(longest)
    # The slots of the cache, with those for staged tokens, fill a TPU's vectors.  They are rounded
    # up, so that calls of similar lengths share compiled programs.
    staged = slots_ahead(proposer) + SPARE_SLOTS
    least = max(width, longest + new, proposer.num_nodes) + staged
    capacity = -(-least // _SLOTS_STEP) * _SLOTS_STEP - staged
    decoder = Decoder(
        target.model, proposer, rule, target.eos, capacity, request.logits_processor, logprobs
    )
    apart = None
    if draft_mesh is not None and mesh is not None:
        apart = overlapped(decoder, draft_mesh, mesh)
    # The last check, since it puts arrays onto the device.
    sampling = Sampling.create(rows, **settings)
    prompt = np.zeros((rows, width), np.int32)
    for row, tokens in zip(prompt, ids, strict=True):
        row[: len(tokens)] = tokens
    return Call(
        target=target,
        decoder=decoder,
        make_arrays=make_arrays,
        learns=isinstance(drafter, AdaptiveDrafter) and drafter.seconds is None,
        mesh=mesh,
        overlapped=apart,
        prompt=prompt,
        lengths=np.array([len(row) for row in ids], np.int32),
        new=new,
        num_drafts=drafts,
        documents=documents,
        eos=eos_of_rows(ends),
        seeds=seeds,
        sampling=sampling,
        processors=processors,
        matchers=matchers,
        texts=Texts(target, [row[-1] for row in ids], stops),
        stream=stream,
        single=single,
    )


def _check_host(draft_mesh: Mesh | None) -> None:
    """Raises ValueError where the host cannot follow grammars between two programs."""
    if draft_mesh is not None:
        raise ValueError(
            "draft_mesh= drafts while the target verifies, and the host follows a Grammar between "
            "the two: leave draft_mesh= out, or pass a specjax.Regex or a specjax.JSONSchema"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"a Grammar is followed by one host, and there are {jax.process_count()} processes: "
            "decode in one, or pass a specjax.Regex or a specjax.JSONSchema"
        )


def _ids(target: LanguageModel, request: Request) -> tuple[list[list[int]], bool]:
    """The token ids of each prompt or conversation, and True if it was a single one, not a list."""
    more = request.chat_template_kwargs
    if more is not None and (
        request.messages is None
        or not isinstance(more, Mapping)
        or not all(isinstance(name, str) for name in more)
        or {"files", "messages"} & set(more)
    ):
        raise ValueError(
            f"chat_template_kwargs={shown(more)} is not allowed; it must be a dict for "
            "the chat template, such as {'enable_thinking': False}, and needs messages="
        )
    if request.messages is None:
        prompts = () if request.prompts is None else request.prompts
        return encode(target, prompts), isinstance(request.prompts, str)
    turns = items(request.messages)
    ids = conversations(target, request.prompts, request.messages, request.chat_template_kwargs)
    return ids, bool(turns) and isinstance(turns[0], Mapping)


def check_length(role: str, model: LanguageModel, ids: list[list[int]], new: int) -> None:
    """Raises ValueError if a prompt with its new tokens has more tokens than a model can read."""
    lengths, most = [len(row) for row in ids], model.model.max_positions
    longest = max(lengths)
    if longest + new <= most:
        return
    cures = [f"shorten the prompt by {longest + new - most} tokens"]
    cures += [f"pass max_new_tokens={most - longest} or less"] * (longest < most)
    cures += ["decode without this draft"] * (role == "draft")
    raise ValueError(
        f"prompt {lengths.index(longest)} has {longest} tokens, and max_new_tokens={new} make "
        f"{longest + new}, but the {role} {model.name!r} reads at most {most}: "
        f"{', or '.join(cures)}"
    )


def seeds_of(seed: object, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The seed of each row [B] uint32, and a number [B] int32 that is folded into its key.

    The number is the row's index if all rows share one seed, and 0 if each row has its own seed.
    """
    wanted = "a whole number; it must lie in [0, 2^32)"
    seeds = [whole("seed", value, 0, 2**32 - 1, wanted) for value in each("seed", seed, rows)]
    index = np.arange(rows, dtype=np.int32)
    return np.array(seeds, np.uint32), index if items(seed) is None else np.zeros_like(index)


def pad_rows(rows: ArraysT, padding: int) -> ArraysT:
    """A pytree of arrays, each with its last row repeated `padding` times more."""
    if padding == 0:
        return rows
    return jax.tree.map(lambda x: x[np.minimum(np.arange(len(x) + padding), len(x) - 1)], rows)


def _rule(rule: object) -> Rule:
    if rule is None:
        return Match()
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(
                f"rule={rule!r} is not a rule; "
                f"pass one of {', '.join(RULES)}, or a rule such as Match()"
            )
        return RULES[rule]()
    if not isinstance(rule, Rule):
        raise ValueError(
            f"rule={shown(rule)} is not a rule; "
            f"pass an object such as specjax.Match(), or one of {', '.join(RULES)}"
        )
    hashable("rule", rule)
    return rule


def _stops(target: LanguageModel, stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else items(stop)
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"stop={shown(stop)} is not allowed; it must be a text, a list of texts, or None"
        )
    if "" in texts:
        raise ValueError("stop contains an empty string, which every text contains; remove it")
    if texts and target.tokenizer is None:
        raise ValueError(f"stop={shown(stop)} needs a tokenizer, and {target.name} has none")
    return tuple(texts)
