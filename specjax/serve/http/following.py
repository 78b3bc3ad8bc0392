"""Waiting for texts in an event loop, until they end or the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from specjax.serve.handle import Handle, Increment, Served

_T = TypeVar("_T")


async def in_thread(function: Callable[..., _T], *arguments: object) -> _T:
    """Returns the result of a slow function without stopping the event loop."""
    return await anyio.to_thread.run_sync(functools.partial(function, *arguments))


async def all_of(handles: list[Handle]) -> list[Served]:
    """Returns the results of all handles."""
    return list(await asyncio.gather(*(handle.wait() for handle in handles)))


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Returns the result of `work`, unless the client closes its connection before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


@contextlib.contextmanager
def cancelling(handles: list[Handle]) -> Iterator[None]:
    """Cancels the texts when the block ends, so that none runs on for a client that has gone."""
    try:
        yield
    finally:
        cancel(handles)


def cancel(handles: list[Handle]) -> None:
    """Cancels the texts that have not ended."""
    for handle in handles:
        if not handle.done():
            handle.cancel()


async def merged(handles: list[Handle]) -> AsyncIterator[tuple[int, Increment | Served]]:
    """Yields the increments of all texts as they come, and each text at its end."""
    queue: asyncio.Queue[tuple[int, Increment | Served | Exception]] = asyncio.Queue()

    async def pump(index: int, handle: Handle) -> None:
        try:
            async for increment in handle:
                await queue.put((index, increment))
            await queue.put((index, handle.result()))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.create_task(pump(n, handle)) for n, handle in enumerate(handles)]
    try:
        left = len(pumps)
        while left:
            index, new = await queue.get()
            if isinstance(new, Exception):
                raise new
            left -= isinstance(new, Served)
            yield index, new
    finally:
        for task in pumps:
            task.cancel()
