"""The state of a source after a whole prompt, as the shapes of the library make it."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.contract import BlockSource, Source
from specjax.contract.proposer import before
from specjax.types import Block


def started(source: Source | BlockSource, params: Any, prompt: Block, *room: Any) -> Any:
    """`init` with the further arguments `room`, then `read`."""
    state = source.init(params, before(prompt), *room)
    return source.read(params, state, dataclasses.replace(prompt, whole=True))
