"""What JAX has traced and compiled in this process.

One listener serves every test of the process.  `jax.monitoring.clear_event_listeners` would remove
it.  Tests that compare two counts would then always pass, so ruff refuses that call.
"""

import jax

_traced: list[str | None] = []
_compiled: list[str | None] = []


def _listen(event: str, _seconds: float, fun_name: str | None = None, **_: object) -> None:
    if event.endswith("jaxpr_trace_duration"):
        _traced.append(fun_name)
    elif event.endswith("backend_compile_duration"):
        _compiled.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_listen)


def traces(since: int = 0) -> list[str | None]:
    """The names of what was traced, after the first `since` of them."""
    return _traced[since:]


def compilations() -> int:
    """The number of XLA compilations so far."""
    return len(_compiled)
