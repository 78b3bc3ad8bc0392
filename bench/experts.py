"""`python -m bench.experts`: the experts of a layer for few rows, by two forms of their products.

`jax.lax.ragged_dot` is XLA's, and tiles are ours on a CPU (`models.feed_forward.by_expert`).  Both
compute the same experts of the same rows, in turn; the weights and the choice are random.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.command import run
from specjax.measure import Sample, Timed, describe, first_calls, take_turns
from specjax.models import Stacks, grouped, in_tiles
from specjax.options import fields
from specjax.options.command import parse

_FORMS = {"ragged_dot": grouped, "tiles": in_tiles}
_Given = tuple[Array, Array]  # rows, and their experts


@dataclasses.dataclass(frozen=True)
class ExpertsOptions(fields.Options):
    """The options of `python -m bench.experts`; by default a layer of Qwen3-30B-A3B."""

    experts: int = fields.option(128, "of the layer")
    chosen: int = fields.option(8, "experts of each row")
    hidden_size: int = fields.option(2048, "of a row")
    expert_size: int = fields.option(768, "between the matrices of an expert")
    dtype: str = fields.option("float32", "of the weights", choices=("float32", "bfloat16"))
    rows: tuple[int, ...] = fields.option((1, 4, 8, 64), "rows that are read at once")
    forms: tuple[str, ...] = fields.option(tuple(_FORMS), "that are timed", choices=tuple(_FORMS))
    rounds: int = fields.option(9, "measured rounds, after a first one")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[1, inf)", "experts", "chosen", "hidden_size", "expert_size", "rounds")
        if min(self.rows) < 1:
            raise ValueError(f"--rows is {min(self.rows)}; it must be at least 1")
        if self.chosen > self.experts:
            raise ValueError(f"--chosen is {self.chosen}; there are {self.experts} experts")


def layer(options: ExpertsOptions) -> tuple[Stacks, list[_Given]]:
    """The weights, and for each number of rows random rows with distinct experts."""
    o, rng = options, np.random.default_rng(0)

    def drawn(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.02, o.dtype)

    up = (o.experts, o.hidden_size, o.expert_size)
    stacks = Stacks(drawn(*up), drawn(*up), drawn(o.experts, o.expert_size, o.hidden_size))
    given = []
    for rows in o.rows:
        order = rng.permuted(np.tile(np.arange(o.experts, dtype=np.int32), (rows, 1)), axis=1)
        given.append((drawn(rows, o.hidden_size), jnp.asarray(order[:, : o.chosen])))
    return stacks, given


def _gated(gate: Array | None, up: Array) -> Array:
    assert gate is not None
    return jax.nn.silu(gate) * up


class _Timed(Timed):
    """One form at each number of rows."""

    def __init__(self, name: str, stacks: Stacks, given: list[_Given]):
        super().__init__(name, len(given))
        self._stacks, self._given, form = stacks, given, _FORMS[name]

        def mix(x: Array, chosen: Array, stacks: Stacks) -> Array:
            pairs = jnp.repeat(x, chosen.shape[1], axis=0)
            return form(_gated, pairs, chosen, stacks)

        self._mix: Callable[[Array, Array, Stacks], Array] = jax.jit(mix)

    def run(self, item: int) -> Sample:
        started = time.perf_counter()
        jax.block_until_ready(self._mix(*self._given[item], self._stacks))
        return Sample(time.perf_counter() - started)


def main(argv: list[str] | None = None) -> None:
    options = parse(ExpertsOptions, argv, __doc__, "python -m bench.experts")
    stacks, given = layer(options)
    timed = [_Timed(name, stacks, given) for name in options.forms]
    first_calls(timed)
    take_turns(timed, options.rounds)
    head = describe()
    one = sum(x[0].nbytes for x in stacks[:3] if isinstance(x, jax.Array))
    print(
        f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {options.dtype}; medians, ms"
    )
    print(f"| rows | chosen experts | their MB | {', ms | '.join(options.forms)}, ms |")
    print("|---" * (3 + len(timed)) + "|")
    for item, (rows, (_, chosen)) in enumerate(zip(options.rows, given, strict=True)):
        many = len(np.unique(chosen))
        cells = [f"{1e3 * statistics.median(each.seconds[item]):.1f}" for each in timed]
        print(f"| {rows} | {many} | {many * one / 1e6:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run(main)
