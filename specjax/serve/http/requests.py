"""From the body of a request to the requests of an engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from specjax.constraints import JSONSchema
from specjax.generation import Request, conversations, encode
from specjax.serve.admission import Admitted, Checker
from specjax.serve.engine import Engine
from specjax.serve.http.fields import (
    Chat,
    Completion,
    Lorax,
    LoraxParameters,
    Resume,
    Sampled,
    Speculation,
    Tokenize,
)
from specjax.serve.http.places import Seen
from specjax.serve.http.problems import Problem, refuse
from specjax.serve.http.tools import Tools, for_template, tools_of
from specjax.serve.identity import request_hash, tokens_hash
from specjax.serve.resuming import Delivered
from specjax.text import template_of, unread_part

_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_LORAX_TOKENS = 20  # LoRAX's
_LARGEST_SEED = 2**32 - 1


class Resumable(Protocol):
    """A body whose stream may be resumed."""

    @property
    def stream(self) -> bool: ...

    @property
    def resume(self) -> Resume | None: ...


@dataclasses.dataclass(frozen=True)
class Asked:
    """The requests of one body, each checked once: `n` texts for each prompt."""

    requests: list[Admitted]
    n: int
    seed: int
    model: str
    num_drafts: int | None
    tools: Tools | None  # that the texts may call
    cache_salt: str | None
    digest: str  # of what the texts depend on
    expected: list[list[int]] | None  # of each text
    delivered: list[Delivered] | None = None  # of each text, if they are resumed
    fast: bool = False  # trust what was delivered

    @property
    def depth(self) -> int:
        """The greatest depth of the drafts."""
        return self.requests[0].row.num_drafts

    def each(self, checker: Checker) -> list[tuple[Admitted, int, Delivered | None]]:
        """Returns the request of each text, its index among those of its prompt, and what the
        client has of it.

        Raises:
          ValueError: tokens that cannot be expected.
        """
        made = [(request, index) for request in self.requests for index in range(self.n)]
        hints = self.expected or [[]] * len(made)
        had = self.delivered or [None] * len(made)
        return [
            (checker.expecting(request, hint) if hint else request, index, has)
            for (request, index), hint, has in zip(made, hints, had, strict=True)
        ]

    def resumed(self, body: Sampled, seen: Seen | None, model: str) -> Asked:
        """Returns the same with what the client has of each text.

        Args:
          body: of the request.
          seen: the id that it sent back.
          model: the hash of the target.

        Raises:
          Problem: an id of another model or request, or tokens that are not those of the id.
        """
        delivered = delivered_of(body, seen, model, self.digest, len(self.requests) * self.n)
        if delivered is None:
            return self
        fast = body.resume is not None and body.resume.fast
        return dataclasses.replace(self, delivered=delivered, fast=fast)


def delivered_of(
    body: Resumable, seen: Seen | None, model: str, digest: str, texts: int
) -> list[Delivered] | None:
    """Returns what the client has of each text; None if it resumes none.

    Args:
      body: of the request.
      seen: the id that it sent back.
      model: the hash of the target.
      digest: of what the texts depend on.
      texts: how many the body asks for.

    Raises:
      Problem: an id of another model or request, or tokens that are not those of the id.
    """
    if seen is None and body.resume is None:
        return None
    if not body.stream:
        refuse(
            "only a stream is resumed: send stream: true, or leave Last-Event-ID and resume out "
            "and get the whole text", "resume",
        )  # fmt: skip
    if seen is not None:
        seen.check(model, digest, texts)
    if body.resume is None:
        assert seen is not None
        return list(seen.delivered)
    tokens = body.resume.token_ids
    if len(tokens) != texts:
        refuse(
            f"resume.token_ids has {len(tokens)} lists for {texts} texts: send the tokens of each "
            "text, prompts times n, in the order of their index", "resume.token_ids",
        )  # fmt: skip
    for index, (one, ids) in enumerate(zip(seen.delivered if seen else (), tokens, strict=False)):
        if one.count != len(ids) or one.digest != tokens_hash(ids):
            raise Problem(
                409, f"resume.token_ids[{index}] are not the {one.count} tokens of Last-Event-ID: "
                "send the tokens of all chunks up to that event", "resume.token_ids",
            )  # fmt: skip
    return [Delivered(len(ids), tuple(ids)) for ids in tokens]


def models(engine: Engine) -> dict[str, tuple[str, str] | None]:
    """Returns the names that `model` may have: the target, or an adapter with its drafter."""
    named: dict[str, tuple[str, str] | None] = {}
    for part in engine.drafters:
        named |= {name: (part.name, name) for name in part.adapters}
    return {**named, engine.target.name: None}


def of_completion(engine: Engine, body: Completion, most: int) -> Asked:
    """Raises Problem or ValueError for what the engine cannot do."""
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    ids = encode(engine.target, prompts)
    new = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _asked(engine, body, ids, [new] * len(ids), body.logprobs, most)


def of_chat(engine: Engine, body: Chat, most: int) -> Asked:
    """Raises Problem or ValueError for what the engine cannot do."""
    variables = {
        "add_generation_prompt": body.add_generation_prompt, **(body.chat_template_kwargs or {})
    }  # fmt: skip
    template = template_of(engine.target.files)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, template)
    if tools is not None:
        variables["tools"] = tools.given
    ids = conversations(engine.target, None, [_messages(body.messages)], variables)
    new = body.max_completion_tokens
    new = body.max_tokens if new is None else new
    if new is None:
        new = max(1, engine.checker.room - len(ids[0]))
    if body.top_logprobs is not None and not body.logprobs:
        refuse("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _asked(engine, body, ids, [new], logprobs, most, tools)


def of_lorax(engine: Engine, body: Lorax) -> Asked:
    """Raises Problem or ValueError for what the engine cannot do."""
    asked = body.parameters
    adapter = asked.adapter_id
    if adapter in (None, "", "__base_model__", engine.target.name):
        adapter = None
    if adapter not in (None, *models(engine)):
        listed = ", ".join(name for name, owner in models(engine).items() if owner) or "none"
        refuse(f"there is no adapter {adapter!r}; this server has {listed}", "adapter_id")
    # LoRAX decodes greedily unless it is told to sample.
    usual = 1.0 if _samples(asked) else 0.0
    sampled = Sampled(
        model=adapter,
        temperature=usual if asked.temperature is None else asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        stop=asked.stop,
        ignore_eos=asked.ignore_eos_token,
        repetition_penalty=asked.repetition_penalty,
        response_format=asked.response_format,
    )
    ids = encode(engine.target, [body.inputs])
    new = _LORAX_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    logprobs = None if engine.checker.logprobs is None else 0
    return _asked(engine, sampled, ids, [new], logprobs, 1)


def _samples(asked: LoraxParameters) -> bool:
    settings = asked.temperature, asked.top_k, asked.top_p
    return asked.do_sample or any(value is not None for value in settings)


def of_tokenize(engine: Engine, body: Tokenize) -> list[int]:
    """Returns the token ids of a text or a conversation."""
    if (body.prompt is None) == (body.messages is None):
        refuse("send either prompt or messages", "prompt")
    _owner(engine, body.model)
    if body.messages is not None:
        variables = {"add_generation_prompt": body.add_generation_prompt}
        return conversations(engine.target, None, [_messages(body.messages)], variables)[0]
    if engine.target.tokenizer is not None and not body.add_special_tokens:
        return engine.target.tokenizer.encode(body.prompt, add_special_tokens=False).ids
    return encode(engine.target, [body.prompt or ""])[0]


def _asked(
    engine: Engine,
    body: Sampled,
    ids: list[list[int]],
    new: list[int],
    logprobs: int | None,
    most: int,
    tools: Tools | None = None,
) -> Asked:
    if len(ids) * body.n > most:
        refuse(
            f"{len(ids)} prompts with n={body.n} are {len(ids) * body.n} texts; this server "
            f"writes at most {most} for a request",
            "n",
        )
    constraint = _constraint(body.response_format)
    called = None if tools is None else tools.constraint()
    if constraint is not None and called is not None:
        refuse("a text is either a call or of a response_format: send one of them", "tool_choice")
    constraint = constraint or called
    model, owner = _owner(engine, body.model)
    drafter, adapter = _drafting(body.speculation, owner)
    _check_logprobs(engine, body, logprobs)
    if constraint is not None and engine.checker.constraint_size is None:
        refuse(
            "this server takes no schemas, since it was started with --constraint-size 0 0: "
            f"leave {body.called()['constraint']} out",
            body.called()["constraint"],
        )
    seed = secrets.randbits(32) if body.seed is None else body.seed
    defaults = engine.target.defaults
    temperature = body.temperature
    if temperature is None and "temperature" not in defaults:
        temperature = 1.0  # OpenAI's default
    requests = [
        Request(
            prompts=[tokens],
            max_new_tokens=count,
            proposer=drafter,
            adapter=adapter,
            num_drafts=body.speculation.num_speculative_tokens,
            temperature=temperature,
            top_k=0 if body.top_k == -1 else body.top_k,  # vLLM's -1 is off
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_bias(body.logit_bias),
            min_new_tokens=body.min_tokens,
            eos=_ends(engine, body),
            # OpenAI's clients may send any 64 bits, negative numbers too.
            seed=seed & _LARGEST_SEED,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop,
            logprobs=logprobs,
            constraint=constraint,
        )
        for tokens, count in zip(ids, new, strict=True)
    ]
    admitted = [engine.checker.admit(request) for request in requests]
    drafts = body.speculation.num_speculative_tokens
    expected = _expected(engine, body, len(ids) * body.n)
    stops = [one.prepared.texts.stops for one in admitted]
    digest = request_hash([one.row for one in admitted], type(body).__name__, body.n, stops)
    return Asked(admitted, body.n, seed, model, drafts, tools, body.cache_salt, digest, expected)


def _expected(engine: Engine, body: Sampled, texts: int) -> list[list[int]] | None:
    """Returns the tokens that are expected of each text."""
    given, name = body.speculation.expected_token_ids, "speculation.expected_token_ids"
    if given is None:
        return None
    if engine.checker.expected is None:
        refuse(
            f"this server has no room for expected texts: leave {name} out, or start it with "
            "--expected 8", name,
        )  # fmt: skip
    if len(given) != texts:
        refuse(
            f"{name} has {len(given)} lists for {texts} texts: send one for each text, prompts "
            "times n; an empty one expects nothing", name,
        )  # fmt: skip
    return given


def _owner(engine: Engine, model: str | None) -> tuple[str, tuple[str, str] | None]:
    """Returns the model that a request names, and the drafter with the adapter of that name."""
    chosen = models(engine)
    model = engine.target.name if model is None else model
    if model not in chosen:
        listed = ", ".join(chosen)
        refuse(f"there is no model {model!r}; this server has {listed}", "model", 404)
    return model, chosen[model]


def _check_logprobs(engine: Engine, body: Sampled, logprobs: int | None) -> None:
    """Raises Problem for log-probabilities that the engine does not keep, in the client's words."""
    most, field = engine.checker.logprobs, body.called().get("logprobs", "logprobs")
    if logprobs is None or (most is not None and logprobs <= most):
        return
    if most is None:
        refuse("this server records no log-probabilities: leave logprobs out", field)
    refuse(f"{field}={logprobs}; this server records at most {most}", field)


