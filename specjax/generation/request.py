"""`Request`: everything that a call of `generate` asks for, as one documented record.

A request may come in the words of another library, and may name models by their folders.
`load_named` turns it into one in our words that holds the models.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jax.sharding import Mesh

from specjax._internal.checks import reworded, shown, typed, whole
from specjax.constraints import Constraint
from specjax.contract import Proposer, Rule
from specjax.drafters import arrange, load_drafter
from specjax.files import load
from specjax.methods import METHODS, Adapter, Drafter
from specjax.models import LanguageModel
from specjax.parallel import mesh_of
from specjax.processors import LogitsProcessor
from specjax.proposers import NGram
from specjax.rules import SyntheticAcceptance
from specjax.text import Messages

DEPTH = 4
"""The default number of drafts of a draft model."""

Documents = Sequence[str | Sequence[int]]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A call of `generate`: a target, its prompts, and every option.

    "One, or one per prompt" means one value for all prompts, or a list with a value for each.

    Attributes:
      prompts: a text, a list of texts, or a list of token-id lists; they may differ in length.
      messages: instead of `prompts`, a conversation [{"role": "user", "content": "..."}, ...], or a
        list of conversations.  The tokenizer's chat template turns them into text, and the output
        is the assistant's turn.
      chat_template_kwargs: more variables for that template, such as {"enable_thinking": False}.
      drafter: a proposer with its weights: what `load_medusa`, `make_drafter` and other loaders
        return, or a bank of adapters.
      draft: a smaller model that drafts a chain: what `load` returned, a folder, or "org/name".  A
        draft with another tokenizer proposes the tokens that both vocabularies contain, and a
        warning says once how many these are.
      draft_window: the draft attends to so many of the last tokens only, and keeps no more, so that
        its drafts in a long text cost what they cost in a short one; the text stays the same.
      draft_dtype: "int8" or "int4" rounds the draft's weights; the text stays the same.
      proposer: a proposer without weights of its own, such as `NGram()`; or its name, such as
        "ngram" or "tree"; or "module:Name" for your own; or "self-int8" or "self-int4", where
        the draft is the target with its weights in int8 or int4.  "auto", the default, chooses in
        every step between plain decoding, prompt lookup, and `draft` if there is one, by recent
        acceptance and by what steps cost; the first call measures that.  With `drafter` and "auto",
        chains of that drafter take the place of the draft.  With rules other than `match` the
        default is a chain from `draft`, or plain decoding.
      speculative_config: drafter, draft, proposer and num_drafts in vLLM's form, such as
        {"method": "ngram", "num_speculative_tokens": 4}.
      documents: texts, or token-id lists, in which prompt lookup and the proposer `datastore` look
        up what followed the last tokens; the target does not read them.  One list for all prompts,
        or a list of such lists with one per prompt.
      expected: the new tokens that are expected of each prompt, a list of token ids or None for
        each, such as the text of the same seed before the weights changed.  They are drafts
        (`Aligned`), so they change the time and never the text.
      adapter: the name of a bank's adapter for all prompts, or a list with a name or None for each
        prompt; None is plain decoding.
      rule: a rule or its name.  `Match()`, the default, makes the text depend on the seed alone and
        not on the draft.  `BlockVerification()` accepts more at temperature 1 on a chain;
        `Typical()` and `Threshold()` accept more still, but change the distribution.
      synthetic_acceptance: to measure speed only: accept drafts at this rate, right or wrong, or as
        `SyntheticAcceptance(length=2.6)` says.  The text is worthless, and the output not exact.
      num_drafts: the greatest depth of drafts (gamma), one, or one per prompt; 0 is plain decoding.
        With `draft` alone, a number makes it draft exactly this deep in every step.  Deeper drafts
        of a proposer or drafter are dropped; None drops no drafts.
      max_new_tokens: the most new tokens of each prompt.
      temperature, top_k, top_p, min_p: one, or one per prompt; 0, 0, 1 and 0 switch them off.  None
        takes the target's own default (`generation_config.json`), or switches it off if there is
        no default.
      repetition_penalty: for the tokens of prompt and output; above 1 discourages them, 1 is off,
        and None takes the default as above.
      presence_penalty, frequency_penalty: subtracted from the logit of each token of the output,
        the first once and the second as often as the token occurs; 0 is off.
      logit_bias: {token id: number added to its logit}, for all prompts or one per prompt; -inf
        bans.
      bad_words: texts, or token-id lists, that are never written.  A text is banned with the tokens
        that it has at the beginning of a text and after a space; other spellings are not banned.
      logits_processor: your own JAX function `(logits [V], text, counts [V]) -> logits [V]` for one
        node, applied after all of the above: see `specjax.processors.LogitsProcessor`.  A new
        function compiles again.
      min_new_tokens: EOS is banned until a row has this many new tokens; one, or one per prompt.
      constraint: what the new text must be: `Regex`, `JSONSchema`, `Choice`, `Grammar` or an
        `Automaton` of your own; one, or a list with one or None for each prompt.  The text is
        complete when it ends, by EOS or by `max_new_tokens`; a text in `stop` cuts it, and
        `max_new_tokens` cuts one of a `Grammar`, which is slower, too.
      eos: token ids that end a row instead of the target's own, for all rows or a list for each
        prompt; [] for none.
      seed: a number in [0, 2^32) for all prompts, or one per prompt.  With one number, the rows
        still differ by their index.
      stop: texts at which a row ends; they are not part of the output.
      logprobs: record the log-probability of each token, and of this many most probable tokens.
    """

    prompts: Prompts | None = None
    messages: Messages | Sequence[Messages] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    drafter: Drafter | None = None
    draft: LanguageModel | str | None = None
    draft_dtype: Literal["int8", "int4"] | None = None
    draft_window: int | None = None
    proposer: Proposer | Drafter | str | None = None
    speculative_config: Mapping[str, Any] | None = None
    documents: Documents | Sequence[Documents] | None = None
    expected: Sequence[Sequence[int] | None] | None = None
    adapter: Adapter = None
    rule: Rule | str | None = None
    synthetic_acceptance: float | SyntheticAcceptance | None = None
    num_drafts: int | Sequence[int] | None = None
    max_new_tokens: int = 128
    temperature: float | Sequence[float] | None = None
    top_k: int | Sequence[int] | None = None
    top_p: float | Sequence[float] | None = None
    min_p: float | Sequence[float] | None = None
    repetition_penalty: float | Sequence[float] | None = None
    presence_penalty: float | Sequence[float] = 0.0
    frequency_penalty: float | Sequence[float] = 0.0
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logits_processor: LogitsProcessor | None = None
    min_new_tokens: int | Sequence[int] = 0
    constraint: Constraint | Sequence[Constraint | None] | None = None
    eos: int | Sequence[int] | Sequence[Sequence[int]] | None = None
    seed: int | Sequence[int] = 0
    stop: str | Sequence[str] | None = ()
    logprobs: int | None = None


