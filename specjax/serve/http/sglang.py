"""SGLang's `/generate`, and the routes with which a trainer pauses a server and gives it weights.

Token ids in, token ids and log-probabilities out, so that nothing is encoded again between a
trainer and its sampler.  Bodies with `text` or `input_ids` are SGLang's; with `inputs` LoRAX's.
"""

from __future__ import annotations

import collections
import pathlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax

from specjax.constraints import JSONSchema, Regex
from specjax.files import load
from specjax.generation import Request, encode
from specjax.parallel import mesh_of
from specjax.serve.engine import Engine
from specjax.serve.handle import Handle, Increment, Served
from specjax.serve.http import following
from specjax.serve.http.fields import Body, Flag, Number, Resume, Text, Whole
from specjax.serve.http.places import Place, Seen, event_id
from specjax.serve.http.problems import read, refuse
from specjax.serve.http.requests import delivered_of
from specjax.serve.identity import request_hash
from specjax.serve.releasing import PARTS
from specjax.text import Texts, Words
from specjax.types import Json

_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""


class SamplingParams(Body):
    """SGLang's `sampling_params`."""

    ignored: ClassVar[tuple[str, ...]] = (
        "spaces_between_special_tokens", "stream_interval", "custom_params",
    )  # fmt: skip
    refused: ClassVar[dict[str, str]] = {
        "ebnf": "use json_schema or regex",
        "structural_tag": "use json_schema",
        "stop_regex": "use stop",
    }

    max_new_tokens: Whole = _TOKENS
    min_new_tokens: Whole = 0
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    n: Whole = 1
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    no_stop_trim: Flag = False
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    json_schema: Text | None = None
    regex: Text | None = None
    sampling_seed: Whole | None = None


class Generate(Body):
    """The body of SGLang's `/generate`."""

    ignored: ClassVar[tuple[str, ...]] = (
        "log_metrics", "priority", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "conversation_id", "data_parallel_rank", "routing_key", "return_bytes",
    )  # fmt: skip
    done: ClassVar[dict[str, object]] = {"logprob_start_len": -1}
    refused: ClassVar[dict[str, str]] = {
        "logprob_start_len": "only new tokens have log-probabilities: send -1",
        "token_ids_logprob": "use top_logprobs_num",
        "input_embeds": "send input_ids",
        "image_data": "this server reads text",
        "audio_data": "this server reads text",
        "video_data": "this server reads text",
        "return_hidden_states": "this server returns tokens and log-probabilities",
        "return_routed_experts": "this server returns tokens and log-probabilities",
        "lora_path": "merge the LoRA before the server starts",
        "session_params": "send the whole prompt; its known beginning is copied",
        "custom_logit_processor": "use logit_bias",
    }

    text: Text | list[Text] | None = None
    input_ids: list[Whole] | list[list[Whole]] | None = None
    sampling_params: dict[str, object] | list[dict[str, object]] | None = None
    rid: Text | list[Text] | None = None
    return_logprob: Flag | list[Flag] = False
    top_logprobs_num: Whole | list[Whole] = 0
    return_text_in_logprobs: Flag = False
    stream: Flag = False
    resume: Resume | None = None

    def called(self) -> dict[str, str]:
        names = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
                 "stop", "frequency_penalty", "presence_penalty", "repetition_penalty",
                 "logit_bias")  # fmt: skip
        return {
            **{name: f"sampling_params.{name}" for name in names},
            "seed": "sampling_params.sampling_seed",
            "eos": "sampling_params.stop_token_ids",
            "constraint": "sampling_params.json_schema",
            "logprobs": "top_logprobs_num",
            "resume": "resume.token_ids",
        }


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(Body):
    ignored: ClassVar[tuple[str, ...]] = ("abort_message", "finished_reason")

    rid: Text = ""
    abort_all: Flag = False


class WeightsFromDisk(Body):
    ignored: ClassVar[tuple[str, ...]] = (
        "is_async", "torch_empty_cache", "recapture_cuda_graph", "token_step", "manifest",
        "keep_pause",
        # Keys and values of other weights are never used, whatever a trainer asks for.
        "flush_cache",
        # AReaL's spelling, which SGLang ignores, too: AReaL has paused the server before.
        "abort_all_request",
    )  # fmt: skip

    model_path: Text
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: Flag = False
    weight_version: Text | None = None


