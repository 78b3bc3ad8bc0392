"""The HTTP server of an engine; it needs the extra `serve`."""

from specjax.serve.http.app import make_app
from specjax.serve.http.arriving import ID, Limits, read_body, request_id
from specjax.serve.http.following import unless_gone
from specjax.serve.http.places import HEADER
from specjax.serve.http.problems import Problem
from specjax.serve.http.server import Server, serve
from specjax.serve.http.sglang import is_sglang

__all__ = [
    "HEADER",
    "ID",
    "Limits",
    "Problem",
    "Server",
    "is_sglang",
    "make_app",
    "read_body",
    "request_id",
    "serve",
    "unless_gone",
]
