"""What one step of the loop is on a GPU, read from the thunks and the optimised program."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from bench.compiled.hlo import Instruction, parse
from bench.compiled.programs import Compiled
from bench.compiled.traffic import COLLECTIVES
from bench.gpu.counting import Costs, Counting, Range
from bench.gpu.thunks import BRANCH, CONTROL, GRAPH, LOOP, Thunk
from specjax.caches import KVCache

_LARGE = 1 << 20
"""Bytes from which a copy, a table or the terms of a product count."""

_PADDED = 1 << 18
"""Bytes from which an array that is copied to be padded counts."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Of one turn of the loop of `Decoder.run`."""

    launches: Range  # kernels, library calls and copies, in the cheapest and the dearest branches
    waits: Range  # of the host for the device
    always: int  # launches outside of inner loops and branches
    parts: list[str]  # inner loops and branches, the outermost ones
    graphs: int  # CUDA graphs
    whole_loop: bool  # the loop itself is in a CUDA graph: the host takes no part in it
    products: dict[str, int]  # by what multiplies
    terms_written: list[int]  # bytes of the terms of products of one row that go through memory
    of_one_block: int  # kernels that use one of the chip's cores
    copied: list[int]  # bytes of copies of at least 1 MiB
    cache_copies: int  # of a cache's shape
    padded: list[int]  # bytes of arrays that are copied to pad them
    tables_gathered: list[int]  # bytes of weights that are gathered from other chips
    library_calls: dict[str, int]  # other custom calls

    def cell(self) -> dict[str, Any]:
        """The entries of a cell of the report."""
        return {
            "launches_least": self.launches[0],
            "launches_most": self.launches[1],
            "waits_least": self.waits[0],
            "waits_most": self.waits[1],
            "launches_always": self.always,
            "loops_and_branches": self.parts,
            "graphs": self.graphs,
            "whole_loop": self.whole_loop,
            "products": self.products,
            "terms_written": len(self.terms_written),
            "terms_written_bytes": sum(self.terms_written),
            "of_one_block": self.of_one_block,
            "copied": len(self.copied),
            "copied_bytes": sum(self.copied),
            "cache_copies": self.cache_copies,
            "padded": len(self.padded),
            "padded_bytes": sum(self.padded),
            "tables_gathered": len(self.tables_gathered),
            "library_calls": self.library_calls,
        }


def step_of(compiled: Compiled, root: Thunk) -> Step:
    """What a step of a compiled `Decoder.run` is."""
    program = {
        instruction.name: instruction
        for computation in parse(compiled.text).computations.values()
        for instruction in computation.instructions
    }
    main, whole_loop = next(
        (thunk, captured)
        for thunk, captured in root.walk()
        if thunk.kind == LOOP and program[thunk.instruction].op_name.count("/while") == 1
    )
    count = Counting(program, max(1, compiled.decoder.proposer.max_depth))
    body = main.parts["body"]
    costs = count.all(body, whole_loop) + count.all(main.parts["condition"], whole_loop)
    costs += Costs(waits=(not whole_loop, not whole_loop))
    parts = [
        (count.describe(thunk, captured), count.one(thunk, captured))
        for thunk, captured in _outermost(body, whole_loop)
    ]
    below = [thunk for thunk, _ in Thunk("root", "", parts={"": body}).walk()]
    found = _Leaves(_cache_shapes(compiled), _table_sizes(compiled))
    for thunk in below:
        if thunk.kind not in CONTROL and thunk.instruction in program:
            found.add(thunk, program[thunk.instruction])
    return Step(
        costs.launches,
        costs.waits,
        costs.launches[0] - sum(part.launches[0] for _, part in parts),
        [text for text, _ in parts],
        sum(thunk.kind == GRAPH for thunk in below),
        whole_loop,
        dict(found.products),
        found.terms_written,
        sum(thunk.blocks == 1 for thunk in below),
        found.copied,
        found.cache_copies,
        found.padded,
        found.tables_gathered,
        dict(found.library_calls),
    )


@dataclasses.dataclass
class _Leaves:
    """What the kernels, copies and calls are, in all branches."""

    caches: set[tuple[int, ...]]
    tables: set[tuple[int, ...]]  # their sizes in order
    products: Counter[str] = dataclasses.field(default_factory=Counter)
    terms_written: list[int] = dataclasses.field(default_factory=list)
    copied: list[int] = dataclasses.field(default_factory=list)
    cache_copies: int = 0
    padded: list[int] = dataclasses.field(default_factory=list)
    tables_gathered: list[int] = dataclasses.field(default_factory=list)
    library_calls: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, thunk: Thunk, made: Instruction) -> None:
        size = sum(shape.bytes for shape in made.shapes)
        target = re.search(r'custom_call_target="([^"]*)"', made.line)
        multiplies = made.op_name.endswith("dot_general")
        if made.opcode.removesuffix("-start") in COLLECTIVES:
            self.tables_gathered += [
                shape.bytes
                for shape in made.shapes
                if shape.bytes >= _LARGE and tuple(sorted(shape.sizes)) in self.tables
            ]
        elif "__triton_nested_gemm" in made.line or "gemm_fusion" in thunk.kernel:
            self.products["Triton"] += 1
        elif target and "cublas" in target[1]:
            self.products["cuBLAS"] += 1
        elif (target and "cudnn" in target[1]) or "__cudnn" in made.line:
            self.products["cuDNN"] += 1
        elif target:
            self.library_calls[target[1]] += 1
        elif multiplies and "multiply" in thunk.kernel and size >= _LARGE:
            self.terms_written.append(size)
        elif multiplies and thunk.kernel.startswith("input_reduce"):
            self.products["reduction"] += 1
        if "pad" in thunk.kernel and size >= _PADDED:
            self.padded.append(size)
        if thunk.kind == "kCopy" or re.search("copy|transpose|concatenate$", thunk.kernel):
            self.cache_copies += any(shape.sizes in self.caches for shape in made.shapes)
            if size >= _LARGE:
                self.copied.append(size)


def _outermost(thunks: list[Thunk], captured: bool) -> Iterator[tuple[Thunk, bool]]:
    for thunk in thunks:
        if thunk.kind in (LOOP, BRANCH):
            yield thunk, captured
        elif thunk.kind in CONTROL:
            for part in thunk.parts.values():
                yield from _outermost(part, captured or thunk.kind == GRAPH)


def _cache_shapes(compiled: Compiled) -> set[tuple[int, ...]]:
    """Of keys and values, on one device."""
    found = jax.tree.leaves(compiled.state, is_leaf=lambda leaf: isinstance(leaf, KVCache))
    return {
        x.sharding.shard_shape(x.shape)
        for cache in found
        if isinstance(cache, KVCache)
        for x in jax.tree.leaves((cache.keys, cache.values))
    }


def _table_sizes(compiled: Compiled) -> set[tuple[int, ...]]:
    """Of whole matrices that are split over devices."""
    return {
        tuple(sorted(leaf.shape))
        for leaf in jax.tree.leaves(compiled.params)
        if leaf.ndim > 1 and leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    }
