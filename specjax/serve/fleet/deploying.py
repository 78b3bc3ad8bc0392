"""A fleet as an application of Ray Serve: `application`, and `run` and `running` on one machine.

    proxy of Ray Serve -> ingress -> router -> replicas

Ray starts, watches, routes to, scales and stops the replicas.  The ingress is ours, since Ray ends
the stream of a replica that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import FrameType
from typing import Any

from specjax._internal.extras import install
from specjax.serve.fleet.call import Call, Head
from specjax.serve.fleet.events import Absent, Lost
from specjax.serve.fleet.ingress import Full, make_ingress
from specjax.serve.http import Limits
from specjax.serve.layout import Fleet

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.exceptions import (  # pyright: ignore[reportMissingImports]
        RayError,
        RayTaskError,
        TaskCancelledError,
    )
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
        BackPressureError,
        DeploymentUnavailableError,
        ReplicaUnavailableError,
    )
except ImportError as missing:
    raise ImportError(f"specjax.serve.fleet needs ray ({missing}): {install('ray')}") from missing

from specjax.serve.fleet.machine import joined, needs

NAME = "replicas"

_APP = "specjax"

_INGRESS_CALLS = 100_000  # that an ingress has at once: its queue is that of the replicas

_STOPPING = 60.0  # seconds that Ray may take to stop replicas which have finished

_HEAD = "node:__internal_head__"
"""Ray's name of the first node, whose end ends the cluster: the ingress lives as long as that."""

_ROUTERS = {
    # The public path of this class, ray.serve.llm, wants vLLM or SGLang to be installed.
    "prefix": (
        "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
        "PrefixCacheAffinityRouter"
    ),
    "spread": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}

_IMBALANCE = 8
"""A difference of queues from which on Ray's router by prefixes takes the shorter one."""

_CHARACTERS = 4_000_000
"""Characters of prompts, from which on that router forgets the oldest."""


