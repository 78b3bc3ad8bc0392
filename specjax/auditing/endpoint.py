"""A client of OpenAI-compatible completion endpoints, with only the standard library."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specjax._internal.checks import real, within


class Writer(Protocol):
    """The interface of anything that continues prompts with texts."""

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> list[str]:
        """Continues each prompt; `settings` hold temperature, max_tokens, top_p."""
        ...


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Sends `POST url/completions` for each prompt.

    Attributes:
      url: up to and with the version, such as http://localhost:8000/v1.
      model: its name there.
      key: sent as a bearer token; empty: none is sent.
      timeout: seconds until a request fails.
      concurrency: requests at the same time.
    """

    url: str
    model: str
    key: str = dataclasses.field(default="", repr=False)
    timeout: float = 60.0
    concurrency: int = 8

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"url={self.url} is not an address; it must look like http://localhost:8000/v1"
            )
        real("timeout", self.timeout, "(0, inf)", " (seconds)")
        within("concurrency", self.concurrency, 1)

    def alone(self) -> Endpoint:
        """Returns the same endpoint with one request at a time."""
        return dataclasses.replace(self, concurrency=1)

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> list[str]:
        """Returns the continuations, in the order of the prompts.

        Raises:
          ValueError: the endpoint cannot be reached, refuses a request, or answers something else
            than a completion; the message names the address and the cure.
        """
        bodies = [
            {"model": self.model, "prompt": prompt, "seed": seed, **settings}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(self.concurrency) as pool:
            try:
                return list(pool.map(self._complete, bodies))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _complete(self, body: Mapping[str, Any]) -> str:
        address = f"{self.url.rstrip('/')}/completions"
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                raw = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace").strip()
            raise ValueError(
                f"{address} answered {error.code}: {said}; {_cure(error.code)}"
            ) from None
        except TimeoutError:
            raise ValueError(
                f"{address} did not answer within {self.timeout:g} s: raise the timeout, or lower "
                "the concurrency"
            ) from None
        except (urllib.error.URLError, OSError) as error:
            raise ValueError(
                f"{address} cannot be reached ({error}): start the server, or correct the address"
            ) from None
        try:
            text = json.loads(raw)["choices"][0]["text"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f"{address} answered {raw[:120].decode(errors='replace')!r} instead of a "
                'completion, {"choices": [{"text": ...}]}: is it an OpenAI-compatible server?'
            )
        return text


def _cure(code: int) -> str:
    """Returns the advice for an HTTP status."""
    if code in (401, 403):
        return "put the API key into the environment variable that --api-key-variable names"
    if code == 404:
        return "correct the address (it usually ends with /v1) or the name of the model"
    if code == 429:
        return "lower the concurrency"
    return "see the server's log" if code >= 500 else "see what it says about the request"