class Options(TypedDict, total=False):
    """The fields of `Request` without the prompts, as keywords of `generate`."""

    messages: Messages | Sequence[Messages] | None
    chat_template_kwargs: Mapping[str, object] | None
    drafter: Drafter | None
    draft: LanguageModel | str | None
    draft_dtype: Literal["int8", "int4"] | None
    draft_window: int | None
    proposer: Proposer | Drafter | str | None
    speculative_config: Mapping[str, Any] | None
    documents: Documents | Sequence[Documents] | None
    expected: Sequence[Sequence[int] | None] | None
    adapter: Adapter
    rule: Rule | str | None
    synthetic_acceptance: float | SyntheticAcceptance | None
    num_drafts: int | Sequence[int] | None
    max_new_tokens: int
    temperature: float | Sequence[float] | None
    top_k: int | Sequence[int] | None
    top_p: float | Sequence[float] | None
    min_p: float | Sequence[float] | None
    repetition_penalty: float | Sequence[float] | None
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None
    bad_words: Sequence[str | Sequence[int]]
    logits_processor: LogitsProcessor | None
    min_new_tokens: int | Sequence[int]
    constraint: Constraint | Sequence[Constraint | None] | None
    eos: int | Sequence[int] | Sequence[Sequence[int]] | None
    seed: int | Sequence[int]
    stop: str | Sequence[str] | None
    logprobs: int | None


OTHER_WORDS = {
    "assistant_model": "draft=, which takes what specjax.load returns, a folder, or org/name",
    "assistant_tokenizer": "draft= alone: a draft has its own tokenizer",
    "num_assistant_tokens": "num_drafts=",
    "num_speculative_tokens": "num_drafts=",
    "prompt_lookup_num_tokens": 'proposer="ngram" and num_drafts=',
    "do_sample": "temperature=: 0 is greedy, and above 0 samples",
    "max_length": "max_new_tokens=, which does not count the prompt",
    "max_tokens": "max_new_tokens=",
    "min_tokens": "min_new_tokens=",
    "n": "one prompt as often as you want texts; rows of one seed differ",
    "num_return_sequences": "one prompt as often as you want texts; rows of one seed differ",
    "eos_token_id": "eos=",
    "stop_strings": "stop=",
    "stop_token_ids": "eos=",
    "bad_words_ids": "bad_words=",
    "streamer": "stream=True, which returns an iterator over pieces of text",
    "generation_config": "the settings themselves, such as temperature=",
    "guided_regex": "constraint=specjax.Regex(...)",
    "guided_json": "constraint=specjax.JSONSchema(...)",
    "guided_choice": "constraint=specjax.Choice([...])",
    "guided_grammar": "constraint=specjax.Grammar(...)",
    "response_format": "constraint=specjax.JSONSchema(...)",
    "input_ids": "prompts=, which takes lists of token ids",
}
"""Keywords of other libraries, and what to pass instead."""


