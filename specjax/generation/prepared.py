"""`prepare`: checks a request on the host, and says what will decode it.

    Request -> prepare -> Prepared -> warm_up -> Ready -> decode -> Output

Nothing is read from a disk, put on a device or compiled here, and the weights of the models are not
read: only the shapes of the models matter.  So a request can be refused while the devices work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from specjax._internal.checks import (
    each,
    flag,
    hashable,
    instance,
    items,
    number,
    settle,
    shown,
    whole,
)
from specjax.caches import SPARE_SLOTS
from specjax.constraints import Matcher, check_least, constraints_of, matchers_of
from specjax.contract import Proposer, Rule
from specjax.decoding import Decoder, eos_of_rows, slots_ahead
from specjax.drafters import AdaptiveDrafter
from specjax.generation.choose_drafter import choose_drafter
from specjax.generation.prompts import (
    bad_word_ids,
    conversations,
    documents_of,
    encode,
    ends_of,
    padded_length,
)
from specjax.generation.request import DEPTH, Request, check_models
from specjax.methods import Drafter
from specjax.models import LanguageModel, for_several_devices
from specjax.overlap import Overlapped, overlapped
from specjax.parallel import mesh_holding, mesh_of, row_parts
from specjax.processors import Processors
from specjax.rules import RULES, Match, SyntheticAcceptance
from specjax.sampling import Sampling, temperatures
from specjax.text import Texts
from specjax.tuning import contexts_of

_GREATEST = 2**31 - 1
_SLOTS_STEP = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A checked request of B prompts; every array is a NumPy array on the host."""

    target: LanguageModel
    decoder: Decoder
    drafter: Drafter
    slots: np.ndarray | None  # of the adapter of each row, as `Drafter.slots` returns them
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
    def padding(self) -> int:
        """The number of rows to add so that the mesh divides the batch."""
        parts = row_parts(self.mesh)
        if self.overlapped is not None:
            parts = math.lcm(parts, row_parts(self.overlapped.draft_mesh))
        return -len(self.lengths) % parts

    @property
    def context(self) -> int:
        """The most tokens of a text, prompt included."""
        return int(self.lengths.max()) + self.new

    @property
    def contexts(self) -> tuple[int, ...]:
        """The contexts by which an adaptive drafter has costs."""
        return self.drafter.contexts if isinstance(self.drafter, AdaptiveDrafter) else ()

    @property
    def samples(self) -> bool:
        """True if a row has a temperature above 0."""
        return bool(np.any(np.asarray(self.sampling.temperature) > 0))


def prepare(
    target: LanguageModel,
    request: Request,
    *,
    stream: bool = False,
    mesh: Mesh | None = None,
    draft_mesh: Mesh | None = None,
) -> Prepared:
    """Checks each field of a request whose models are loaded, and chooses what decodes it.

    Args:
      target: the model.
      request: one that `load_named` returned, or that names no model.
      stream, mesh, draft_mesh: as for `generate`.

    Raises:
      ValueError: a field that cannot be used, with its name, its value and what to pass instead.
    """
    check_models(target, mesh, draft_mesh)
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
    rule, stream, stops = _rule(request), flag("stream", stream), _stops(target, request.stop)
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
        target, request, rule, heat, mesh if draft_mesh is None else draft_mesh, longest + new
    )
    if isinstance(rule, SyntheticAcceptance):
        most = drafter.proposer.max_depth if drafts is None else int(drafts.max())
        rule.check_depth(min(drafter.proposer.max_depth, most))
    check_length("target", target, ids, new)
    if drafter.reader is not None:
        check_length("draft", drafter.reader, ids, new)
    learns = isinstance(drafter, AdaptiveDrafter) and drafter.seconds is None
    if isinstance(drafter, AdaptiveDrafter) and learns:
        drafter = dataclasses.replace(drafter, contexts=contexts_of(longest + new))
    slots = drafter.slots(request.adapter, rows)
    drafter.check(target)
    proposer = drafter.proposer
    documents = documents_of(target, request.documents, rows, proposer, request.expected)
    width = padded_length(longest)
    capacity = capacity_for(proposer, width, longest + new)
    decoder = Decoder(
        target.model, proposer, rule, target.eos, capacity, request.logits_processor, logprobs
    )
    apart = None
    if draft_mesh is not None and mesh is not None:
        apart = overlapped(decoder, draft_mesh, mesh)
    prompt = np.zeros((rows, width), np.int32)
    for row, tokens in zip(prompt, ids, strict=True):
        row[: len(tokens)] = tokens
    return Prepared(
        target=target,
        decoder=decoder,
        drafter=drafter,
        slots=slots,
        learns=learns,
        mesh=mesh,
        overlapped=apart,
        prompt=prompt,
        lengths=np.array([len(row) for row in ids], np.int32),
        new=new,
        num_drafts=drafts,
        documents=documents,
        eos=eos_of_rows(ends),
        seeds=seeds,
        sampling=Sampling.on_host(rows, **settings),
        processors=processors,
        matchers=matchers,
        texts=Texts(target, [row[-1] for row in ids], stops),
        stream=stream,
        single=single,
    )


