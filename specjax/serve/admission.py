"""Converts a `Request` into the numbers of a row, with every check before the request waits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from specjax._internal.checks import items, reworded, settle, shown, typed, whole
from specjax.constraints import Grammar, constraints_of
from specjax.drafters import AdaptiveDrafter
from specjax.generation import (
    Prepared,
    Request,
    bad_word_ids,
    encode,
    ends_of,
    expected_of,
    prepare,
)
from specjax.methods import BoundDrafter, Drafter
from specjax.models import LanguageModel
from specjax.processors import Processors
from specjax.proposers import Adaptive, FirstOf, NoProposer
from specjax.serve.batch import Row
from specjax.serve.per_row import PLAIN
from specjax.serve.resuming import Delivered

NONE = "none"
"""The name of plain decoding among the drafters of an engine."""

BOTH = "+"
"""The separator between two drafters of a request."""

_REFUSED = {
    "drafter": "proposer= with the name of a drafter that the engine was made with",
    "draft": "drafters= of the engine, with specjax.make_drafter(target, draft)",
    "draft_window": "drafters= of the engine, with specjax.window_draft(draft, window)",
    "draft_dtype": "drafters= of the engine, with specjax.make_drafter(..., dtype=)",
    "speculative_config": "proposer= and num_drafts=",
    "documents": "a datastore among the drafters of the engine",
    "rule": "nothing: an engine decodes with match, so that a text depends on its seed alone",
    "synthetic_acceptance": "synthetic_acceptance= to the engine, for all requests",
    "logits_processor": "logit_bias=: a function would be compiled while others wait",
}
"""Fields of a request that an engine does not support, and what to pass instead."""

_PLAIN = BoundDrafter(NoProposer())

_HONOURED = {
    "prompts", "messages", "chat_template_kwargs", "proposer", "adapter", "num_drafts",
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_new_tokens", "eos",
    "seed", "stop", "logprobs", "constraint", "expected",
}  # fmt: skip
"""Fields that an engine supports; a value of any other field is refused, never dropped silently."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A drafter of an engine."""

    name: str
    drafter: Drafter
    adapters: tuple[str, ...]  # in the order of their slots; () if it has none


