"""Errors as answers: a status, and a body as the clients of OpenAI or LoRAX read it."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn, TypeVar, get_args

from pydantic import ValidationError
from starlette.responses import JSONResponse

from specjax.serve.handle import Busy, Closed
from specjax.serve.http.fields import Body
from specjax.serve.resuming import Disagreement
from specjax.types import Json

_BodyT = TypeVar("_BodyT", bound=Body)


def _names(kind: type[Body]) -> set[str]:
    """Returns the names of the fields of a body, and of the bodies inside."""
    inside = [_body_of(field.annotation) for field in kind.model_fields.values()]
    return set(kind.model_fields).union(*(_names(body) for body in inside if body is not None))


def _body_of(annotation: object) -> type[Body] | None:
    """Returns the body that a field has, or may have; None if its values are no bodies."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Body):
            return kind
    return None


_ABSENT = object()
"""Stands for a field that was sent as null."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_LORAX_TYPES = {
    400: "validation",
    413: "validation",
    429: "overloaded",
    500: "generation",
    503: "overloaded",
}
"""Of other statuses, LoRAX's client reads the status alone."""


class Problem(Exception):
    """A request that ends with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Returns an error of the engine as an answer."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, Busy):
            return cls(429, str(error), headers={"Retry-After": str(math.ceil(error.seconds))})
        if isinstance(error, Closed):
            return cls(503, str(error))
        if isinstance(error, Disagreement):
            return cls(409, str(error))
        if isinstance(error, ImportError):  # of a package that only some requests need
            return cls(501, str(error))
        return cls(400, str(error))

    def body(self, lorax: bool) -> dict[str, Json]:
        """Returns the body in the form that LoRAX's or OpenAI's clients read."""
        if lorax:
            return {"error": self.message, "error_type": _LORAX_TYPES.get(self.status, "")}
        kind = _TYPES.get(self.status, "internal_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def answer(self, lorax: bool) -> JSONResponse:
        return JSONResponse(self.body(lorax), self.status, self.headers)


def refuse(message: str, param: str | None = None, status: int = 400) -> NoReturn:
    """Raises the `Problem` of a request that cannot be answered."""
    raise Problem(status, message, param)


def parse(kind: type[_BodyT], content: bytes) -> _BodyT:
    """Returns the fields of a body.

    Raises:
      Problem: it is not JSON, or a field is unknown, missing or of another type.
    """
    try:
        fields = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    return read(kind, fields)


def read(kind: type[_BodyT], fields: object, inside: str = "") -> _BodyT:
    """Checks a body that was read, as `parse` does; `inside` is the path to it, with a dot."""
    if not isinstance(fields, dict):
        refuse(f"the body is a {type(fields).__name__}; send a JSON object")
    known = [*kind.model_fields, *kind.refused]
    kept = {}
    for name, value in fields.items():
        # OpenAI's API says "or null" of every optional field: null asks for the default.
        if value is None and (
            name not in kind.model_fields or not kind.model_fields[name].is_required()
        ):
            value = _ABSENT
        if name in kind.refused and value is not _ABSENT and not _asks_nothing(kind, name, value):
            at = inside + name
            refuse(f"{at} is not supported: {kind.refused[name]}", at)
        if name in kind.model_fields:
            inner = _body_of(kind.model_fields[name].annotation)
            if isinstance(value, dict) and inner is not None:
                # LoRAX's client sends all its parameters, those that are off and ignored ones, too.
                value = read(inner, value, f"{inside}{name}.")
            if value is not _ABSENT:
                kept[name] = value
        elif name not in kind.refused and name not in kind.ignored:
            near, at = difflib.get_close_matches(name, known, 1), inside + name
            cure = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            refuse(f"there is no field {at!r}; {cure}", at)
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # pydantic also names the members of a union, such as "list[str]", and places in a list.
        names = _names(kind)
        where = inside + ".".join(part for part in map(str, first["loc"]) if part in names)
        shown = repr(first["input"])[:80]
        raise Problem(400, f"{where}={shown} is not allowed: {first['msg']}", where) from None


def _asks_nothing(kind: type[Body], name: str, value: object) -> bool:
    """Returns whether a value of a refused field asks for what this server does anyway."""
    if name in kind.done:
        done = kind.done[name]
        return value == done and isinstance(value, bool) == isinstance(done, bool)
    return value is False or (isinstance(value, str | list | dict) and not value)


def in_words_of(body: Body, error: Exception) -> Problem:
    """Returns an error of the engine, with the fields named as the client names them."""
    problem, called = Problem.of(error), body.called()
    if not isinstance(error, ValueError):
        return problem
    # A field stands at the beginning of a message, or before "=".
    named = re.compile(rf"^({'|'.join(called)})\b|\b({'|'.join(called)})(?==)")
    problem.message = named.sub(lambda found: called[found[0]], problem.message)
    first = re.match(r"[a-z_.]+(?==)", problem.message)
    problem.param = first[0] if first else None
    return problem


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not part of JSON")