def _drafting(
    speculation: Speculation, owner: tuple[str, str] | None
) -> tuple[str | None, str | None]:
    """Returns the drafter and the adapter, where the model may be an adapter's name."""
    drafter, adapter = speculation.drafter, speculation.adapter
    if owner is None:
        return drafter, adapter
    if adapter not in (None, owner[1]):
        refuse(
            f"model={owner[1]!r} is an adapter, and speculation.adapter is {adapter!r}: "
            "name one of them",
            "speculation",
        )
    return drafter or owner[0], owner[1]


def _constraint(asked: Mapping[str, object] | None) -> JSONSchema | None:
    """Returns the constraint of OpenAI's `response_format`, or of LoRAX's."""
    form = asked or {"type": "text"}
    kind, schema = form.get("type"), form.get("schema")
    if kind == "text":
        return None
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if kind not in ("json_schema", "json_object") or not isinstance(schema, Mapping):
        refuse(
            f"response_format of the type {kind!r} without a schema is not supported: send "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            "response_format",
        )
    return JSONSchema(schema)


def _ends(engine: Engine, body: Sampled) -> list[int] | None:
    own = [] if body.ignore_eos else list(engine.target.eos)
    more = body.stop_token_ids or []
    return None if not (body.ignore_eos or more) else [*own, *more]


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        refuse("the keys of logit_bias are token ids", "logit_bias")


def _messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Returns messages whose content is one text; OpenAI also allows a list of parts."""
    made = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind != "text":
                    said = unread_part(part) if isinstance(part, dict) else None
                    said = said or f"has a part of the type {kind!r}: send parts of the type text"
                    refuse(f"messages[{number}] {said}", "messages")
            content = "".join(str(part.get("text", "")) for part in content)
        made.append({**for_template(message), "content": content})
    return made
