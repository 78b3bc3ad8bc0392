"""A `Request` to a target, read and checked on the host before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.arguments import each, flag, hashable, items, number, shown, whole
from specjax.contract import Rule
from specjax.decoding import Decoder
from specjax.drafters import MakeArrays
from specjax.drafting import choose_drafter
from specjax.models import LanguageModel
from specjax.parallel import beside, lay, mesh_of, row_parts
from specjax.prefilling import eos_of_rows
from specjax.processors import Processors, tokens_of, word_list
from specjax.proposers import MedusaParams
from specjax.request import Prompts, Request
from specjax.rules import RULES, Match
from specjax.sampling import Sampling, make_key
from specjax.text import Texts, render
from specjax.types import DecodeState, Params

_GREATEST = 2**31 - 1
_CAPACITY_STEP = 128
_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of `generate` of B prompts, checked; nothing of it is compiled or moved yet."""

    target: LanguageModel
    decoder: Decoder
    make_arrays: MakeArrays  # of the proposer
    mesh: Mesh | None
    prompt: np.ndarray  # [B, P] int32, padded on the right
    lengths: np.ndarray  # [B] int32
    new: int  # tokens a row at most
    num_drafts: np.ndarray | None  # [B] int32; None: as deep as the proposer guesses
    eos: np.ndarray  # [B, ids] int32
    seeds: tuple[
        np.ndarray, np.ndarray
    ]  # [B] uint32; [B] int32 tells apart rows of one seed for all
    sampling: Sampling
    processors: Processors | None
    texts: Texts
    stream: bool
    single: bool  # one prompt, not in a list

    @functools.cached_property
    def params(self) -> Params:
        """The weights where they will be used; made, and so perhaps compiled, at first use."""
        laid = self.target
        if self.mesh is not None:
            laid = dataclasses.replace(laid, params=lay(laid.model, laid.params, self.mesh))
        weights = beside(self.make_arrays(laid), self.mesh)

        def pad(part: Any) -> Any:
            heads = isinstance(part, MedusaParams)
            return (
                dataclasses.replace(part, adapter=pad_rows(part.adapter, self._padding))
                if heads
                else part
            )

        weights = jax.tree.map(pad, weights, is_leaf=lambda part: isinstance(part, MedusaParams))
        return Params(laid.params, weights)

    @property
    def _padding(self) -> int:
        """Rows that are missing to a multiple of what the mesh splits them into."""
        return -len(self.lengths) % row_parts(self.mesh)

    def prefill(self) -> DecodeState:
        """Read the prompts."""
        seeds, rows = self.seeds
        given = {
            "prompt": self.prompt,
            "prompt_length": self.lengths,
            "sampling": self.sampling,
            "key": jax.vmap(lambda seed, row: jax.random.fold_in(make_key(seed), row))(seeds, rows),
            "num_drafts": self.num_drafts,
            "processors": self.processors,
            "eos": self.eos,
        }
        # A row without room is done at once, and counts nowhere.
        asked = np.arange(len(rows) + self._padding) < len(rows)
        limit = pad_rows(self.lengths, self._padding) + np.int32(self.new) * asked
        return self.decoder.prefill(
            self.params, limit=limit.astype(np.int32), **pad_rows(given, self._padding)
        )

    def compile(self) -> None:
        """Compile all that decoding will run, by a prefill and one step."""
        states = self.decoder.stream(self.params, self.prefill(), steps_per_chunk=1)
        state = next(states)
        with contextlib.suppress(StopIteration):
            states.send(np.ones(state.done.shape, bool))


