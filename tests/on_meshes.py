"""Check decoding on eight devices against one device:

    python tests/on_meshes.py                  the cases of test_sharding.py, with collectives
    python tests/on_meshes.py --table          every family, proposer and rule (takes long)
    python tests/on_meshes.py --table --turns  every family and proposer, with one rule in turn
    python tests/on_meshes.py --collectives    the collectives of a step, by kind

`--families`, `--proposers`, `--rules` and `--meshes` select a part. `--turns` still covers every
pair of mesh, family, proposer and rule; triples add little, since a rule sees the logits of one
row, wherever they come from.

The script needs a process of its own, because the number of devices is fixed at the start. Every
case decodes on one device and on meshes with the same functions, and tokens and figures must be
equal. Then it checks what the compiled loop sends between devices and which shardings it keeps.
"""

import argparse
import collections
import dataclasses
import math
import os
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
from mesh_cases import FAMILIES, MESHES, Case, mesh_of

import specjax
from specjax.caches import prefill
from specjax.decoding.decoder import _run
from specjax.parallel.sharding import layout
from specjax.types import DecodeState, Params

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


@dataclasses.dataclass
class Found:
    """The outcome of a case: texts, figures, shapes of the donated state, and the compiled loop."""

    texts: list[list[int]]
    figures: Any
    before: DecodeState
    compiled: Any


def decode(case: Case, params: Params) -> Found:
    state = case.prefill(params)
    steps = jnp.int32(2**31 - 1)
    compiled = _run.lower(case.decoder, layout(state), params, state, steps).compile()
    before = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    after = compiled(params, state, steps)
    tokens, ends = np.asarray(after.tokens), np.asarray(after.length)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim), (old.sharding, new.sharding)
    texts = [row[:n].tolist() for row, n in zip(tokens, ends, strict=True)]
    return Found(texts, jax.device_get(after.stats), before, compiled)


def collectives(text: str) -> list[tuple[str, int]]:
    """Kind and bytes of every operation in compiled HLO that moves data between devices."""
    operations = []
    for shapes, kind in re.findall(rf"= (.+?) ({'|'.join(KINDS)})(?:-start)?\(", text):
        for dtype, dims in re.findall(
            r"(\w+)\[([\d,]*)\]", shapes
        ):  # XLA combines several into one
            operations.append(
                (kind, _BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n))
            )
    return operations


def held(leaf: Any) -> int:
    """Bytes of a leaf on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def check(name: str, case: Case, params: Params, wanted: Found) -> Found:
    """Compare a case on a mesh with one device. Raises AssertionError."""
    outcome = decode(case, params)
    assert outcome.texts == wanted.texts, f"{name}: {outcome.texts} instead of {wanted.texts}"
    jax.tree.map(np.testing.assert_array_equal, outcome.figures, wanted.figures)
    # Everything that is sent must be smaller than a device's part of a cache or of a matrix.
    caches, matrices = sizes_of(outcome, params)
    moved = collectives(outcome.compiled.as_text())
    assert moved, "eight devices that never talk: does the test still find what they say?"
    greatest = max(moved, key=lambda item: item[1])
    assert greatest[1] < min(*caches, *matrices), f"{name} moves {greatest}"
    assert outcome.compiled.memory_analysis().alias_size_in_bytes >= sum(caches), (
        f"{name}: a second cache"
    )
    return outcome


def sizes_of(outcome: Found, params: Params) -> tuple[list[int], list[int]]:
    """Bytes per device of the caches and of the target's matrices."""
    caches = [held(leaf) for leaf in jax.tree.leaves(outcome.before) if leaf.ndim == 4]
    # Matrices over a few heads or tokens are smaller than activations here, unlike in real models.
    matrices = [
        x.nbytes for x in jax.tree.leaves(params.target) if x.ndim > 1 and min(x.shape[-2:]) >= 64
    ]
    return caches, matrices


