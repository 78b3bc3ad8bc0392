"""The HTTP server of an engine; it needs the extra `serve`."""

from specjax.serve.http.app import Limits, make_app
from specjax.serve.http.server import Server, serve

__all__ = ["Limits", "Server", "make_app", "serve"]