def check(
    target: LanguageModel, request: Request, stream: bool = False, mesh: Mesh | None = None
) -> Call:
    """A request with each of its fields checked.

    Raises:
      ValueError: the field by name, its value, and the cure.
    """
    if not isinstance(target, LanguageModel):
        raise ValueError(
            f"target is a {type(target).__name__}; pass what specjax.load(folder) returns"
        )
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh={shown(mesh)} is no mesh; pass what specjax.make_mesh returns")
    mesh = mesh_of(target.params) if mesh is None else mesh
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
    processors = Processors.create(
        rows,
        size,
        repetition_penalty=settings.pop("repetition_penalty"),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        bad_words=bad_word_ids(target, request.bad_words, ends),
        min_new_tokens=request.min_new_tokens,
    )
    least = None if processors is None else processors.min_length
    if least is not None and least.max() > new:
        raise ValueError(f"min_new_tokens={least.max()} is more than max_new_tokens={new}")

    drafter, drafts = choose_drafter(target, request, rows, mesh)
    check_length("target", target, ids, new)
    if drafter.reader is not None:
        check_length("draft", drafter.reader, ids, new)
    make_arrays = drafter.for_rows(target, request.adapter, rows)
    proposer = drafter.proposer
    width = _SMALLEST_BUCKET
    while width < longest:
        width *= 2
    # Rounded up, so that other lengths find the compiled programs of these.
    capacity = -(-max(width, longest + new, proposer.num_nodes) // _CAPACITY_STEP) * _CAPACITY_STEP
    decoder = Decoder(
        target.model, proposer, rule, target.eos, capacity, request.logits_processor, logprobs
    )
    sampling = Sampling.create(
        rows, **settings
    )  # the last check, since it puts arrays onto the device
    prompt = np.zeros((rows, width), np.int32)
    for row, tokens in zip(prompt, ids, strict=True):
        row[: len(tokens)] = tokens
    return Call(
        target=target,
        decoder=decoder,
        make_arrays=make_arrays,
        mesh=mesh,
        prompt=prompt,
        lengths=np.array([len(row) for row in ids], np.int32),
        new=new,
        num_drafts=drafts,
        eos=eos_of_rows(ends),
        seeds=seeds,
        sampling=sampling,
        processors=processors,
        texts=Texts(target, [row[-1] for row in ids], stops),
        stream=stream,
        single=single,
    )


def _ids(target: LanguageModel, request: Request) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt or conversation, and whether it is one that is not in a list."""
    if request.messages is None:
        prompts = () if request.prompts is None else request.prompts
        return encode(target, prompts), isinstance(request.prompts, str)
    turns = items(request.messages)
    ids = conversations(target, request.prompts, request.messages, request.chat_template_kwargs)
    return ids, bool(turns) and isinstance(turns[0], Mapping)


def encode(target: LanguageModel, prompts: Prompts) -> list[list[int]]:
    """Token ids of each prompt.  Raises ValueError for an empty one, or for ids outside the vocabulary."""
    rows = [prompts] if isinstance(prompts, str) else items(prompts)
    kinds = "pass a text, a list of texts, or a list of lists of token ids"
    if rows is None:
        raise ValueError(f"prompts={shown(prompts)} is not allowed; {kinds}")
    if not rows:
        raise ValueError("prompts is empty; pass at least one prompt, or messages=")
    encoded = []
    for index, row in enumerate(rows):
        if isinstance(row, str):
            if target.tokenizer is None:
                raise ValueError(
                    f"{target.name} has no tokenizer.json; pass token ids in prompts instead of text"
                )
            row = text_ids(f"prompt {index}", target, row, special=True) if row else []
        tokens = items(row)
        if tokens is None:
            raise ValueError(f"prompts holds {shown(row)}; {kinds}")
        if not tokens:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        made = []
        for token in tokens:
            known = number(token)
            if not isinstance(known, int):
                raise ValueError(
                    f"prompt {index} holds {shown(token)}; token ids are whole numbers: {kinds}"
                )
            made.append(known)
        if not 0 <= min(made) <= max(made) < target.model.vocab_size:
            raise ValueError(
                f"prompt {index} holds token ids from {shown(min(made))} to {shown(max(made))}; "
                f"the vocabulary of {target.name} has {target.model.vocab_size}"
            )
        encoded.append(made)
    return encoded


def text_ids(name: str, target: LanguageModel, text: str, special: bool) -> list[int]:
    """The tokens of a text, with `special` ones that the tokenizer adds by itself.

    Raises:
      ValueError: the tokenizer cannot read it: half of a surrogate pair has no bytes.
    """
    assert target.tokenizer is not None
    try:
        return target.tokenizer.encode(text, add_special_tokens=special).ids
    except (TypeError, UnicodeError) as error:
        raise ValueError(
            f"{name} is the text {shown(text)}, which cannot be encoded ({error}); mend it"
        ) from None


def conversations(
    target: LanguageModel,
    prompts: Prompts | None,
    messages: Any,
    more: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """The token ids of each conversation.  The template writes special tokens itself, so none are added."""
    if prompts is not None:
        raise ValueError("pass either prompts or messages=, not both")
    found = items(messages)
    if found is None:
        raise ValueError(
            f'messages={shown(messages)}; pass a list like [{{"role": "user", "content": "..."}}], or a list of such'
        )
    if target.tokenizer is None:
        raise ValueError(f"messages= needs a tokenizer, and {target.name} has none")
    chats = [found] if found and isinstance(found[0], Mapping) else found
    try:
        texts = [render(target.files, chat, **(more or {})) for chat in chats]
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from None
    return [text_ids("messages", target, text, special=False) for text in texts]


def ends_of(target: LanguageModel, eos: Any, rows: int) -> list[list[int]]:
    """The token ids that end each row."""
    if eos is None:
        return [list(target.eos)] * rows
    found = items(eos)
    found = [eos] if found is None else found
    nested = [items(entry) for entry in found]
    ends = nested if found and None not in nested else [found] * rows
    if len(ends) != rows:
        raise ValueError(
            f"eos has {len(ends)} lists for {rows} prompts; pass one list of ids, or one a prompt"
        )
    last = target.model.vocab_size - 1
    wanted = f"a token id, or a list of them; the vocabulary of {target.name} has 0 to {last}"
    return [[whole("eos", token, 0, last, wanted) for token in row or ()] for row in ends]


def bad_word_ids(target: LanguageModel, words: Any, ends: list[list[int]]) -> list[Sequence[int]]:
    """Token sequences: a text's own, and those that it has after a space."""
    found: list[Sequence[int]] = []
    for word in word_list(words):
        if not isinstance(word, str):
            found.append(tokens_of("bad_words", word, target.model.vocab_size))
            continue
        if target.tokenizer is None:
            raise ValueError(
                f"bad_words holds {word!r}, but {target.name} has no tokenizer; pass token-id lists"
            )
        if not word.strip():
            raise ValueError(
                f"bad_words holds the empty text {word!r}; remove it, or pass token ids"
            )
        for text in (word, " " + word):
            found.append(text_ids("bad_words", target, text, special=False))
    for word in found:
        if len(word) == 1 and any(word[0] in row for row in ends):
            raise ValueError(
                f"bad_words bans {word[0]}, which ends a text; pass min_new_tokens, or eos=[] for texts without an end"
            )
    return found


def check_length(role: str, model: LanguageModel, ids: list[list[int]], new: int) -> None:
    """Raises ValueError, with a cure that is possible, where prompt and new tokens are more than a model reads."""
    lengths, most = [len(row) for row in ids], model.model.max_positions
    longest = max(lengths)
    if longest + new <= most:
        return
    cures = [f"shorten the prompt by {longest + new - most} tokens"]
    cures += [f"pass max_new_tokens={most - longest} or less"] * (longest < most)
    cures += ["decode without this draft"] * (role == "draft")
    raise ValueError(
        f"prompt {lengths.index(longest)} has {longest} tokens, and max_new_tokens={new} make {longest + new}, but "
        f"the {role} {model.name!r} reads at most {most}: {', or '.join(cures)}"
    )


def seeds_of(seed: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The seed of each row, and what tells apart rows of one seed for all."""
    wanted = "a whole number; it must lie in [0, 2^32)"
    seeds = [whole("seed", value, 0, 2**32 - 1, wanted) for value in each("seed", seed, rows)]
    index = np.arange(rows, dtype=np.int32)
    return np.array(seeds, np.uint32), index if items(seed) is None else np.zeros_like(index)


def pad_rows(rows: Any, padding: int) -> Any:
    """A tree of arrays, each with its last row so many times more."""
    if padding == 0:
        return rows
    return jax.tree.map(lambda x: x[np.minimum(np.arange(len(x) + padding), len(x) - 1)], rows)


def _rule(rule: Any) -> Rule:
    if rule is None:
        return Match()
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(
                f"rule={rule!r} is no rule; pass one of {', '.join(RULES)}, or a rule such as Match()"
            )
        return RULES[rule]()
    if not isinstance(rule, Rule):
        raise ValueError(
            f"rule={shown(rule)} is no rule; pass an object such as specjax.Match(), or one of {', '.join(RULES)}"
        )
    hashable("rule", rule)
    return rule


def _stops(target: LanguageModel, stop: Any) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else [] if stop is None else items(stop)
    if found is None or not all(isinstance(text, str) for text in found):
        raise ValueError(
            f"stop={shown(stop)} is not allowed; it must be a text, a list of texts, or None"
        )
    if "" in found:
        raise ValueError("stop contains an empty string, which every text contains; remove it")
    if found and target.tokenizer is None:
        raise ValueError(f"stop={shown(stop)} needs a tokenizer, and {target.name} has none")
    return tuple(found)
