"""The types that a class of the contract is made for: `Proposer[SharedParams, Eagle3State]`.

A class that handles one kind of records names them.  One that passes on the records of another,
such as a shape, passes on the variables.
"""

from __future__ import annotations

from typing import TypeVar

from specjax.contract.cache import Cache

ParamsT = TypeVar("ParamsT")
"""The parameters."""

StateT = TypeVar("StateT")
"""The state between two steps."""

ReadingT = TypeVar("ReadingT")
"""The value that a source passes on within one `propose`."""

MemoryT = TypeVar("MemoryT")
"""The memory of a path in a `BlockSource` that corrects."""

CacheT = TypeVar("CacheT", bound=Cache)
"""The cache of a model."""
