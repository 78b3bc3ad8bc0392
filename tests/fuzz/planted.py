"""Cases that break the law on purpose, each seed in its own way, to show that it is seen."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import subprocess
import time

from tests.fuzz.law import Case, rng_of


def _refuse(message: str) -> None:
    raise ValueError(message)


def _fill() -> None:
    held = []
    for _ in itertools.count():
        held.append(bytearray(2**26))


def _fail() -> None:
    assert False, "the model is broken"  # noqa: B011


class Planted:
    """The breaks in order, then cases that obey."""

    def __init__(self, root: pathlib.Path) -> None:
        (root / "inside").write_text("x")
        self.breaks = [
            lambda: {}["raw"],
            lambda: _refuse("it is wrong"),
            lambda: _refuse("path " + "x" * 10**5),
            lambda: pathlib.Path("/etc/hostname").read_bytes(),
            lambda: subprocess.run(["true"], check=True),
            lambda: os.system("true"),
            _fill,
            _fail,
            lambda: os.abort(),
            lambda: time.sleep(600),
            lambda: (root / "inside").read_text(),  # marked as one that must be refused
            lambda: (root / "inside").read_text(),
            lambda: _refuse("path=5 is not allowed; pass a folder"),
        ]

    def case(self, rng: random.Random) -> Case:
        # A case gets a generator and not its seed, so the seed is found by its first number.
        first = rng.random()
        number = next(n for n in itertools.count() if rng_of("planted", n).random() == first)
        return Case(self.breaks[number], ("path",), refused=number == len(self.breaks) - 3)
