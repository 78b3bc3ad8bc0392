"""The loop of a peer's process: requests come as lines of JSON, and so do the answers.

python -m bench.peers.serving MODULE CLASS    of the engine; `engines` starts it
"""

from __future__ import annotations

import abc
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

Json = dict[str, Any]


class Decoding(abc.ABC):
    """A peer that has loaded its models.

    Attributes:
      ways: the ways to decode that it can do with these models: `plain`, `draft`, `ngram`.
      version: of the engine, for the table.
      can_impose: whether it can decode with imposed drafts.
    """

    ways: tuple[str, ...]
    version: str
    can_impose: ClassVar[bool] = False

    @abc.abstractmethod
    def generate(self, prompts: np.ndarray, new: int, way: str, num_drafts: int) -> np.ndarray:
        """Tokens [B, new] that follow the prompts [B, P], greedily and past the end of text."""

    def impose(self, text: np.ndarray, right: np.ndarray) -> None:
        """From now on draft `text` [1, L] where `right` [1, L], and elsewhere another token."""
        raise ValueError(f"{type(self).__name__} cannot be given drafts")


def answer(make: Callable[..., Decoding]) -> None:
    """Make an engine from the first line, then answer each further line."""
    # Engines print to standard output, so the answers go to a copy of it.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(reply: Json) -> None:
        out.write(json.dumps(reply) + "\n")
        out.flush()

    try:
        engine = make(**json.loads(sys.stdin.readline()))
    except Exception as error:  # of any library: the other side says what failed
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"version": engine.version, "ways": engine.ways, "can_impose": engine.can_impose})
    for line in sys.stdin:
        given = json.loads(line)
        try:
            if "text" in given:
                engine.impose(np.array(given["text"]), np.array(given["right"]))
                say({})
                continue
            prompts = np.array(given["prompts"], np.int64)
            tokens = engine.generate(prompts, given["new"], given["way"], given["num_drafts"])
            say({"tokens": tokens.tolist()})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def main(module: str, name: str) -> None:
    """Answer with the engine of this name; a package that it lacks is an answer, too."""
    answer(lambda **models: getattr(importlib.import_module(module), name)(**models))


if __name__ == "__main__":
    main(*sys.argv[1:])
