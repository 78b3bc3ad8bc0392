"""Peers in processes of their own, as contestants of `python -m bench`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from bench.contestants import ROUNDED, Contestant, Imposition
from bench.peers.serving import Json

ENGINES = {
    "llama.cpp": ("bench.peers.llama", "LlamaCpp"),
    "openvino": ("bench.peers.openvino_ai", "OpenVino"),
}
"""Name -> the module and the class that its process runs."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every engine of a report runs.

    Attributes:
      target, draft: folders of the models.
      work: the folder for the models in the engines' own formats.
      python: the interpreter that has the engines.
      ways: those that are measured: `plain`, `draft`, `ngram`.
      num_drafts: each is measured in every way that drafts.
      alone: whether a batch has one prompt; batches of more are decoded plainly.
      script: the imposed acceptance; None for the real one.
    """

    target: pathlib.Path
    draft: pathlib.Path | None
    work: pathlib.Path
    python: str
    ways: Sequence[str]
    num_drafts: Sequence[int]
    alone: bool
    script: Imposition | None


class Engine:
    """An engine in a process of its own, which waits while others are measured."""

    def __init__(self, name: str, setting: Setting, precision: str) -> None:
        """Start the process and let it load the models.

        Raises:
          ValueError: if it cannot, with its reason.
        """
        self.name, self._setting, self._precision = name, setting, precision
        setting.work.mkdir(parents=True, exist_ok=True)
        root = pathlib.Path(__file__).parent.parent.parent
        threads = len(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [setting.python, "-m", "bench.peers.serving", *ENGINES[name]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(root)},
        )
        folders = {"target": setting.target, "draft": setting.draft, "work": setting.work}
        asked: Json = {key: path and str(path.resolve()) for key, path in folders.items()}
        try:
            said = self._ask(asked | {"dtype": precision, "threads": threads})
        except ValueError as error:
            self.close()
            raise ValueError(
                f"the engine {name} does not run under {setting.python}: {error}. Install the "
                "extra [peers] in an environment, and name its interpreter by --engine-python"
            ) from None
        self.version: str = said["version"]
        self._ways: Sequence[str] = said["ways"]
        self._can_impose: bool = said["can_impose"]

    def contestants(self) -> list[Contestant]:
        """Every way in which this engine decodes here.

        In int8 and int4 that is plain decoding only, because an imposed text is that of the whole
        target.
        """
        setting, rounded = self._setting, ROUNDED.get(self._precision)
        found = []
        if "plain" in setting.ways:
            found.append(self._contestant("plain", 0, rounded or "plain"))
        if not setting.alone or rounded is not None:
            return found
        if setting.script is not None:
            if not self._can_impose:
                return found
            text, right = (x.tolist() for x in setting.script)
            self._ask({"text": text, "right": right})
        ways = [way for way in ("draft", "ngram") if way in setting.ways and way in self._ways]
        return found + [
            self._contestant(way, gamma, way) for gamma in setting.num_drafts for way in ways
        ]

    def close(self) -> None:
        """End the process; this may be called again."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread request
                    pipe.close()

    def _contestant(self, way: str, num_drafts: int, name: str) -> Contestant:
        def run(prompts: np.ndarray, new: int) -> np.ndarray:
            asked = {"prompts": prompts.tolist(), "new": new, "way": way, "num_drafts": num_drafts}
            return np.array(self._ask(asked)["tokens"])

        return Contestant(name, self.name, num_drafts, run)

    def _ask(self, request: Json) -> Json:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply = json.loads(line) if line else {"error": "its process ended; its message is above"}
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply


def interpreter(given: str | None) -> str:
    """The interpreter that runs the engines: this one, or the one that was named.

    Raises:
      ValueError: if there is no such file.
    """
    if given is None:
        return sys.executable
    if not pathlib.Path(given).is_file():
        raise ValueError(f"--engine-python {given} is not a file; name an interpreter")
    return given