def table(options: argparse.Namespace) -> int:
    """Print a Markdown table of the rules that pass, row by row; return the number of failures."""
    columns = [" x ".join(map(str, sizes)) for sizes in options.meshes]
    print(
        f"| family | proposer | accepted | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}",
        flush=True,
    )
    broken = 0
    for family in options.families:
        for name, case in mesh_cases.family_cases(family, options.proposers).items():
            rules = [
                rule for rule in options.rules
                if case.decoder.proposer.is_chain or not specjax.RULES[rule].chain_only
            ]  # fmt: skip
            if options.turns:
                turn = list(FAMILIES).index(family) + list(specjax.PROPOSERS).index(name)
                rules = [rules[turn % len(rules)]]
            under = {
                r: dataclasses.replace(
                    case, decoder=dataclasses.replace(case.decoder, rule=specjax.RULES[r]())
                )
                for r in rules
            }
            wanted = {rule: decode(one, case.params) for rule, one in under.items()}
            good: list[list[str]] = []
            for sizes in options.meshes:
                params = case.on(mesh_of(*sizes))
                good.append([])
                for rule, one in under.items():
                    try:
                        check(f"{family}, {name}, {rule} on {sizes}", one, params, wanted[rule])
                    except AssertionError as error:
                        broken += 1
                        print(error, file=sys.stderr, flush=True)
                    else:
                        good[-1].append(rule)
            sums = [
                sum(getattr(w.figures, n).sum() for w in wanted.values())
                for n in ("accepted", "tested")
            ]
            cells = [", ".join(each) or "none" for each in good]
            print(
                f"| {family} | {name} | {sums[0]} of {sums[1]} | {' | '.join(cells)} |", flush=True
            )
            jax.clear_caches()
    return broken


def traffic(options: argparse.Namespace) -> None:
    """Print a Markdown table: what a step moves on each mesh, by kind, for a chain and a tree."""
    print(
        "| proposer | `data` x `model` | collectives a step, bytes "
        "| greatest | a layer's keys | smallest matrix |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for name, case in mesh_cases.family_cases("llama", options.proposers).items():
        wanted = decode(case, case.params)
        for sizes in options.meshes:
            params = case.on(mesh_of(*sizes))
            outcome = check(f"{name} on {sizes}", case, params, wanted)
            moved, parts = collectives(outcome.compiled.as_text()), collections.defaultdict(list)
            for kind, size in moved:
                parts[kind].append(size)
            told = ", ".join(f"{len(parts[k])} {k} of {sum(parts[k])}" for k in KINDS if k in parts)
            kind, size = max(moved, key=lambda item: item[1])
            caches, matrices = sizes_of(outcome, params)
            print(
                f"| {name} | {sizes[0]} x {sizes[1]} | {told} | {size}, {kind} "
                f"| {min(caches)} | {min(matrices)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--proposers", nargs="+", choices=specjax.PROPOSERS)
    parser.add_argument("--rules", nargs="+", choices=specjax.RULES, default=list(specjax.RULES))
    parser.add_argument("--meshes", nargs="+", type=_sizes, default=MESHES, metavar="DATAxMODEL")
    options = parser.parse_args()
    options.proposers = tuple(
        options.proposers or (("draft", "tree") if options.collectives else specjax.PROPOSERS)
    )
    # The flags must be set before JAX looks for devices.
    flags = "--xla_force_host_platform_device_count=8"
    # Unoptimised code compiles in half the time and communicates the same.
    flags += " --xla_backend_optimization_level=0" * options.table
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    assert jax.device_count() == 8
    if options.table:
        sys.exit(bool(table(options)))
    if options.collectives:
        return traffic(options)
    # These texts wrap around this ring, and it is still larger than any activation.
    prefill.CHUNK = 20
    for name, case in mesh_cases.representative().items():
        wanted = decode(case, case.params)
        for sizes in case.meshes:
            check(f"{name} on {sizes}", case, case.on(mesh_of(*sizes)), wanted)
    print("done")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


if __name__ == "__main__":
    main()
