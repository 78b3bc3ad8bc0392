"""What a call of `generate` asks for, read and checked on the host before anything is compiled."""

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
from specjax.decoding import Decoder, eos_of_rows
from specjax.drafters import Weights, choose
from specjax.models import LanguageModel
from specjax.parallel import beside, lay, mesh_of, row_parts
from specjax.processors import Processors, tokens_of, word_list
from specjax.proposers import MedusaParams, NoProposer, Universal
from specjax.rules import RULES, Match
from specjax.sampling import Sampling
from specjax.text import Texts, render
from specjax.types import DecodeState, Params

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

_GREATEST = 2**31 - 1
_RULE = ("__call__", "exact", "shared_noise")  # of `types.Rule`
_CAPACITY_STEP = 128
_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of `generate` of B prompts, checked; nothing of it is compiled or moved yet."""

    target: LanguageModel
    decoder: Decoder
    weights: Weights  # of the proposer
    mesh: Mesh | None
    prompt: np.ndarray  # [B, P] int32, padded on the right
    lengths: np.ndarray  # [B] int32
    new: int  # tokens a row at most
    num_drafts: np.ndarray | None  # [B] int32; None: as deep as the proposer guesses
    eos: np.ndarray  # [B, ids] int32
    seeds: tuple[np.ndarray, np.ndarray]  # [B] uint32; [B] int32 tells apart rows of one seed for all
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
        weights = beside(self.weights(laid), self.mesh)

        def pad(part: Any) -> Any:
            heads = isinstance(part, MedusaParams)
            return dataclasses.replace(part, adapter=pad_rows(part.adapter, self._padding)) if heads else part

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
            "key": jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(seeds, rows),
            "num_drafts": self.num_drafts,
            "processors": self.processors,
            "eos": self.eos,
        }
        # A row without room is done at once, and counts nowhere.
        asked = np.arange(len(rows) + self._padding) < len(rows)
        limit = pad_rows(self.lengths, self._padding) + np.int32(self.new) * asked
        return self.decoder.prefill(self.params, limit=limit.astype(np.int32), **pad_rows(given, self._padding))

    def compile(self) -> None:
        """Compile all that decoding will run, by a prefill and one step."""
        states = self.decoder.stream(self.params, self.prefill(), steps_per_chunk=1)
        state = next(states)
        with contextlib.suppress(StopIteration):
            states.send(np.ones(state.done.shape, bool))


def check(
    target: LanguageModel, prompts: Any, *, messages: Any, draft: Any, draft_dtype: Any, proposer: Any, adapter: Any,
    rule: Any, num_drafts: Any, max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any,
    repetition_penalty: Any, presence_penalty: Any, frequency_penalty: Any, logit_bias: Any, bad_words: Any,
    logits_processor: Any, min_new_tokens: Any, eos: Any, seed: Any, stop: Any, logprobs: Any, stream: Any, mesh: Any,
) -> Call:  # fmt: skip
    """The arguments of `generate`, each of them checked.

    Raises:
      ValueError: the argument by name, its value, and the cure.
    """
    for name, model in (("target", target), ("draft", draft)):
        if not isinstance(model, LanguageModel) and (model is not None or name == "target"):
            raise ValueError(f"{name} is a {type(model).__name__}; pass what specjax.load(folder) returns")
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh={shown(mesh)} is no mesh; pass what specjax.make_mesh returns")
    mesh = mesh_of(target.params) if mesh is None else mesh
    rule, stream, stops = _rule(rule), flag("stream", stream), _stops(target, stop)
    wanted = f"a whole number, at least 1 and at most {_GREATEST}"
    new = whole("max_new_tokens", max_new_tokens, 1, _GREATEST, wanted)
    size = target.model.vocab_size
    if logprobs is not None:
        logprobs = whole("logprobs", logprobs, 0, size, f"a whole number in [0, {size}], or None")

    single = isinstance(prompts, str)
    if messages is not None:
        found = items(messages)
        single = bool(found) and isinstance(found[0], Mapping)
        prompts = conversations(target, prompts, messages)
    ids = encode(target, [] if prompts is None else prompts)
    rows, longest = len(ids), max(map(len, ids))
    ends, seeds = ends_of(target, eos, rows), seeds_of(seed, rows)
    depth, drafts = drafts_of(target, num_drafts, rows)
    settings = target.settings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    processors = Processors.create(
        rows,
        size,
        repetition_penalty=settings.pop("repetition_penalty"),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        bad_words=bad_word_ids(target, bad_words, ends),
        min_new_tokens=min_new_tokens,
    )
    least = None if processors is None else processors.min_length
    if least is not None and least.max() > new:
        raise ValueError(f"min_new_tokens={least.max()} is more than max_new_tokens={new}")

    check_length(target, None, ids, new)
    proposer, weights = choose(target, draft, proposer, depth, adapter, rows, draft_dtype=draft_dtype, mesh=mesh)
    check_length(target, None if isinstance(proposer, Universal | NoProposer) else draft, ids, new)
    width = _SMALLEST_BUCKET
    while width < longest:
        width *= 2
    # Rounded up, so that other lengths find the compiled programs of these.
    capacity = -(-max(width, longest + new, proposer.num_nodes) // _CAPACITY_STEP) * _CAPACITY_STEP
    decoder = Decoder(target.model, proposer, rule, target.eos, capacity, logits_processor, logprobs)
    # The last check, since it puts arrays onto the device.
    sampling = Sampling.create(rows, **settings)
    prompt = np.zeros((rows, width), np.int32)
    for row, found in zip(prompt, ids, strict=True):
        row[: len(found)] = found
    return Call(
        target=target,
        decoder=decoder,
        weights=weights,
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
                raise ValueError(f"{target.name} has no tokenizer.json; pass token ids in prompts instead of text")
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
                raise ValueError(f"prompt {index} holds {shown(token)}; token ids are whole numbers: {kinds}")
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
        raise ValueError(f"{name} is the text {shown(text)}, which cannot be encoded ({error}); mend it") from None


def conversations(target: LanguageModel, prompts: Prompts | None, messages: Any) -> list[list[int]]:
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
        texts = [render(target.files, chat) for chat in chats]
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
        raise ValueError(f"eos has {len(ends)} lists for {rows} prompts; pass one list of ids, or one a prompt")
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
            raise ValueError(f"bad_words holds {word!r}, but {target.name} has no tokenizer; pass token-id lists")
        if not word.strip():
            raise ValueError(f"bad_words holds the empty text {word!r}; remove it, or pass token ids")
        for text in (word, " " + word):
            found.append(text_ids("bad_words", target, text, special=False))
    for word in found:
        if len(word) == 1 and any(word[0] in row for row in ends):
            raise ValueError(
                f"bad_words bans {word[0]}, which ends a text; pass min_new_tokens, or eos=[] for texts without an end"
            )
    return found


def check_length(target: LanguageModel, draft: LanguageModel | None, ids: list[list[int]], new: int) -> None:
    """Raises ValueError where a prompt and its new tokens are more than a model reads."""
    lengths = [len(row) for row in ids]
    longest = max(lengths)
    for role, model in (("target", target), ("draft", draft)):
        if model is None or longest + new <= model.model.max_positions:
            continue
        most = model.model.max_positions
        cures = [f"shorten the prompt by {longest + new - most} tokens"]
        cures += [f"pass max_new_tokens={most - longest} or less"] * (longest < most)
        cures += ["decode without this draft"] * (role == "draft")
        raise ValueError(
            f"prompt {lengths.index(longest)} has {longest} tokens, and max_new_tokens={new} make {longest + new}, but "
            f"the {role} {model.name!r} reads at most {most}: {', or '.join(cures)}"
        )


def drafts_of(target: LanguageModel, num_drafts: Any, rows: int) -> tuple[int, np.ndarray | None]:
    """How deep a draft alone guesses, and how deep each row may guess at most (None: without limit)."""
    if num_drafts is None:
        return 4, None
    most = target.model.max_positions
    wanted = f"a whole number, 0 (plain) or greater, and at most {most}, what {target.name} reads"
    found = [whole("num_drafts", value, 0, most, wanted) for value in each("num_drafts", num_drafts, rows)]
    # One number for all is structure, and 0 is the program of plain decoding.  One number a row is
    # data, so that another number never compiles.
    depth = found[0] if items(num_drafts) is None else max([1, *found])
    return depth, np.array(found, np.int32)


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


def _rule(rule: Any) -> Any:
    if rule is None:
        return Match()
    meant = RULES[rule] if isinstance(rule, str) and rule in RULES else Match
    example = f"pass one such as specjax.{meant.__name__}()"
    if isinstance(rule, type) or not all(hasattr(rule, part) for part in _RULE):
        raise ValueError(f"rule={shown(rule)} is no rule; {example}")
    hashable("rule", rule)
    return rule


def _stops(target: LanguageModel, stop: Any) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else [] if stop is None else items(stop)
    if found is None or not all(isinstance(text, str) for text in found):
        raise ValueError(f"stop={shown(stop)} is not allowed; it must be a text, a list of texts, or None")
    if "" in found:
        raise ValueError("stop contains an empty string, which every text contains; remove it")
    if found and target.tokenizer is None:
        raise ValueError(f"stop={shown(stop)} needs a tokenizer, and {target.name} has none")
    return tuple(found)