def _check_host(draft_mesh: Mesh | None) -> None:
    """Raises ValueError where the host cannot follow grammars between two programs."""
    settle(
        (
            draft_mesh is not None,
            "draft_mesh= drafts while the target verifies, and the host follows a Grammar between "
            "the two: leave draft_mesh= out, or pass a specjax.Regex or a specjax.JSONSchema",
        ),
        (
            jax.process_count() > 1,
            f"a Grammar is followed by one host, and there are {jax.process_count()} processes: "
            "decode in one, or pass a specjax.Regex or a specjax.JSONSchema",
        ),
    )


def _ids(target: LanguageModel, request: Request) -> tuple[list[list[int]], bool]:
    """Returns the token ids of each prompt or conversation, and True if it was not in a list."""
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


def capacity_for(proposer: Proposer, width: int, longest: int) -> int:
    """Returns the capacity of a decoder for prompts padded to `width` and texts up to `longest`.

    The slots of the cache, with those for staged tokens, fill a TPU's vectors.  They are rounded
    up, so that calls of similar lengths share compiled programs.
    """
    staged = slots_ahead(proposer) + SPARE_SLOTS
    least = max(width, longest, proposer.num_nodes) + staged
    return -(-least // _SLOTS_STEP) * _SLOTS_STEP - staged


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
    """Returns the seed of each row [B] uint32, and a number [B] int32 folded into its key.

    The number is the row's index if all rows share one seed, and 0 if each row has its own seed.
    """
    wanted = "a whole number; it must lie in [0, 2^32)"
    seeds = [whole("seed", value, 0, 2**32 - 1, wanted) for value in each("seed", seed, rows)]
    index = np.arange(rows, dtype=np.int32)
    return np.array(seeds, np.uint32), index if items(seed) is None else np.zeros_like(index)


def _rule(request: Request) -> Rule:
    rule: object = request.rule
    synthetic: object = request.synthetic_acceptance
    if synthetic is not None:
        for name in ("rule", "constraint"):
            if (value := getattr(request, name)) is not None:
                raise ValueError(
                    f"synthetic_acceptance={shown(synthetic)} accepts drafts whatever they are, "
                    f"and {name}={shown(value)} cannot hold then: leave one of them out"
                )
        if isinstance(synthetic, SyntheticAcceptance):
            return synthetic
        plain = number(synthetic)
        if plain is None or not 0 <= plain <= 1:
            raise ValueError(
                f"synthetic_acceptance={shown(synthetic)}; it must lie in [0, 1], or be "
                "SyntheticAcceptance(length=...) for a mean number of tokens a pass"
            )
        return SyntheticAcceptance(rate=float(plain))
    if rule is None:
        return Match()
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]()
    known = f"one of {', '.join(RULES)}, or a rule such as specjax.Match()"
    made = instance("rule", rule, Rule, known)
    hashable("rule", made)
    return made


def _stops(target: LanguageModel, stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else items(stop)
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"stop={shown(stop)} is not allowed; it must be a text, a list of texts, or None; "
            "remove an empty string, which every text contains"
        )
    if texts and target.tokenizer is None:
        raise ValueError(f"stop={shown(stop)} needs a tokenizer, and {target.name} has none")
    return tuple(texts)
