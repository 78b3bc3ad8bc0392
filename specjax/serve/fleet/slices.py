"""`SliceReplica`: a replica whose engine runs on all hosts of a TPU slice, a process on each.

    replica ── host 0   decides, answers       one placement group, one bundle a host
            └─ host 1   does what 0 decides

Ray reserves the slice as a whole, by its first host.  Processes of one slice belong together: if
one ends, all do, the replica too, and Ray starts it again on a whole slice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    RayError,
    RayTaskError,
    TaskCancelledError,
)
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    remove_placement_group,
)
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)
from ray.util.tpu import SlicePlacementGroup  # pyright: ignore[reportMissingImports]

from specjax.parallel import join_from, leaving
from specjax.serve.engine import Engine
from specjax.serve.fleet.call import Call, Head
from specjax.serve.fleet.replica import Replica
from specjax.serve.http import Limits
from specjax.serve.layout import Slice

_LABEL = "ray.io/tpu-worker-id"
"""The label of a node with the number of its host in the slice, by which JAX numbers processes."""

_RESERVING = 600.0
"""Seconds until a slice must be free.  Ray starts the replica again after that."""

_CALLS = 1000  # that a host may have at once; Ray Serve has its own limit before it


class Host:
    """The process of one host: an actor that Ray keeps in a bundle of the slice's group."""

    def __init__(self) -> None:
        self._replica: Replica | None = None

    async def about(self) -> tuple[int, str, int]:
        """Returns the number of the host in the slice, its address, and a free port of it."""
        with socket.socket() as found:
            found.bind(("", 0))
            port = found.getsockname()[1]
        number = ray.get_runtime_context().get_node_labels().get(_LABEL, "0")
        return int(number), ray.util.get_node_ip_address(), port

    async def start(
        self, make: Callable[[], Engine], limits: Limits, coordinator: str, count: int, number: int
    ) -> None:
        """Joins the group and compiles the programs; all hosts together."""

        def begin() -> None:
            with leaving_if_it_fails():
                if count > 1:
                    joined = {"coordinator": coordinator, "num_processes": count}
                    join_from({**joined, "process_id": number})
                if number == 0:
                    self._replica = Replica(make, limits)
                    return
                engine = make()
                threading.Thread(target=follow, args=[engine], daemon=True).start()

        def follow(engine: Engine) -> None:
            with leaving_if_it_fails():
                engine.follow()
            os._exit(0)

        await asyncio.to_thread(begin)

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        assert self._replica is not None
        async for part in self._replica.answer(call):
            yield part

    async def figures(self) -> tuple[dict[str, float], dict[str, int | str]]:
        """Returns what routers read and what `about` tells, if the engine is well."""
        assert self._replica is not None
        self._replica.check_health()
        return self._replica.record_routing_stats(), await self._replica.about()


@contextlib.contextmanager
def leaving_if_it_fails():
    """Ends the process with an error, which the other processes of the group are told."""
    try:
        with leaving():
            yield
    except BaseException:
        os._exit(1)  # alone, nobody has to be told


class SliceReplica:
    """A replica as Ray Serve sees it, with the methods of `Replica`; its engine is on a slice."""

    def __init__(self, make: Callable[[], Engine], limits: Limits, on: Slice) -> None:
        """Reserves a slice, starts a process on each host, and compiles.

        Args:
          make: makes the engine in each process, whose devices are those of the whole slice.
          limits: of requests.
          on: the kind of slice.

        Raises:
          TimeoutError: no slice has become free.
        """
        # The group ends with this process, which has made it, and so do the actors.
        self._group = SlicePlacementGroup(
            topology=on.topology, accelerator_version=on.version, strategy="STRICT_SPREAD",
            head_reservation_timeout_s=_RESERVING,
        )  # fmt: skip
        ready, _ = ray.wait([self._group.placement_group.ready()], timeout=_RESERVING)
        if not ready:
            raise TimeoutError(f"no slice {on.version} {on.topology} was free in {_RESERVING:g} s")
        bundle = dict(self._group.bundle_resources)
        cpus = bundle.pop("CPU", 0)
        hosts = [
            ray.remote(Host).options(
                num_cpus=cpus, resources=bundle, max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group.placement_group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self._group.num_bundles)
        ]  # fmt: skip
        told = ray.get([host.about.remote() for host in hosts])
        order = sorted(range(len(hosts)), key=lambda index: told[index][0])
        self.hosts = [hosts[index] for index in order]
        _, address, port = told[order[0]]
        ray.get([
            host.start.remote(make, limits, f"{address}:{port}", len(hosts), number)
            for number, host in enumerate(self.hosts)
        ])  # fmt: skip
        self._figures: tuple[dict[str, float], dict[str, int | str]] = ({}, {})

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yields the head and the parts of the answer to a call."""
        parts = self.hosts[0].answer.options(num_returns="streaming").remote(call)
        try:
            async for part in parts:
                yield await part
        except (RayTaskError, TaskCancelledError):
            raise  # a mistake of ours, or a client that has left, and no end of a process
        except RayError as error:
            self._end(error)
        finally:
            with contextlib.suppress(RayError):
                ray.cancel(parts)

    async def check_health(self) -> None:
        """Ends this process if a host's has ended, so that Ray starts another replica."""
        try:
            self._figures = await self.hosts[0].figures.remote()
        except RayError as error:
            self._end(error)

    def record_routing_stats(self) -> dict[str, float]:
        """Returns the load of the engine at the last look."""
        return self._figures[0]

    async def about(self) -> dict[str, int | str]:
        """Returns the number of the process of host 0 and the hash of its model."""
        return (await self.hosts[0].figures.remote())[1]

    def _end(self, error: RayError) -> None:
        """Ends this process: its callers see that a replica has died, and go on elsewhere."""
        print(f"a process of the slice has ended: {error}", flush=True)
        os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "_group"):
            with contextlib.suppress(Exception):
                remove_placement_group(self._group.placement_group)
                self._group.shutdown()


__all__ = ["SliceReplica"]