class Memory(Body):
    """The body of `/release_memory_occupation` and of `/resume_memory_occupation`."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None

    @property
    def parts(self) -> list[str]:
        """Returns what is released; there are no CUDA graphs here."""
        return [tag for tag in self.tags or PARTS if tag in PARTS]


class Version(Body):
    """The body of `/update_weight_version`."""

    new_version: Text
    abort_all_requests: Flag = False


ELSEWHERE = {
    name: "this server takes weights from a folder: save them as safetensors, and send "
    "/update_weights_from_disk"
    for name in (
        "init_weights_update_group",
        "destroy_weights_update_group",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
    )
}
"""SGLang's routes that this server has not, and what to do instead."""


class Items:
    """The texts that one body asks for, in the order of its answer."""

    def __init__(
        self, engine: Engine, body: Generate, most: int, rid: str, seen: Seen | None = None
    ) -> None:
        """Checks a body and submits nothing.

        Args:
          engine: will write the texts.
          body: of the request.
          most: texts that it may ask for.
          rid: the id of texts for which the body names none.
          seen: the id of the last event that the client has, if its stream is resumed.

        Raises:
          Problem, ValueError: what the engine cannot do, or an id of another request.
        """
        prompts, self.single = _prompts(engine, body)
        count = len(prompts)
        settings = [
            read(SamplingParams, one, "sampling_params.")
            for one in _each("sampling_params", body.sampling_params or {}, count)
        ]
        texts = sum(one.n for one in settings)
        if any(one.n < 1 for one in settings) or texts > most:
            refuse(
                f"the body asks for {texts} texts, and this server writes 1 to {most} for a "
                "request: send several, or start it with --max-texts", "sampling_params.n",
            )  # fmt: skip
        wants = _each("return_logprob", body.return_logprob, count)
        tops = _each("top_logprobs_num", body.top_logprobs_num, count)
        names = _each("rid", body.rid, count)
        if count > 1 and not isinstance(body.rid, list):
            names = [f"{body.rid or rid}_{number}" for number in range(count)]
        self.single &= texts == 1
        # Texts that named no seed go on with the one that was drawn for them.
        self.seed = secrets.randbits(32) if seen is None else seen.seed
        met = collections.Counter[tuple[int, ...]]()
        self.asked, self.rids, self.wants, self.tops = [], [], [], []
        self.most, self.greedy, self.settings = [], [], []
        for prompt, one, want, top, name in zip(prompts, settings, wants, tops, names, strict=True):
            request = _request(engine, prompt, one, top if want else None, self.seed)
            admitted = engine.checker.admit(request)
            for _ in range(one.n):
                # The same prompt again is another sample, and never the same text.
                index = met[tuple(prompt)]
                met[tuple(prompt)] += 1
                self.asked.append((admitted, index))
                self.rids.append(name or rid)
                self.wants.append(want)
                self.tops.append(top)
                self.most.append(one.max_new_tokens)
                self.settings.append(one)
                self.greedy.append(float(admitted.row.sampling.temperature[0]) == 0)
        stops = [one.prepared.texts.stops for one, _ in self.asked]
        self.digest = request_hash(
            [one.row for one, _ in self.asked], "Generate", stops, self.wants, self.tops
        )
        if body.resume is not None and body.resume.fast:
            refuse("chunks repeat all tokens, which are written again: leave fast out",
                   "resume.fast")  # fmt: skip
        self.delivered = delivered_of(
            body, seen, engine.model_hash, self.digest, len(self.asked)
        )  # fmt: skip
        self.tails = seen.tails if seen is not None else (0,) * len(self.asked)

    def submit(self, engine: Engine) -> list[Handle]:
        """Submits all texts, or none."""
        handles: list[Handle] = []
        had = self.delivered or [None] * len(self.asked)
        try:
            for (admitted, index), has in zip(self.asked, had, strict=True):
                handles.append(engine.submit(admitted, index, resume=has))
        except Exception:
            following.cancel(handles)
            raise
        return handles


