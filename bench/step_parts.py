"""`python -m bench.step_parts`: what a step takes on a CPU, and its products alone, by rows.

A step is a pass of a model over some tokens of one row, with a KV cache.  Its products are those of
all its matrices, one after the other.  Both are timed with the kernels of `specjax.kernels` and
with XLA alone, in turn, and a step also with kernels for its products but not for its attention;
the rest of a step is norms and what is between them.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array

import specjax
from bench.command import run
from bench.weights import SIZES, random_folders
from specjax.measure import Sample, Timed, describe, first_calls, take_turns
from specjax.models import (
    Int8,
    LanguageModel,
    LinenModel,
    Packed,
    attend,
    cpu_dot_general,
    for_several_devices,
)
from specjax.options import fields
from specjax.options.command import parse
from specjax.types import Arrays

_STEPS = 8
_DTYPES = ("float32", "bfloat16", "int8", "int4")
_LAST = {"kernel": 0, "weight": 1}  # name of a matrix -> the axis that is summed


def models(folder: pathlib.Path, dtype: str) -> dict[str, LanguageModel]:
    """The same weights with kernels, with kernels for products alone, and without any."""
    target = specjax.load(folder, "bfloat16" if dtype == "int8" else dtype)
    target = specjax.quantise(target) if dtype == "int8" else target
    network = LinenModel(target.model.module.clone(attend=attend), target.model.dtype)
    return {
        "kernels": target,
        "kernels for products": dataclasses.replace(target, model=network),
        "XLA": for_several_devices(target),
    }


def step(model: LanguageModel, rows: int, slots: int, filled: int) -> Callable[[Arrays], Array]:
    """`_STEPS` passes over `rows` tokens, each of which needs the one before."""
    cache = model.model.init_cache(1, slots)
    cache = dataclasses.replace(cache, length=cache.length + filled)
    positions = jnp.arange(filled, filled + rows)[None]

    def again(params: Arrays) -> Array:
        def turn(_: int, carried: tuple[Arrays, Array]) -> tuple[Arrays, Array]:
            out = model.model.apply(params, carried[1], positions, carried[0])
            return out.cache, jnp.argmax(out.logits, -1).astype(jnp.int32)

        begun = cache, jnp.ones((1, rows), jnp.int32)
        return jax.lax.fori_loop(0, _STEPS, turn, begun)[1]

    return jax.jit(again)


def products(model: LanguageModel, rows: int) -> Callable[[Arrays], Array]:
    """The products of `step`: every matrix, and a tied embedding as the output matrix."""
    product = model.model.module.dot_general
    dtype = model.model.dtype

    def again(params: Arrays) -> Array:
        def turn(_: int, small: Array) -> Array:
            for matrix, summed in matrices(params):
                x = jnp.ones((rows, matrix.shape[summed]), dtype) + small
                y = product(x, matrix, (((1,), (summed,)), ((), ())))
                small = (y[:, :1] * 1e-30).astype(dtype)  # so that the next one waits
            return small

        return jax.lax.fori_loop(0, _STEPS, turn, jnp.zeros((rows, 1), dtype))

    return jax.jit(again)


def matrices(params: Arrays) -> Iterator[tuple[Arrays, int]]:
    """Each matrix with the axis that is summed."""
    if "head" not in params:
        yield params["embedding"], 1
    boxed = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, Int8 | Packed))
    for path, leaf in boxed:
        if isinstance(leaf, Int8):
            yield leaf.unbox(), 0
        elif isinstance(leaf, Packed):
            yield leaf.unbox(), 0 if leaf.turned else 1
        elif leaf.ndim == 2 and (name := path[-1].key) in _LAST:
            yield leaf, _LAST[name]


class _Timed(Timed):
    """One way at each number of rows."""

    def __init__(self, name: str, functions: list[Callable[[Arrays], Array]], params: Arrays):
        super().__init__(name, len(functions))
        self._functions, self._params = functions, params

    def run(self, item: int) -> Sample:
        started = time.perf_counter()
        jax.block_until_ready(self._functions[item](self._params))
        return Sample((time.perf_counter() - started) / _STEPS)


@dataclasses.dataclass(frozen=True)
class PartsOptions(fields.Options):
    """The options of `python -m bench.step_parts`."""

    target: str = fields.option(str(specjax.shipped("pycode/target")), "a model's folder")
    size: str | None = fields.option(
        None, "random weights instead of --target", choices=sorted(SIZES)
    )
    weights: str = fields.option("runs/bench", "folder in which random weights are written, once")
    dtypes: tuple[str, ...] = fields.option(_DTYPES, "of the weights", choices=_DTYPES)
    rows: tuple[int, ...] = fields.option((1, 2, 3, 5, 9, 16), "tokens")
    rounds: int = fields.option(15, "measured rounds, after a first one")
    slots: int = fields.option(256, "of the KV cache")
    filled: int = fields.option(100, "slots that hold a token before")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[1, inf)", "rounds", "filled")
        if min(self.rows) < 1:
            raise ValueError(f"--rows is {min(self.rows)}; it must be at least 1")
        if max(self.rows) > self.slots - self.filled:
            room = self.slots - self.filled
            raise ValueError(f"--rows is {max(self.rows)}; the cache has room for {room}")


def table(options: PartsOptions, folder: pathlib.Path, dtype: str) -> str:
    rows, made = options.rows, models(folder, dtype)
    steps = [
        _Timed(
            f"step, {way}",
            [step(model, n, options.slots, options.filled) for n in rows],
            model.params,
        )
        for way, model in made.items()
    ]
    timed = [
        *steps,
        *(
            _Timed(f"products, {way}", [products(made[way], n) for n in rows], made[way].params)
            for way in ("kernels", "XLA")
        ),
    ]
    first_calls(timed)
    take_turns(timed, options.rounds)
    heads = "".join(f" {n} |" for n in rows)
    lines = [f"\n{dtype}, ms\n\n| rows |{heads}", "|---|" + "---|" * len(rows)]
    for each in timed:
        cells = [f"{1e3 * statistics.median(s):.2f}" if s else "" for s in each.seconds]
        lines.append(f"| {each.name} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(PartsOptions, argv, __doc__, "python -m bench.step_parts")
    folder = pathlib.Path(options.target)
    if options.size is not None:
        folder, _ = random_folders(options.size, 32000, pathlib.Path(options.weights), "float32")
    head = describe()
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {folder}")
    if models(folder, "float32")["kernels"].model.module.dot_general is not cpu_dot_general:
        raise ValueError("the default device is no CPU, and these kernels are for one")
    for dtype in options.dtypes:
        print(table(options, folder, dtype), flush=True)


if __name__ == "__main__":
    run(main)