def make_request(prompts: Prompts | None, options: Mapping[str, Any]) -> Request:
    """Returns `Request(prompts=prompts, **options)`.

    Raises:
      ValueError: an unknown keyword, with the one that was probably meant.
    """
    known = [field.name for field in dataclasses.fields(Request)]
    for name in options:
        if name in known:
            continue
        if name in OTHER_WORDS:
            raise ValueError(f"{name}= is not used here: pass {OTHER_WORDS[name]}")
        near = difflib.get_close_matches(name, known, 1)
        cure = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
        raise ValueError(f"generate has no argument {name}=; {cure}")
    return Request(prompts=prompts, **options)


def check_models(target: object, mesh: object, draft_mesh: object) -> None:
    """Raises ValueError if the target is not a loaded model, or a mesh is not a mesh."""
    typed("what specjax.load(folder) returns", LanguageModel, target=target)
    typed("the mesh that specjax.make_mesh returns", Mesh | None, mesh=mesh, draft_mesh=draft_mesh)


def load_named(
    target: LanguageModel,
    request: Request,
    mesh: Mesh | None = None,
    draft_mesh: Mesh | None = None,
) -> Request:
    """Returns the request with loaded models instead of folders, and with our fields only.

    This alone reads weights: `prepare` takes what is loaded.  A request that names nothing is
    returned as it is.

    Raises:
      ValueError: a `speculative_config` that cannot be used, or a folder that cannot be loaded.
    """
    if request.speculative_config is None and not isinstance(request.draft, str):
        return request
    check_models(target, mesh, draft_mesh)
    request = _in_our_words(target, request)
    draft = request.draft
    if not isinstance(draft, str):
        return request
    mesh = mesh_of(target.params) if mesh is None else mesh
    with reworded(
        f"draft={shown(draft)} cannot be loaded: ", "", (OSError, ImportError, UnicodeError)
    ):
        os.fsencode(draft)
        loaded = _loaded(draft, _content(draft), mesh if draft_mesh is None else draft_mesh)
    return dataclasses.replace(request, draft=loaded)


def _content(name: str) -> tuple[tuple[str, int, int], ...]:
    """Returns a key that changes with the folder of a draft and with its files."""
    folder = pathlib.Path(name)
    if "\0" in name:
        raise FileNotFoundError("no folder has such a name; pass a folder, or org/name")
    found = ((path.name, path.stat()) for path in sorted(folder.glob("*")))
    files = ((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
    return ((str(folder.resolve()), 0, 0), *files)


@functools.lru_cache(maxsize=1)
def _loaded(name: str, content: object, mesh: Mesh | None) -> LanguageModel:
    """Returns the draft of a folder; the one that was named last is kept and not read again."""
    # Without rules, every device holds the whole draft.
    return load(name, mesh=mesh, rules={}, keep_bfloat16=True)


_METHODS = ("ngram", "draft_model", *METHODS)
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


def _in_our_words(target: LanguageModel, request: Request) -> Request:
    """Returns the request with the fields of `Request` instead of a `speculative_config`."""
    config = request.speculative_config
    if config is None:
        return request
    name = "speculative_config"
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise ValueError(
            f"{name}={shown(config)}; pass a dict such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    ours = {
        "drafter": request.drafter,
        "draft": request.draft,
        "proposer": request.proposer,
        "num_drafts": request.num_drafts,
    }
    taken = [field for field, value in ours.items() if value is not None]
    if taken:
        raise ValueError(
            f"{name}= and {', '.join(taken)}= say the same thing: leave one of them out"
        )
    for key in config:
        if key not in _KEYS:
            raise ValueError(f"{name} has the key {key!r}; it takes {', '.join(_KEYS)}")
    method = config.get("method", "draft_model" if "model" in config else None)
    if method not in _METHODS:
        raise ValueError(f"{name} has the method {method!r}; it takes {', '.join(_METHODS)}")
    if (method == "ngram") == ("model" in config):
        verb = "takes no" if method == "ngram" else "needs a"
        raise ValueError(f'{name} with the method {method!r} {verb} "model"')
    drafts = config.get("num_speculative_tokens", DEPTH)
    whole(
        f"{name}['num_speculative_tokens']",
        drafts,
        0,
        2**31 - 1,
        "a whole number, 0 (plain) or greater",
    )
    request = dataclasses.replace(request, speculative_config=None, num_drafts=drafts)
    if method == "ngram":
        for key in ("prompt_lookup_max", "prompt_lookup_min"):
            if key in config:
                whole(f"{name}[{key!r}]", config[key], 1, 2**31 - 1, "a whole number, at least 1")
        most = config.get("prompt_lookup_max", NGram.max_ngram)
        least = config.get("prompt_lookup_min", min(NGram.min_ngram, most))
        return dataclasses.replace(request, proposer=NGram(max(drafts, 1), most, least))
    if method in METHODS:
        drafter = load_drafter(config["model"], target)
        asked = "num_speculative_tokens" in config
        if method == "medusa" or drafts == 0:  # the tree of the heads is in their folder
            return dataclasses.replace(request, drafter=drafter)
        drafter = arrange(drafter, drafts if asked else None)
        return dataclasses.replace(request, drafter=drafter, num_drafts=None)
    return dataclasses.replace(request, draft=config["model"])
