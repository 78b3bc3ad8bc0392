"""`python -m experiments.mappings`: the memory mappings of compiled programs, up to the limit.

XLA:CPU makes some for each kernel, and where Linux refuses the next one it ends the process with
signal 11.  Every program here has other numbers, so none is found in a cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.mappings import mapped
from specjax.options.command import parse, run
from specjax.options.fields import Options, count


@dataclasses.dataclass(frozen=True)
class MappingsOptions(Options):
    """The options of `python -m experiments.mappings`."""

    programs: int = count(8, "that are compiled and held; more than 60 of 300 kernels are too many")
    kernels: int = count(300, "of each program")


def main(argv: list[str] | None = None) -> None:
    o = parse(MappingsOptions, argv, __doc__, "python -m experiments.mappings")

    def chain(x: Array, number: int) -> Array:
        for n in range(o.kernels):
            # Each array has another size, since XLA shares the kernels of equal operations.
            x = jax.lax.optimization_barrier(jnp.cumsum(x[:-1]) * (n + 1 + number))
        return x

    held = []
    for number in range(o.programs):
        program = jax.jit(chain, static_argnums=1).lower(jnp.ones(o.kernels + 100), number)
        held.append(program.compile())
        print(f"{len(held)} programs: {mapped():.1%} of the mappings", flush=True)


if __name__ == "__main__":
    run(main)
