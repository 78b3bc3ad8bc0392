"""The routes: OpenAI's API, LoRAX's, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import json
import pathlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from specjax.serve.engine import Engine
from specjax.serve.handle import Handle, Served
from specjax.serve.http import answers, following, requests, sglang
from specjax.serve.http.arriving import ID, Limits, read_body, request_id
from specjax.serve.http.fields import Body, Chat, Completion, Lorax, Sampled, Tokenize
from specjax.serve.http.metrics import Metrics
from specjax.serve.http.places import HEADER, Place, Seen, event_id
from specjax.serve.http.problems import Problem, in_words_of, parse
from specjax.serve.http.tracing import Tracing
from specjax.text import Words
from specjax.types import Json

_PAGE = pathlib.Path(__file__).with_name("page.html")
_T = TypeVar("_T")


class Service:
    """The state of a server: its engine, its metrics, and whether it is about to stop."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.metrics = Metrics(engine)
        self.tracing = None if limits.traces is None else Tracing(limits.traces, engine.target.name)
        self.words = Words(engine.target.tokenizer)
        engine.model_hash  # noqa: B018 - now, and not while the first request waits
        self.weight_version = "default"
        self.rids: dict[str, list[Handle]] = {}  # of requests that run, by their ids
        self.draining = False
        self.running = 0  # requests that are being answered

    async def completions(self, request: Request) -> Response:
        body, seen = _seen(request, parse(Completion, await self._body(request)))
        make = functools.partial(requests.of_completion, self.engine, body, self.limits.texts)
        return await self._generate(request, body, make, seen, chat=False)

    async def chats(self, request: Request) -> Response:
        body, seen = _seen(request, parse(Chat, await self._body(request)))
        make = functools.partial(requests.of_chat, self.engine, body, self.limits.texts)
        return await self._generate(request, body, make, seen, chat=True)

    async def lorax(self, request: Request) -> Response:
        content = await self._body(request)
        if sglang.is_sglang(content):
            request.state.lorax = False
            return await self._sglang(request, parse(sglang.Generate, content))
        return await self._lorax(request, streams=False, content=content)

    async def _sglang(self, request: Request, body: sglang.Generate) -> Response:
        seen, rid = Seen.read(request.headers.get(HEADER)), request.state.rid
        items, handles = await self._begin(
            body, lambda: sglang.Items(self.engine, body, self.limits.texts, rid, seen),
            lambda items: items.submit(self.engine),
        )  # fmt: skip
        self._know(items.rids, handles)
        answers = sglang.Answers(items, self.words, self.weight_version)

        async def chunks() -> AsyncIterator[tuple[dict[str, Json], str]]:
            async for chunk in answers.chunks(handles, self.engine.model_hash):
                yield chunk
            self._count([handle.result() for handle in handles], request)

        streams = False
        try:
            if items.delivered is not None:
                await self._checked(request, handles)
            if body.stream:
                streams = True
                return self._stream(chunks(), handles, lorax=False, rids=items.rids)
            return JSONResponse(answers.whole(await self._served(request, handles)))
        finally:
            if not streams:
                self._forget(items.rids, handles)

    def _know(self, rids: list[str], handles: list[Handle]) -> None:
        """Keeps the ids of requests that run, by which they can be aborted."""
        for rid, handle in zip(rids, handles, strict=True):
            self.rids.setdefault(rid, []).append(handle)

    def _forget(self, rids: list[str], handles: list[Handle]) -> None:
        for rid, handle in zip(rids, handles, strict=True):
            left = [one for one in self.rids.get(rid, []) if one is not handle]
            if left:
                self.rids[rid] = left
            else:
                self.rids.pop(rid, None)

    async def pause(self, request: Request) -> Response:
        body = parse(sglang.Pause, await self._body(request) or b"{}")
        await following.in_thread(self.engine.pause, body.mode)
        return JSONResponse({"status": "ok", "message": "Generation paused successfully."})

    async def go_on(self, request: Request) -> Response:
        await self._body(request)
        await following.in_thread(self.engine.go_on)
        return JSONResponse({"status": "ok", "message": "Generation continued successfully."})

    async def release(self, request: Request) -> Response:
        body = parse(sglang.Memory, await self._body(request) or b"{}")
        await following.in_thread(self.engine.release_memory, body.parts)
        return JSONResponse(None)

    async def take_back(self, request: Request) -> Response:
        body = parse(sglang.Memory, await self._body(request) or b"{}")
        await following.in_thread(self.engine.resume_memory, body.parts)
        return JSONResponse(None)

    async def flush(self, request: Request) -> Response:
        await following.in_thread(self.engine.flush)
        return Response("Cache flushed.\n", media_type="text/plain")

    async def abort(self, request: Request) -> Response:
        body = parse(sglang.Abort, await self._body(request) or b"{}")
        for rid, handles in list(self.rids.items()):
            if body.abort_all or (body.rid and rid.startswith(body.rid)):
                following.cancel(handles)
        return JSONResponse({"status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        body = parse(sglang.WeightsFromDisk, await self._body(request))
        engine, count = self.engine, 0
        try:
            target = await following.in_thread(sglang.checkpoint, engine, body)
            if body.abort_all_requests:
                count = await following.in_thread(engine.pause, "abort")
            try:
                await following.in_thread(engine.update_weights, target)
                await following.in_thread(lambda: engine.model_hash)
            finally:
                if body.abort_all_requests:
                    await following.in_thread(engine.go_on)
        except (ValueError, OSError, Problem) as error:
            problem = Problem.of(error)
            return JSONResponse({"success": False, "message": problem.message}, problem.status)
        self.weight_version = body.weight_version or self.weight_version
        message = "Succeeded to update model weights."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": count})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.weight_version})

    async def set_version(self, request: Request) -> Response:
        body = parse(sglang.Version, await self._body(request))
        if body.abort_all_requests:
            for handles in list(self.rids.values()):
                following.cancel(handles)
        self.weight_version = body.new_version
        return JSONResponse({
            "success": True, "new_version": body.new_version,
            "message": f"Weight version updated to {body.new_version}",
        })  # fmt: skip

    async def loads(self, request: Request) -> Response:
        """Says how many requests run and wait, as a trainer asks until there is none."""
        load = self.engine.load()
        return JSONResponse({
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(), "dp_rank_count": 1,
            "loads": [{
                "dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.waiting,
                "num_total_reqs": load.running + load.waiting, "token_usage": load.cache_share,
            }],
        })  # fmt: skip

    async def elsewhere(self, request: Request) -> Response:
        path = request.url.path.strip("/")
        raise Problem(501, f"/{path} is no route of this server: {sglang.ELSEWHERE[path]}")

    async def server_info(self, request: Request) -> Response:
        engine = self.engine
        info = json.loads(bytes((await self.model_info(request)).body))
        return JSONResponse({
            **info, "served_model_name": engine.target.name, "tp_size": 1, "dp_size": 1,
            "pp_size": 1, "ep_size": 1, "context_length": engine.checker.room,
        })  # fmt: skip

    async def model_info(self, request: Request) -> Response:
        target = self.engine.target
        path = target.name if target.folder is None else str(target.folder)
        return JSONResponse({
            "model_path": path, "tokenizer_path": path, "is_generation": True,
            "weight_version": self.weight_version, "model_hash": self.engine.model_hash,
        })  # fmt: skip

    async def lorax_stream(self, request: Request) -> Response:
        return await self._lorax(request, streams=True)

    async def lorax_root(self, request: Request) -> Response:
        return await self._lorax(request, streams=None)

    async def tokenize(self, request: Request) -> Response:
        body = parse(Tokenize, await self._body(request))
        ids = await following.in_thread(requests.of_tokenize, self.engine, body)
        answer = {"count": len(ids), "max_model_len": self.engine.checker.room, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [self.words.written(token) for token in ids]
        return JSONResponse(answer)

    async def models(self, request: Request) -> Response:
        root = self.engine.target.name
        data = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "specjax",
                "root": root,
                "parent": None if owner is None else root,
                "max_model_len": self.engine.checker.room,
            }
            for name, owner in requests.models(self.engine).items()
        ]
        data.sort(key=lambda entry: entry["parent"] is not None)  # clients take the first one
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        if not self.engine.healthy or self.draining:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """Says whether the engine serves, also while the server is about to stop."""
        if not self.engine.healthy:
            return JSONResponse({"status": "stopped"}, 503)
        return JSONResponse({"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        offered = {
            "model": self.engine.target.name,
            "drafters": [
                {
                    "name": part.name,
                    "depth": part.drafter.proposer.max_depth,
                    "adapters": part.adapters,
                }
                for part in self.engine.drafters
            ],
        }
        # Inside a script element only "</" could end the text early.
        shown = json.dumps(offered).replace("</", "<\\/")
        return HTMLResponse(_PAGE.read_text(encoding="utf-8").replace("{{offered}}", shown))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.limits)

    def _submit(self, asked: requests.Asked) -> list[Handle]:
        handles: list[Handle] = []
        try:
            for one, index, delivered in asked.each(self.engine.checker):
                handle = self.engine.submit(
                    one, index, asked.cache_salt, resume=delivered,
                    fast=asked.fast and delivered is not None,
                )  # fmt: skip
                handles.append(handle)
        except Exception:
            following.cancel(handles)  # a part of an answer is no answer
            raise
        return handles

    async def _generate(
        self,
        request: Request,
        body: Sampled,
        make: Callable[[], requests.Asked],
        seen: Seen | None,
        chat: bool,
    ) -> Response:
        model = self.engine.model_hash
        asked, handles = await self._begin(
            body, lambda: make().resumed(body, seen, model), self._submit
        )
        rid = request.state.rid
        writer = answers.Writer.of(
            self.words, asked, chat, asked.depth, body.return_guesses, model, rid
        )
        rids = [rid] * len(handles)
        self._know(rids, handles)
        streams = False
        try:
            if asked.delivered is not None:  # an answer of the status 200 begins with what is new
                await self._checked(request, handles)
            if body.stream:
                chunks = self._chunks(writer, handles, body, seen, request)
                streams = True
                return self._stream(chunks, handles, lorax=False, rids=rids)
            return JSONResponse(writer.whole(await self._served(request, handles)))
        finally:
            if not streams:
                self._forget(rids, handles)

    async def _begin(
        self, body: Body, make: Callable[[], _T], submit: Callable[[_T], list[Handle]]
    ) -> tuple[_T, list[Handle]]:
        """Submits the requests of a body; their errors name its fields."""

        def begin() -> tuple[_T, list[Handle]]:
            try:
                asked = make()
                return asked, submit(asked)
            except ValueError as error:
                raise in_words_of(body, error) from None

        return await following.in_thread(begin)

    async def _served(self, request: Request, handles: list[Handle]) -> list[Served]:
        """Waits for whole texts, unless the client goes away, and counts them."""
        with following.cancelling(handles):
            served = await following.unless_gone(request, following.all_of(handles))
        self._count(served, request)
        return served

    async def _checked(self, request: Request, handles: list[Handle]) -> None:
        """Waits until texts that are resumed have caught up with what was delivered."""
        try:
            checks = asyncio.gather(*(handle.checked() for handle in handles))
            await following.unless_gone(request, checks)
        except BaseException:
            following.cancel(handles)
            raise

    async def _chunks(
        self,
        writer: answers.Writer,
        handles: list[Handle],
        body: Sampled,
        seen: Seen | None,
        request: Request,
    ) -> AsyncIterator[tuple[dict[str, Json], str | None]]:
        """Yields the chunks of a stream, each with the id of its event."""
        options, asked = body.stream_options, writer.asked
        for index in range(len(handles)):
            if asked.delivered is None and (first := writer.first(index)) is not None:
                yield first, None
        places, texts = [Place() for _ in handles], [""] * len(handles)
        for index, (place, handle) in enumerate(zip(places, handles, strict=True)):
            known = handle.tokens[: handle.delivered.count]
            if known:
                place.add(known)
                texts[index] = handle.texts.decode(0, known)
                # A character that is not finished yet comes with its last token.
                place.characters = writer.settled(texts[index].rstrip("\ufffd"))
            if seen is not None:
                place.characters, place.tail = seen.characters[index], seen.tails[index]

        def id() -> str:
            return event_id(writer.model_hash, asked.digest, asked.seed, places)

        with_usage = options is not None and options.include_usage
        left = len(handles)
        async for index, new in following.merged(handles):
            place = places[index]
            if isinstance(new, Served):
                left -= 1
                ends = writer.last(index, new, place.characters)
                # Clients expect a chunk without a choice only if they asked for the usage.
                if left == 0 and not with_usage:
                    ends[-1] |= writer.figures([handle.result() for handle in handles])
                for chunk in ends[place.tail :]:
                    place.tail += 1
                    yield chunk, id()
                continue
            place.add(new.tokens)
            texts[index] = texts[index][: new.offset] + new.text
            now = writer.settled(texts[index])
            shown, place.characters = (
                texts[index][place.characters : now],
                max(now, place.characters),
            )
            chunk = writer.increment(index, new, shown)
            if options is not None and options.continuous_usage_stats:
                prompts = [handle.prompt for handle in handles[:: asked.n]]
                counts = sum(place.count for place in places)
                chunk["usage"] = answers.usage(sum(prompts), counts, 0)
            yield chunk, id()
        served = [handle.result() for handle in handles]
        self._count(served, request)
        if with_usage:
            yield writer.end(served), None

    def _stream(
        self,
        chunks: AsyncIterator[tuple[dict[str, Json], str | None]]
        | AsyncIterator[tuple[dict[str, Json], str]],
        handles: list[Handle],
        lorax: bool,
        rids: Sequence[str] = (),
    ) -> Response:
        async def events() -> AsyncIterator[dict[str, str]]:
            with following.cancelling(handles), contextlib.ExitStack() as after:
                after.callback(self._forget, list(rids), handles if rids else [])
                try:
                    async for chunk, name in chunks:
                        event = {"data": json.dumps(chunk, ensure_ascii=False)}
                        yield event if name is None else event | {"id": name}
                except Exception as error:  # the status is sent already, so this is the last event
                    yield {"data": json.dumps(Problem.of(error).body(lorax))}
                if not lorax:
                    yield {"data": "[DONE]"}

        return EventSourceResponse(
            self._while_running(events()), sep="\n", send_timeout=self.limits.send_seconds
        )

    async def _while_running(self, events: AsyncIterator[_T]) -> AsyncIterator[_T]:
        """Counts a stream as running, also after its handler has returned the response."""
        self.running += 1
        try:
            async for event in events:
                yield event
        finally:
            self.running -= 1

    async def _lorax(
        self, request: Request, streams: bool | None, content: bytes | None = None
    ) -> Response:
        body = parse(Lorax, await self._body(request) if content is None else content)
        is_root = streams is None
        streams = body.stream if is_root else streams
        if body.parameters.details and self.engine.checker.logprobs is None:
            raise Problem(
                400, "details have log-probabilities, which this server does not record: leave "
                "them out, or start it with --logprobs 0", "details",
            )  # fmt: skip

        make = functools.partial(requests.of_lorax, self.engine, body)
        asked, handles = await self._begin(body, make, self._submit)
        prompt = body.inputs if body.parameters.return_full_text else None
        if streams:
            chunks = self._lorax_chunks(asked, handles, prompt, request)
            return self._stream(chunks, handles, lorax=True)
        served = await self._served(request, handles)
        answer = answers.lorax_whole(
            self.words, served[0], prompt, asked.seed, body.parameters.details
        )
        return JSONResponse([answer] if is_root else answer)  # the root answers with a list

    async def _lorax_chunks(
        self, asked: requests.Asked, handles: list[Handle], prompt: str | None, request: Request
    ) -> AsyncIterator[tuple[dict[str, Json], None]]:
        """Yields an event for each token; the last one has the whole text, too."""
        held: dict[str, Json] | None = None
        async for new in handles[0]:
            for token in answers.lorax_tokens(self.words, new):
                if held is not None:
                    yield held, None
                held = {"token": token, "generated_text": None, "details": None}
        served = handles[0].result()
        self._count([served], request)
        if held is not None:
            yield {**held, **answers.lorax_end(served, prompt, asked.seed)}, None

    def _count(self, served: list[Served], request: Request) -> None:
        for one in served:
            self.metrics.count(one)
            if self.tracing is not None:
                self.tracing.record(request.headers, request.state.rid, one)


_SampledT = TypeVar("_SampledT", bound=Sampled)


def _seen(request: Request, body: _SampledT) -> tuple[_SampledT, Seen | None]:
    """Returns a body, and the id of the last event if its stream is resumed.

    A request that named no seed goes on with the seed that was drawn for it.
    """
    seen = Seen.read(request.headers.get(HEADER))
    if seen is not None and body.seed is None:
        body = body.model_copy(update={"seed": seen.seed})
    return body, seen


_ADMIN_PATHS = (
    "/pause_generation", "/continue_generation", "/flush_cache", "/abort_request",
    "/update_weights_from_disk", "/update_weight_version", "/release_memory_occupation",
    "/resume_memory_occupation", *(f"/{name}" for name in sglang.ELSEWHERE),
)  # fmt: skip

_LORAX_PATHS = ("/", "/generate", "/generate_stream")


def make_app(engine: Engine, limits: Limits | None = None) -> Starlette:
    """Returns the ASGI application of an engine; its `state.service` is a `Service`."""
    service = Service(engine, limits or Limits())
    routes = [
        ("/v1/completions", "POST", service.completions),
        ("/v1/chat/completions", "POST", service.chats),
        ("/v1/models", "GET", service.models),
        ("/generate", "POST", service.lorax),
        ("/generate_stream", "POST", service.lorax_stream),
        ("/", "POST", service.lorax_root),
        ("/tokenize", "POST", service.tokenize),
        ("/metrics", "GET", service.prometheus),
        ("/health", "GET", service.health),
        ("/ready", "GET", service.health),
        ("/live", "GET", service.live),
        ("/", "GET", service.page),
        ("/model_info", "GET", service.model_info),
        ("/get_model_info", "GET", service.model_info),
        ("/pause_generation", "POST", service.pause),
        ("/continue_generation", "POST", service.go_on),
        ("/flush_cache", "POST", service.flush),
        ("/flush_cache", "GET", service.flush),
        ("/update_weight_version", "POST", service.set_version),
        ("/release_memory_occupation", "POST", service.release),
        ("/resume_memory_occupation", "POST", service.take_back),
        ("/weight_version", "GET", service.version),
        ("/get_weight_version", "GET", service.version),
        ("/v1/loads", "GET", service.loads),
        ("/server_info", "GET", service.server_info),
        ("/get_server_info", "GET", service.server_info),
        ("/health_generate", "GET", service.health),
        *((f"/{name}", "POST", service.elsewhere) for name in sglang.ELSEWHERE),
        ("/abort_request", "POST", service.abort),
        ("/update_weights_from_disk", "POST", service.update_weights),
    ]
    app = Starlette(
        routes=[
            Route(path, _guarded(service, path, method, handler), methods=[method])
            for path, method, handler in routes
        ],
        exception_handlers={404: _not_found, 405: _not_found},
    )
    app.state.service = service
    return app


def _guarded(
    service: Service,
    path: str,
    method: str,
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Returns a handler with the checks that all routes share, whose errors become answers."""
    is_open = path in ("/health", "/health_generate", "/ready", "/live")
    is_open |= (path, method) == ("/", "GET")
    lorax = method == "POST" and path in _LORAX_PATHS
    admin = path in _ADMIN_PATHS

    async def guarded(request: Request) -> Response:
        response = await answered(request)
        response.headers[ID] = request.state.rid
        return response

    async def answered(request: Request) -> Response:
        service.running += 1
        request.state.rid = uuid.uuid4().hex
        try:
            request.state.rid = request_id(request.headers, request.state.rid)
            if not is_open:
                _authorise(request, service.limits.api_key)
            if admin and not service.limits.admin:
                raise Problem(
                    403, f"{path} is off, since it is for a trainer that owns this server: start "
                    "it with --admin",
                )  # fmt: skip
            if method == "POST" and service.draining:
                raise Problem(503, "the server is stopping", headers={"Retry-After": "5"})
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            problem = Problem.of(error)
            if not isinstance(error, ValueError | Problem) and problem.status == 400:
                raise  # a mistake of ours
            service.metrics.refuse(problem.status)
            return problem.answer(getattr(request.state, "lorax", lorax))
        finally:
            service.running -= 1

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    what = f"{request.method} {request.url.path} is no route of this server"
    return Problem(404, f"{what}: see docs/serving.md").answer(lorax=False)


def _authorise(request: Request, key: str | None) -> None:
    if key is None:
        return
    sent = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
        raise Problem(
            401,
            "send the API key of this server as Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
