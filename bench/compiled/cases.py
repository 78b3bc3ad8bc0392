"""The cases that a command names, compiled one after the other."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

import specjax
from bench.compiled.cells import Cell, measure
from bench.compiled.chips import Chip, chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.extrapolated import extrapolated
from bench.compiled.options import ProgramOptions
from bench.compiled.programs import Compiled
from bench.compiled.sizes import DRAFT_OF, config_of, shapes_of
from specjax import Decoder, Params
from specjax.models import TransformerConfig

_Program = TypeVar("_Program", bound=Compiled)


@dataclasses.dataclass(frozen=True)
class Platform(Generic[_Program]):
    """What the commands for a kind of chip do in their own way."""

    devices_of: Callable[[Chip, int], np.ndarray]
    header: str
    line: Callable[[Cell], str]
    compile: Callable[..., _Program]
    read: Callable[[_Program], Mapping[str, Any]] = lambda compiled: {}
    """Of a program, what its cell holds beside the figures of `measure`."""


def compile_all(arguments: ProgramOptions, platform: Platform[Any]) -> list[Cell]:
    """Compiles the programs, prints a line for each, and returns their cells."""
    targets = {size: config_of(size, arguments.vocab_size) for size in arguments.size}
    if arguments.target_config:
        targets = {pathlib.Path(arguments.target_config).stem: _config(arguments.target_config)}
    slices = {
        (name, count): platform.devices_of(chip(name), count)
        for name in arguments.chip
        for count in arguments.chips
    }
    cells: list[Cell] = []
    print(platform.header, flush=True)
    cases = [
        (size, drafter, batch, capacity, where)
        for size in targets
        for drafter in arguments.drafter
        for batch in arguments.batch
        for capacity in arguments.capacity
        for where in slices
    ]
    for size, drafter, batch, capacity, (name, count) in cases:
        print(f"compiling {size}, {drafter}, batch {batch}, {count} x {name}", file=sys.stderr)
        case = _Case(size, drafter, batch, capacity, name, count)
        config, devices = targets[size], slices[name, count]
        layers = arguments.layers or (config.num_layers,)
        if layers[-1] > config.num_layers:
            raise ValueError(f"--layers is {[*layers]}; {size} has {config.num_layers} layers")
        made = [case.cell(arguments, platform, config.truncated(n), devices) for n in layers]
        cell = made[-1]
        if arguments.layers:
            of_all = config.num_layers
            cell = extrapolated(made[0], made[1], arguments.layers, of_all, chip(name).memory)
        cells.append(cell)
        print(platform.line(cell), flush=True)
        if arguments.json:  # after each cell: the next one may fail
            pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=1))
    return cells


@dataclasses.dataclass(frozen=True)
class _Case:
    """What a cell is compiled for."""

    size: str
    drafter: str
    batch: int
    capacity: int
    chip: str
    chips: int

    def cell(
        self,
        arguments: ProgramOptions,
        platform: Platform[Any],
        config: TransformerConfig,
        devices: np.ndarray,
    ) -> Cell:
        """Compiles a program, and returns what the report says of it."""
        target = shapes_of(config, arguments.dtype, devices)
        vocab_size = target.model.vocab_size
        named = arguments.draft or DRAFT_OF.get(self.size, "150m")
        draft = shapes_of(config_of(named, vocab_size), arguments.dtype, devices)
        sketch = DRAFTERS[self.drafter](target, draft)
        proposer = sketch.proposer
        decoder = Decoder(target.model, proposer, specjax.Match(), (2,), self.capacity)
        params = Params(target.params, sketch.params)
        split = sketch.draft if arguments.split_draft else None
        compiled = platform.compile(decoder, params, devices, self.batch, split)
        given = arguments.filled
        filled = self.capacity if given is None else min(given, self.capacity)
        if arguments.keep:
            folder = pathlib.Path(arguments.keep)
            folder.mkdir(parents=True, exist_ok=True)
            depth = f"-{config.num_layers}-layers" if arguments.layers else ""
            where = f"{self.chips}x{self.chip}-{self.batch}-{self.capacity}{depth}"
            (folder / f"{self.size}-{self.drafter}-{where}.txt").write_text(compiled.text)
        return {
            **dataclasses.asdict(self),
            "dtype": arguments.dtype,
            "filled": filled,
            "vocab_size": vocab_size,
            "draft": named,
            # None for a tree: siblings are no independent chances.
            "lookahead": proposer.max_depth if proposer.is_chain else None,
            **measure(compiled, vocab_size, self.chips, chip(self.chip).memory, filled),
            **platform.read(compiled),
        }


def _config(path: str) -> TransformerConfig:
    """Of a `config.json`, or of the folder with it."""
    from specjax.files import read_config

    given = pathlib.Path(path)
    folder = given if given.is_dir() else given.parent
    if not (folder / "config.json").is_file() or given not in (folder, folder / "config.json"):
        raise ValueError(f"--target-config {path} is no config.json, and no folder with one")
    return read_config(folder)[2]