def _ask(handle: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Sends a call to a replica that Ray chooses."""

    async def parts() -> AsyncGenerator[Head | bytes, None]:
        answer, ended = None, False
        try:
            answer = handle.answer.remote(call)
            async for part in answer:
                yield part
            ended = True
        except BackPressureError as error:
            raise Full(f"{error.message} Too many requests wait: try again later") from None
        except (ReplicaUnavailableError, DeploymentUnavailableError) as error:
            raise Absent(error.message) from None
        except RayTaskError:
            raise  # a mistake of ours
        except TaskCancelledError as error:
            raise Lost(f"a replica has cancelled its work: {error}") from None
        except RayError as error:
            raise Lost((str(error) or type(error).__name__).splitlines()[0]) from None
        finally:
            if answer is not None and not ended:
                answer.cancel()

    return parts()


async def _serving(app: str) -> int:
    """Returns how many replicas serve."""
    try:
        found = (await asyncio.to_thread(serve.status)).applications[app].deployments[NAME]
    except (RayError, KeyError):  # nobody knows, so nobody serves
        return 0
    return found.replica_states.get("RUNNING", 0)


class _Ingress:
    """The deployment of the ingress."""

    def __init__(self, handle: Any, limits: Limits, patience: float, attempts: int) -> None:
        ask = functools.partial(_ask, handle.options(stream=True))
        serving = functools.partial(_serving, serve.get_replica_context().app_name)
        self._made = make_ingress(ask, limits, patience, attempts, serving)

    def __serve_build_asgi_app__(self) -> Any:
        return self._made

    async def drain(self) -> int:
        """Refuses new requests, and returns how many are still answered."""
        self._made.state.ingress.draining = True
        return self._made.state.ingress.running


def application(fleet: Fleet) -> Any:
    """Returns the application, for `ray.serve.run` or the file of a cluster.

    Raises:
      ImportError: the installed version of Ray has no such router.

    Example:
      >>> ray.serve.run(application(Fleet(make_engine)), route_prefix="/")
    """
    from specjax.serve.fleet.replica import Replica

    limits = Limits(
        fleet.api_key,
        fleet.body,
        texts=fleet.texts,
        drain=fleet.drain,
        traces=fleet.traces,
    )
    sizes: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.most is not None and fleet.most > fleet.replicas:
        sizes = {"autoscaling_config": {
            "min_replicas": fleet.replicas, "max_replicas": fleet.most,
            "target_ongoing_requests": fleet.slots,
            "upscale_delay_s": fleet.grow, "downscale_delay_s": fleet.shrink,
            "look_back_period_s": min(30.0, max(1.0, fleet.grow)),
            "metrics_interval_s": min(10.0, max(0.5, fleet.grow / 3)),
        }}  # fmt: skip
    if fleet.slice is None:
        kind, given, place = Replica, fleet.pin, needs(fleet.cpus, fleet.resources)
    else:
        from specjax.serve.fleet.slices import SliceReplica

        kind, given, place = SliceReplica, fleet.slice, {"num_cpus": 0}
    replicas = serve.deployment(kind).options(
        name=NAME,
        max_ongoing_requests=fleet.slots,
        max_queued_requests=fleet.queue,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=fleet.drain,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=_router(fleet.router),
        ray_actor_options=place,
        **sizes,
    )
    ingress = serve.deployment(serve.ingress()(_Ingress)).options(
        name="ingress",
        max_ongoing_requests=_INGRESS_CALLS,
        graceful_shutdown_timeout_s=fleet.drain,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
    )
    engines = replicas.bind(fleet.engine, limits, given)
    return ingress.bind(engines, limits, fleet.patience, fleet.attempts)


def _router(name: str) -> Any:
    """Returns the settings of a router."""
    settings = {"imbalanced_threshold": _IMBALANCE, "do_eviction": True,
                "eviction_threshold_chars": _CHARACTERS,
                "eviction_target_chars": _CHARACTERS // 2}  # fmt: skip
    try:
        return RequestRouterConfig(
            request_router_class=_ROUTERS[name],
            request_router_kwargs=settings if name == "prefix" else {},
            request_routing_stats_period_s=2,
        )
    except ImportError as missing:
        raise ImportError(
            f"ray {ray.__version__} has no router {name} where specjax looks for it ({missing}): "
            f"{install('ray')}"
        ) from None


@contextlib.contextmanager
def running(fleet: Fleet, host: str = "127.0.0.1", port: int = 8000) -> Iterator[str]:
    """Runs a fleet on this machine, or in the cluster that Ray is connected to, and stops it.

    Yields:
      The address, such as "http://127.0.0.1:8000".

    Raises:
      OSError: the address cannot be used.
      ValueError: the application cannot be made, such as if its engines cannot.

    Example:
      >>> with running(Fleet(make_engine, replicas=2)) as address:
      ...     print(address)
    """
    most = fleet.replicas if fleet.most is None else fleet.most
    made = application(fleet)
    if not ray.is_initialized():
        port = _free(host, port)
    with joined(most, fleet.cpus, fleet.resources) as own:
        try:
            # On the node of the ingress: what came through other nodes would end with them.
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
            try:
                serve.run(made, name=_APP, route_prefix="/")
            except RuntimeError as error:
                raise ValueError(f"the replicas did not start: {_cause(error)}") from None
            yield f"http://{host}:{port}"
        finally:
            if own:
                serve.shutdown()
            else:  # the cluster may serve others
                _delete(fleet.drain)


def _delete(drain: float) -> None:
    """Deletes the application, and waits until its replicas have finished their requests.

    `serve.delete` raises a TimeoutError after a minute, but replicas may take `drain` seconds.
    """
    until = time.monotonic() + drain + _STOPPING
    while True:
        try:
            return serve.delete(_APP)
        except TimeoutError:
            if time.monotonic() > until:
                raise


def _cause(error: RuntimeError) -> str:
    """Returns what stopped the last replica that was started, or the error without one."""
    found = serve.status().applications.get(_APP)
    message = found.deployments[NAME].message if found and NAME in found.deployments else ""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else str(error)


def _free(host: str, port: int) -> int:
    """Returns the port, or a free one for 0.  Ray would start, and wait, before it finds out."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=kind) as found:
        return found.getsockname()[1]


def run(fleet: Fleet, host: str, port: int, started: Callable[[str], None] | None = None) -> None:
    """Runs a fleet until SIGTERM or SIGINT, after which accepted requests are finished.

    A second signal ends it at once.

    Args:
      started: called with the address once all replicas serve.

    Raises:
      OSError, ValueError: as `running`.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if ended.is_set():
            os.kill(os.getpid(), number)  # Ray ends its processes if this one is gone
        ended.set()

    with running(fleet, host, port) as address:
        # Only now, since Ray takes these signals when it starts.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        if started is not None:
            started(address)
        ended.wait()
        ingress, until = serve.get_app_handle(_APP), time.monotonic() + fleet.drain
        while ingress.drain.remote().result() and time.monotonic() < until:
            time.sleep(0.1)


__all__ = ["application", "run", "running"]
