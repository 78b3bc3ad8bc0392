"""Serving: an engine whose texts do not depend on load, and an HTTP server for it."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.serve.engine import Engine
    from specjax.serve.handle import Busy, Closed, Guess, Handle, Increment, Served, Times
    from specjax.serve.layout import Fleet, Slice
    from specjax.serve.listening import ServerOptions, check_packages, check_traces, run_server
    from specjax.serve.offline import RowWriter, row_seed, write_texts
    from specjax.serve.resuming import Delivered, Disagreement
    from specjax.serve.scheduler import Load
    from specjax.serve.several import fleet_application, ray_pool, run_fleet

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Busy",
    "Closed",
    "Delivered",
    "Disagreement",
    "Engine",
    "Fleet",
    "Guess",
    "Handle",
    "Increment",
    "Load",
    "RowWriter",
    "Served",
    "ServerOptions",
    "Slice",
    "Times",
    "check_packages",
    "check_traces",
    "fleet_application",
    "ray_pool",
    "row_seed",
    "run_fleet",
    "run_server",
    "write_texts",
]
