"""The kinds of cases by name."""

from __future__ import annotations

import pathlib
import random
from typing import Protocol

from tests.fuzz.calls import Arguments, Requests
from tests.fuzz.drafters import Drafters
from tests.fuzz.folders import Configurations, Headers, Indices
from tests.fuzz.law import Case
from tests.fuzz.packed import PackedWeights
from tests.fuzz.planted import Planted
from tests.fuzz.templates import Templates
from tests.fuzz.tokens import Tokenizers


class Kind(Protocol):
    """Makes cases; what they share is made once, in a folder of its own."""

    def __init__(self, root: pathlib.Path) -> None: ...

    def case(self, rng: random.Random) -> Case: ...


KINDS: dict[str, type[Kind]] = {
    "configurations": Configurations,
    "headers": Headers,
    "indices": Indices,
    "packed": PackedWeights,
    "tokenizers": Tokenizers,
    "templates": Templates,
    "drafters": Drafters,
    "arguments": Arguments,
    "requests": Requests,
    "planted": Planted,
}
"""`planted` is for the test of the fuzzer itself."""