class Answers:
    """Writes the answers to one body."""

    def __init__(self, items: Items, words: Words, version: str) -> None:
        self.items, self.words, self.version = items, words, version

    def whole(self, served: Sequence[Served]) -> Json:
        """Returns an object, or a list of them for several texts."""
        made: list[Json] = [
            self._one(
                number,
                self._text(number, one.texts, one.tokens, one.text),
                one,
                self._reason(number, one),
            )
            for number, one in enumerate(served)
        ]
        return made[0] if self.items.single else made

    async def chunks(
        self, handles: list[Handle], model: str
    ) -> AsyncIterator[tuple[dict[str, Any], str]]:
        """Yields chunks, each with all of the text and the tokens so far, as SGLang does.

        With each comes the id of its event.  A stream that is resumed begins with the first chunk
        that says more than the client has.
        """
        news: list[list[Increment]] = [[] for _ in handles]
        places = [Place() for _ in handles]
        for place, handle, tail in zip(places, handles, self.items.tails, strict=True):
            place.add(handle.tokens[: handle.delivered.count])
            place.tail = tail
        async for number, new in following.merged(handles):
            place = places[number]
            if isinstance(new, Served):
                if place.tail:
                    continue
                place.tail = 1
                text = self._text(number, new.texts, new.tokens, new.text)
                chunk = self._chunk(number, text, new, self._reason(number, new))
            else:
                if new.start and not news[number]:
                    news[number].append(handles[number].before(new))
                news[number].append(new)
                place.add(new.tokens)
                text, tokens = "".join(x.text for x in news[number]), []
                for one in news[number]:
                    tokens += one.tokens
                text = self._text(number, handles[number].texts, tokens, text)
                chunk = self._chunk(number, text, news[number], None)
            place.characters = len(chunk["text"])
            yield chunk, event_id(model, self.items.digest, self.items.seed, places)

    def _chunk(
        self, number: int, text: str, made: Served | list[Increment], reason: Json
    ) -> dict[str, Any]:
        chunk = self._one(number, text, made, reason)
        return chunk if self.items.single else {**chunk, "index": number}

    def _one(
        self, number: int, text: str, made: Served | list[Increment], reason: Json
    ) -> dict[str, Any]:
        parts = [made] if isinstance(made, Served) else made
        tokens = [token for part in parts for token in part.tokens]
        info: dict[str, Any] = {
            "id": self.items.rids[number],
            "finish_reason": reason,
            "prompt_tokens": len(self.items.asked[number][0].row.tokens),
            "completion_tokens": len(tokens),
            "weight_version": self.version,
        }
        if isinstance(made, Served):
            info["cached_tokens"] = made.copied
            times = made.times
            info["e2e_latency"] = (times.ended or time.perf_counter()) - times.submitted
        if self.items.wants[number]:
            info["output_token_logprobs"] = [
                entry for part in parts for entry in self._logprobs(number, part)
            ]
            if self.items.tops[number]:
                info["output_top_logprobs"] = [
                    entry for part in parts for entry in self._tops(part)
                ]
        return {"text": text, "output_ids": list(tokens), "meta_info": info}

    def _logprobs(self, number: int, part: Served | Increment) -> list[Json]:
        """Returns [log-probability, id, None] of each token.

        They are of the distribution that a token was drawn from; a greedy token has those of the
        target at temperature 1.
        """
        if part.logprobs is None:
            return []
        values = part.logprobs.raw if self.items.greedy[number] else part.logprobs.warped
        return [
            [float(x), token, None]
            for x, token in zip(values[: len(part.tokens)], part.tokens, strict=True)
        ]

    def _tops(self, part: Served | Increment) -> list[Any]:
        if part.logprobs is None:
            return []
        return [
            [[float(x), int(token), None] for x, token in zip(values, ids, strict=True)]
            for values, ids in zip(part.logprobs.top, part.logprobs.top_ids, strict=True)
        ][: len(part.tokens)]

    def _text(self, number: int, texts: Texts, tokens: list[int], text: str) -> str:
        """Returns what a body shows of a text: special tokens and what has ended it, if it asks.

        Args:
          tokens: of the text so far; one that ends it can only be the last.
          text: theirs, without special tokens and without a stop string.
        """
        asked = self.items.settings[number]
        if asked.skip_special_tokens and not asked.no_stop_trim:
            return text
        stop = None
        if not asked.no_stop_trim and tokens:
            ends = set(self.items.asked[number][0].prepared.eos[0].tolist())
            tokens = tokens[:-1] if tokens[-1] in ends else tokens
            stop = _stop_of(texts, tokens)
        text = texts.decode(0, tokens, special=not asked.skip_special_tokens)
        # The name of a special token before it may hold the same characters.
        return text if stop is None or stop not in text else text[: text.rindex(stop)]

    def _reason(self, number: int, served: Served) -> Json:
        if served.finish == "limit":
            return {"type": "length", "length": self.items.most[number]}
        if served.finish == "cancelled":
            return {"type": "abort", "message": "the request was aborted"}
        if served.finish == "eos":
            return {"type": "stop", "matched": served.tokens[-1]}
        return {"type": "stop", "matched": _stop_of(served.texts, served.tokens)}


