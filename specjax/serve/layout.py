"""`Fleet`: what a fleet consists of."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping

from specjax._internal.checks import settle, shown, typed, whole
from specjax.serve.engine import Engine

ROUTERS = ("prefix", "spread")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A kind of TPU slice, which one engine uses as a whole, with a process on each host.

    Attributes:
      version: of the chips, as Ray names it, such as "v6e", "v5p" or "v4".
      topology: of the chips, such as "4x4" or "2x2x2".

    Example:
      >>> fleet = Fleet(make_engine, replicas=2, slice=Slice("v6e", "4x4"))
    """

    version: str
    topology: str

    def __post_init__(self) -> None:
        settle(
            (
                not re.fullmatch(r"v\d+[a-z]*", str(self.version)),
                f"version={shown(self.version)}; pass one of Ray's names, such as v6e or v5p",
            ),
            (
                not re.fullmatch(r"\d+(x\d+){1,2}", str(self.topology)),
                f"topology={shown(self.topology)}; pass the chips along each axis, such as 4x4",
            ),
        )


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Engines behind one address.

    Attributes:
      engine: makes the engine of a replica, in the replica's process; all have to be alike.
      replicas: at the start, and at least.
      most: replicas at most; None is as many as at the start.  Between the two their number
        follows the requests that run and wait (`slots` for each replica).
      grow, shrink: the seconds that the load asks for more or for fewer replicas, before their
        number changes.
      slots: requests that a replica has at once; as many as its engine has slots.
      queue: requests that wait at the ingress, at least 1; more get 429.
      drain: the seconds that a replica has to finish its requests when it is stopped; as long as a
        text may take.
      patience: the seconds that a request waits for a replica while none serves; then it gets 503.
      attempts: the replicas that may end at a request, one after the other and without a new token;
        then it gets 503, since it may be what ends them.
      router: "prefix" prefers the replica that has read the beginning of a prompt; "spread" takes
        the shorter queue of two.
      cpus: of each replica, for Ray's planning.
      resources: what else a replica needs of Ray's resources, such as {"TPU": 4} or {"GPU": 1}.
      slice: the TPU slice of each replica, whose engine runs in a process on each of its hosts;
        `engine` is called in each of them, and sees the devices of all.
      pin: bind each replica to one core, replica k to core k; else they share all cores.
      api_key, body, texts, traces: as for a server.  The routes for trainers are off, since a
        request reaches one replica, and all of them have to keep the same weights.

    Example:
      >>> fleet = Fleet(make_engine, replicas=2)
    """

    engine: Callable[[], Engine]
    replicas: int = 2
    most: int | None = None
    grow: float = 30.0
    shrink: float = 600.0
    slots: int = 8
    queue: int = 256
    drain: float = 300.0
    patience: float = 120.0
    attempts: int = 8
    router: str = "prefix"
    cpus: float = 1.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slice: Slice | None = None
    pin: bool = False
    api_key: str | None = None
    body: int = 4 * 2**20
    texts: int = 16
    traces: str | None = None

    def __post_init__(self) -> None:
        settle(
            (
                not callable(self.engine),
                f"engine={shown(self.engine)}; pass a function that returns an Engine",
            )
        )
        for name, least in (("replicas", 1), ("slots", 1), ("queue", 1), ("body", 1), ("texts", 1),
                            ("attempts", 1)):  # fmt: skip
            whole(name, getattr(self, name), least, 2**31, f"a whole number of at least {least}")
        if self.most is not None:
            whole(
                "most",
                self.most,
                self.replicas,
                2**31,
                f"a whole number of at least {self.replicas}, the replicas at the start",
            )
        for name in ("drain", "patience", "cpus", "grow", "shrink"):
            value = getattr(self, name)
            typed("a number", float | int, **{name: value})
            settle(
                (
                    not (math.isfinite(value) and value >= 0),
                    f"{name}={shown(value)}; pass a number of at least 0",
                )
            )
        typed("a dict from names to numbers", Mapping, resources=self.resources)
        for name, value in self.resources.items():
            settle((
                name in ("CPU", "memory", "object_store_memory"),
                f"resources={shown(self.resources)}: {name} is none of them; pass cpus= for cores, "
                "and leave memory out",
            ))  # fmt: skip
            typed("a number", float | int, **{f"resources[{name!r}]": value})
        settle(
            (
                self.pin and not hasattr(os, "sched_setaffinity"),
                "pin=True binds processes to cores, which this system has no call for: leave it "
                "out",
            ),
            (
                self.slice is not None and (self.pin or bool(self.resources)),
                f"slice={shown(self.slice)} names what a replica needs: leave pin= and resources= "
                "out",
            ),
            (
                self.router not in ROUTERS,
                f"router={shown(self.router)}; pass one of {', '.join(ROUTERS)}",
            ),
        )
