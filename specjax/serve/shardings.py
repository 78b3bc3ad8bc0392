"""The shardings of an engine's arrays on a mesh: of the batch, of a single row, and of a prompt.

    batch      rows over `data`, heads over `model`
    one row    held by every device along `data`, heads over `model`

Without a mesh these functions do nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.contract import ArrayTree
from specjax.parallel import RULES, Rules, is_split, mesh_of, shard_state
from specjax.serve.per_row import Limits, SeveralState
from specjax.serve.reading import Reading
from specjax.types import DecodeState, Params

_T = TypeVar("_T")

_ONE_ROW: Rules = {**RULES, "batch": None}


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The shardings of an engine, for use inside of jitted functions.

    Attributes:
      mesh: of the target's parameters; None on one device.
      target: True if the target's parameters are split over the mesh.
      parts: the same for each drafter.
    """

    mesh: Mesh | None
    target: bool
    parts: tuple[bool, ...]

    @classmethod
    def of(cls, params: Params) -> Shardings:
        parts = [part for part in params.proposer if not isinstance(part, Limits)]
        return cls(mesh_of(params.target), is_split(params.target), tuple(map(is_split, parts)))

    def rows(self, arrays: _T) -> _T:
        """Shards the arrays of the batch that are not caches."""
        return shard_state(arrays, self.mesh, False)

    def one(self, arrays: _T) -> _T:
        """Shards the arrays of a single row that are not caches."""
        return shard_state(arrays, self.mesh, False, _ONE_ROW)

    def batch(self, state: DecodeState) -> DecodeState:
        return self._state(state, RULES)

    def row(self, state: DecodeState) -> DecodeState:
        return self._state(state, _ONE_ROW)

    def reading(self, reading: Reading) -> Reading:
        return dataclasses.replace(
            shard_state(dataclasses.replace(reading, own=()), self.mesh, self.target, _ONE_ROW),
            own=self._own(reading.own, _ONE_ROW),
        )

    def known(self, arrays: _T) -> _T:
        """Gives each process all of the arrays that the host reads, if there are several."""
        if self.mesh is None or len({x.process_index for x in self.mesh.devices.flat}) == 1:
            return arrays
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.lax.with_sharding_constraint(arrays, everywhere)

    def _state(self, state: DecodeState, rules: Rules) -> DecodeState:
        several = state.proposer
        assert isinstance(several, SeveralState)
        choices = shard_state(dataclasses.replace(several, own=()), self.mesh, False, rules)
        return dataclasses.replace(
            shard_state(dataclasses.replace(state, proposer=None), self.mesh, self.target, rules),
            proposer=dataclasses.replace(choices, own=self._own(several.own, rules)),
        )

    def _own(self, own: tuple[ArrayTree, ...], rules: Rules) -> tuple[ArrayTree, ...]:
        return tuple(
            shard_state(part, self.mesh, split, rules)
            for part, split in zip(own, self.parts, strict=True)
        )