def load_all(target: LanguageModel, drafters: Mapping[str, Drafter]) -> tuple[Loaded, ...]:
    """Returns the drafters by name, each checked.

    Raises:
      ValueError: a name or a drafter that an engine cannot use.
    """
    loaded = []
    for name, drafter in drafters.items():
        if not isinstance(name, str) or not name or name == NONE or BOTH in name:
            raise ValueError(
                f"drafters has the name {shown(name)}; pass a text without {BOTH!r}, and not "
                f"{NONE!r}, which is plain decoding"
            )
        called = f"drafters[{name!r}]"
        loaders = "what make_drafter, load_drafter or drafter_by_name returns"
        typed(loaders, Drafter, **{called: drafter})
        proposer = drafter.proposer
        settle(
            (
                isinstance(drafter, AdaptiveDrafter) or isinstance(proposer, Adaptive | FirstOf),
                f"{called} chooses between drafters for a whole batch: pass its parts under names "
                f"of their own, and name both in a request, as 'lookup{BOTH}draft'",
            ),
            (
                proposer.shares_cache,
                f"{called} drafts in the target's cache and can only be used alone, with generate: "
                "leave it out",
            ),
            (
                isinstance(proposer, NoProposer),
                f"{called} drafts nothing: leave it out; {NONE!r} is known",
            ),
        )
        drafter.check(target)
        if drafter.has_adapters and not drafter.adapter_names:
            raise ValueError(
                f"drafters[{name!r}] arranges Medusa heads in another shape than their tree: pass "
                "the heads, or a MedusaBank"
            )
        loaded.append(Loaded(name, drafter, drafter.adapter_names))
    return tuple(loaded)


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A request that an engine can serve, as often as there are indices."""

    row: Row  # of the index 0
    prepared: Prepared  # for `decode`, which gives the same text
    logprobs: int | None
    capped: bool = False  # the request says how many drafts a step may have


@dataclasses.dataclass(frozen=True)
class Checker:
    """Checks requests against the limits and drafters of an engine."""

    target: LanguageModel
    loaded: tuple[Loaded, ...]
    room: int  # the most tokens of prompt and output
    logprobs: int | None
    num_eos: int  # the most ids that end a text
    default: str | None  # the drafter of requests that name none; None: the first one
    constraint_size: tuple[int, int] | None  # states and classes of an automaton; None: no room
    expected: int | None  # drafts of a step from an expected text; None: no room

    def admit(self, request: Request) -> Admitted:
        """Checks a request on the host.

        Raises:
          ValueError: a field that cannot be used.
        """
        typed("a specjax.Request", Request, request=request)
        for field in dataclasses.fields(Request):
            if field.name not in _HONOURED and getattr(request, field.name) is not field.default:
                cure = _REFUSED.get(field.name, "it to generate")
                raise ValueError(f"{field.name}= is not used by an engine: pass {cure}")
        hosted = isinstance(request.constraint, Grammar)  # refused below, whatever the room
        if request.constraint is not None and self.constraint_size is None and not hosted:
            raise ValueError(
                f"constraint={shown(request.constraint)}, and this engine has no room for one: "
                "make it with constraint_size=(512, 256)"
            )
        parts, adapter = self._parts(request.proposer, request.adapter)
        expected = self._expected(request.expected)
        most = min((part.drafter.proposer.max_depth for part in parts), default=0)
        if len(expected):
            most = max(most, self.expected or 0)
        drafts = most
        if request.num_drafts is not None:
            names = [*["expected"] * (len(expected) > 0), *(part.name for part in parts)]
            named = f"{BOTH}".join(names) or NONE
            drafts = whole(
                "num_drafts", request.num_drafts, 0, most,
                f"a whole number in [0, {most}], since {named} drafts {most} tokens",
            )  # fmt: skip
        asks = {"proposer": None, "drafter": _PLAIN, "num_drafts": None, "adapter": None,
                "expected": None}  # fmt: skip
        prepared = prepare(self.target, dataclasses.replace(request, **asks))
        if len(prepared.lengths) != 1:
            raise ValueError(
                f"the request has {len(prepared.lengths)} prompts; submit each one on its own"
            )
        count = int(prepared.lengths[0])
        self._check_length(count, prepared.new, parts)
        recorded = -1 if self.logprobs is None else self.logprobs
        known = "none" if self.logprobs is None else f"at most {self.logprobs}"
        ends = prepared.eos[0][prepared.eos[0] >= 0]
        settle(
            (
                request.logprobs is not None and request.logprobs > recorded,
                f"logprobs={request.logprobs}, and this engine records {known}: make it with "
                f"logprobs={request.logprobs}",
            ),
            (
                len(ends) > self.num_eos,
                f"eos has {len(ends)} ids; an engine takes at most {self.num_eos}",
            ),
        )
        eos = np.full((1, self.num_eos), -1, np.int32)
        eos[0, : len(ends)] = ends
        unused = prepared.processors is None and request.constraint is None
        processors = self._unused if unused else self._processors(request, prepared.new)
        choice = [self.loaded.index(part) for part in parts]
        choice += [PLAIN] * (2 - len(choice))
        row = Row(
            tokens=prepared.prompt[0, :count],
            limit=count + prepared.new,
            num_drafts=drafts,
            sampling=prepared.sampling,
            seed=int(prepared.seeds[0][0]),
            index=0,
            processors=processors,
            eos=eos,
            choice=(choice[0], choice[1]),
            adapter=adapter,
            expected=expected[: prepared.new],
        )
        return Admitted(row, prepared, request.logprobs, request.num_drafts is not None)

    def expecting(self, admitted: Admitted, tokens: Sequence[int]) -> Admitted:
        """Returns a request of which these tokens are expected.

        Raises:
          ValueError: tokens that are none of the vocabulary, or there is no room for them.
        """
        expected = self._expected([list(tokens)])[: admitted.prepared.new]
        row = admitted.row
        drafts = row.num_drafts if admitted.capped else max(row.num_drafts, self.expected or 0)
        row = dataclasses.replace(row, expected=expected, num_drafts=drafts)
        return dataclasses.replace(admitted, row=row)

    def resumed(
        self, admitted: Admitted, given: object, fast: bool
    ) -> tuple[Admitted, Delivered, bool]:
        """Returns a request that goes on after the tokens that were delivered.

        Args:
          admitted: the request.
          given: the tokens, or a `Delivered`.
          fast: read them with the prompt.

        Returns:
          The request, what was delivered, and True if it is not written again.

        Raises:
          ValueError: tokens that are none, or more than the request may have.
        """
        row, new = admitted.row, admitted.prepared.new
        tokens: list[int] | None = None
        delivered = given if isinstance(given, Delivered) else Delivered()
        if not isinstance(given, Delivered) or given.tokens is not None:
            kind = "a list of token ids"
            listed = items(given.tokens if isinstance(given, Delivered) else given)
            if listed is None:
                raise ValueError(f"resume={shown(given)}; pass {kind}")
            with reworded("resume: "):
                tokens = encode(self.target, [listed], "text")[0] if listed else []
            delivered = Delivered(len(tokens), tuple(tokens), delivered.digest)
        if delivered.count > new:
            raise ValueError(
                f"resume has {delivered.count} tokens, and max_new_tokens={new}: pass the same "
                "max_new_tokens as in the request whose text is resumed"
            )
        if fast and tokens is None:
            raise ValueError("fast=True reads the tokens that were delivered: pass them as resume=")
        if tokens is None:
            return admitted, delivered, False
        hints = row.expected
        known = np.array(tokens, np.int32)
        if fast and not self._is_whole(admitted, tokens):
            row = dataclasses.replace(
                row,
                tokens=np.concatenate([row.tokens, known]),
                delivered=len(tokens),
                expected=hints[len(tokens) :],
            )
            return dataclasses.replace(admitted, row=row), delivered, True
        if self.expected is not None:
            agrees = np.array_equal(hints[: len(known)], known[: len(hints)])
            more = hints[len(known) :].tolist() if agrees else []
            return self.expecting(admitted, [*tokens, *more]), delivered, False
        return admitted, delivered, False

    def _is_whole(self, admitted: Admitted, tokens: list[int]) -> bool:
        """Returns whether nothing can follow the tokens of a text."""
        prepared = admitted.prepared
        ended = tokens and tokens[-1] in set(prepared.eos[0].tolist())
        return len(tokens) == prepared.new or bool(ended) or prepared.texts.cut(0, tokens)[2]

    def _expected(self, given: object) -> np.ndarray:
        """Returns the tokens that are expected of a request, none by default."""
        if given is None:
            return np.zeros(0, np.int32)
        if self.expected is None:
            raise ValueError(
                f"expected={shown(given)}, and this engine has no room for it: make it with "
                "expected=8"
            )
        return np.array(expected_of(self.target, given, 1)[0] or [], np.int32)

    def _check_length(self, count: int, new: int, parts: list[Loaded]) -> None:
        rooms = [(self.room, "a slot of this engine")]
        for part in parts:
            if part.drafter.reader is not None:
                most = part.drafter.reader.model.max_positions
                rooms.append((most, f"the draft of {part.name!r}"))
        room, who = min(rooms)
        if count + new > room:
            cure = f"pass max_new_tokens={room - count} or less" if count < room else "shorten it"
            raise ValueError(
                f"the prompt has {count} tokens, and max_new_tokens={new} make {count + new}, but "
                f"{who} holds {room}: {cure}"
            )

    def _parts(self, names: object, adapter: object) -> tuple[list[Loaded], int]:
        """Returns the drafters of a request, and the slot of its adapter."""
        known = {part.name: part for part in self.loaded}
        if names is None:
            names = self._usual(adapter)
        if names is None:
            parts = list(self.loaded[:1])
        elif names == NONE:
            parts = []
        else:
            words = names.split(BOTH) if isinstance(names, str) else []
            if (
                not 1 <= len(words) <= 2
                or not set(words) <= set(known)
                or len(set(words)) < len(words)
            ):
                listed = ", ".join([NONE, *known])
                raise ValueError(
                    f"proposer={shown(names)} is none of the drafters of this engine: pass one of "
                    f"{listed}, or two of them as first{BOTH}second"
                )
            parts = [known[word] for word in words]
        banks = [part for part in parts if part.adapters]
        if adapter is None:
            several = [part for part in banks if len(part.adapters) > 1]
            if several:
                raise ValueError(
                    f"the drafter {several[0].name!r} has several adapters: pass adapter= with one "
                    f"of {', '.join(several[0].adapters)}"
                )
            return parts, 0 if banks else -1
        owners = [part for part in banks if adapter in part.adapters]
        if not owners:
            offered = [name for part in banks for name in part.adapters]
            have = f"they have {', '.join(offered)}" if offered else "they have none"
            others = [f"{part.name!r} has {', '.join(part.adapters)}"
                      for part in self.loaded if part.adapters and part not in parts]  # fmt: skip
            have = "; ".join([have, *others])
            raise ValueError(
                f"there is no adapter {shown(adapter)} in the drafters of this request; {have}"
            )
        return parts, owners[0].adapters.index(str(adapter))

    def _usual(self, adapter: object) -> str | None:
        """Returns the default drafters, or the one that has the adapter that the request names."""
        known = {part.name: part for part in self.loaded}
        usual = self.default.split(BOTH) if self.default else list(known)[:1]
        if adapter is not None and not any(
            name in known and adapter in known[name].adapters for name in usual
        ):
            owners = [part.name for part in self.loaded if adapter in part.adapters]
            return owners[0] if owners else self.default
        return self.default

    @functools.cached_property
    def _unused(self) -> Processors:
        """The processors of a row whose settings are all off."""
        size = self.target.model.vocab_size
        made = Processors.create(1, size, constraint_size=self.constraint_size, every=True)
        assert made is not None
        return made

    def _processors(self, request: Request, new: int) -> Processors | None:
        target = self.target
        ends = ends_of(target, request.eos, 1)
        made = Processors.create(
            1,
            target.model.vocab_size,
            repetition_penalty=target.settings(repetition_penalty=request.repetition_penalty)[
                "repetition_penalty"
            ],
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            bad_words=bad_word_ids(target, request.bad_words, ends),
            min_new_tokens=request.min_new_tokens,
            constraint=constraints_of(target, request.constraint, ends, new),
            constraint_size=self.constraint_size,
            every=True,
        )
        unused = self._unused.phrases
        assert made is not None and made.phrases is not None and unused is not None
        if made.phrases.shape != unused.shape:
            _, most, length = unused.shape
            raise ValueError(
                f"bad_words has more than {most} phrases, or one of more than {length} tokens: an "
                "engine takes no more (words of one token do not count)"
            )
        return made
