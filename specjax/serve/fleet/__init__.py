"""A fleet: several engines behind one address, with Ray Serve; it needs the extra `ray`."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.serve.fleet.call import Call, Head
    from specjax.serve.fleet.deploying import application, run, running
    from specjax.serve.fleet.ingress import make_ingress
    from specjax.serve.fleet.pool import RayPool
    from specjax.serve.fleet.replica import Replica
    from specjax.serve.fleet.slices import SliceReplica
    from specjax.serve.layout import Fleet, Slice

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Call",
    "Fleet",
    "Head",
    "RayPool",
    "Replica",
    "Slice",
    "SliceReplica",
    "application",
    "make_ingress",
    "run",
    "running",
]