def _stop_of(texts: Texts, tokens: list[int]) -> str | None:
    """Returns the stop string that ends the text of these tokens, if one does."""
    text = texts.decode(0, tokens)
    found = [stop for stop in texts.stops if stop in text]
    return min(found, key=text.find) if found else None


def checkpoint(engine: Engine, body: WeightsFromDisk):
    """Reads the weights of a folder, of the types that the engine has.

    Raises:
      Problem: it is no folder with safetensors, or the engine's weights are rounded.
      ValueError: as `specjax.load`, or the weights are released.
    """
    folder = pathlib.Path(body.model_path)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        refuse(
            f"model_path={body.model_path!r} is no folder of this machine with config.json and "
            "safetensors", "model_path",
        )  # fmt: skip
    engine.check_weights()  # before others take the memory
    params = engine.target.params
    types = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if types == {"float32", "bfloat16"} and engine.target.keeps_bfloat16:
        return load(folder, "float32", mesh=mesh_of(params), keep_bfloat16=True)
    if len(types) > 1 or not types <= {"float32", "bfloat16", "float16"}:
        refuse(
            f"the weights of this server are of the types {', '.join(sorted(types))}, and only "
            "float32, bfloat16 and float16 are read anew: start it with --dtype", "model_path",
        )  # fmt: skip
    return load(folder, types.pop(), mesh=mesh_of(params))


def is_sglang(content: bytes) -> bool:
    """Returns whether a body of `/generate` is SGLang's, and not LoRAX's."""
    return re.search(rb'"(text|input_ids)"\s*:', content) is not None and b'"inputs"' not in content


def _prompts(engine: Engine, body: Generate) -> tuple[list[list[int]], bool]:
    """Returns the token ids of each prompt, and whether there is one that is not in a list."""
    if (body.text is None) == (body.input_ids is None):
        refuse("send either text or input_ids", "input_ids")
    given: Any = body.text if body.input_ids is None else body.input_ids
    single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    return encode(engine.target, [given] if single else list(given)), single


def _each(name: str, value: object, count: int) -> list[Any]:
    """Returns a value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        refuse(f"{name} has {len(value)} entries for {count} prompts", name)
    return value


def _request(
    engine: Engine, prompt: list[int], asked: SamplingParams, logprobs: int | None, seed: int
) -> Request:
    constraint = None
    if asked.regex is not None and asked.json_schema is not None:
        refuse("send either json_schema or regex", "sampling_params.regex")
    if asked.regex is not None:
        constraint = Regex(asked.regex)
    if asked.json_schema is not None:
        constraint = JSONSchema(asked.json_schema)
    if logprobs is not None and engine.checker.logprobs is None:
        refuse("this server records no log-probabilities: start it with --logprobs 0",
               "return_logprob")  # fmt: skip
    own = [] if asked.ignore_eos else list(engine.target.eos)
    more = asked.stop_token_ids or []
    temperature = asked.temperature
    if temperature is None and "temperature" not in engine.target.defaults:
        temperature = 1.0
    return Request(
        prompts=[prompt],
        max_new_tokens=asked.max_new_tokens,
        min_new_tokens=asked.min_new_tokens,
        temperature=temperature,
        top_p=asked.top_p,
        top_k=0 if asked.top_k in (-1, 1 << 30) else asked.top_k,  # SGLang's two ways of "off"
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=_bias(asked.logit_bias),
        stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
        eos=[*own, *more] if asked.ignore_eos or more else None,
        seed=(seed if asked.sampling_seed is None else asked.sampling_seed) % 2**32,
        logprobs=logprobs,
        constraint=constraint,
    )


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    try:
        return {int(token): value for token, value in bias.items()} if bias else None
    except ValueError:
        refuse("the keys of logit_bias are token ids", "sampling_params.logit_bias")
