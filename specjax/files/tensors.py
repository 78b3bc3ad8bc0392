"""Reads parameters from safetensors files and writes them, by the rows of a family's table.

A stored tensor is memory-mapped while it is read.  The part that a row names, its transpose and the
slice for a device are views of the mapped file.  So a process reads only the shards of its own
devices, and at most one parameter is in host memory at a time.  While writing, one stored tensor is
in host memory at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from specjax.files import packed as packed_files
from specjax.files.folder import file_of, listed, refuse_weights, weight_files
from specjax.files.headers import FLOATS_OF_8_BITS, KINDS, WHOLE, Stored, open_tensors
from specjax.models import (
    FUSED,
    Config,
    Family,
    LinenModel,
    Packed,
    Tensor,
    Transformer,
    TransformerConfig,
    dot_general,
    is_packed,
    mtp_beginnings,
    shapes_of,
)
from specjax.parallel import Shardings, devices_of, leader, require, to_host
from specjax.types import ArrayTree, Weights

if TYPE_CHECKING:
    from specjax.files.lora import Lora

_HEAD = ("head", "kernel")
_PIECE = 2**17  # numbers

_Shape = tuple[int, ...]
_Path = tuple[str, ...]
_Index = tuple[slice, ...]
_K = TypeVar("_K", str, _Path)


def read_params(
    folder: pathlib.Path,
    family: Family,
    model: LinenModel,
    dtype: DTypeLike,
    shardings: Callable[[], Shardings] | None = None,
    *,
    config: TransformerConfig | None = None,
    layers: Sequence[int] | None = None,
    lora: Lora | None = None,
    scheme: packed_files.Scheme | None = None,
    dequantise: bool = False,
    in_int4: bool = False,
    keep_bfloat16: bool = False,
) -> dict[str, ArrayTree]:
    """Reads the parameters of `model`, in `dtype`.

    Args:
      folder: with safetensors files, or a GGUF file.
      family: gives the names of the tensors.
      model: a `Transformer`.
      dtype: to convert to.
      shardings: makes a tree like the parameters; each device reads its own slice of each tensor.
        None means the default device.  It is called after the files' headers were checked, since
        it traces the model.
      config: of the model in the files; None: that of `model`.
      layers: the layers of `config` that are layers 0, 1, ... of the model; None: all.
      lora: changes that are merged into the tensors.
      scheme: what the folder says about packed weights.
      dequantise: hold packed matrices in `dtype`, as all others.
      in_int4: round the matrices of linear maps that are not packed to 4 bits.
      keep_bfloat16: hold the matrices of linear maps in bfloat16 if the files do.

    Raises:
      ValueError: with every tensor that is missing, unexpected, stored twice, or of another shape
        or dtype; or the devices have too little memory; or with every tensor that has NaN or
        infinities in `dtype` (each process reports those that it reads).
    """
    packed = file_of(folder)
    if packed is None:
        stored, faults = open_tensors(weight_files(folder))
    else:
        from specjax.files import gguf

        stored, faults = gguf.tensors_of(packed)
    refuse_weights(folder, faults if packed is not None else [])
    if scheme is not None:
        stored, more = scheme.open(stored)
        refuse_weights(folder, faults + more)
    config = config or cast(TransformerConfig, model.module.config)
    # Tracing a model of very many layers takes minutes, and its table of experts gigabytes.
    least = config.num_layers if family.fused else config.least_tensors
    if least > len(stored):
        raise ValueError(
            f"the weights in {folder} do not fit its config.json, which describes a model of at "
            f"least {least} tensors: the files hold {len(stored)}. A file belongs to another model "
            "or is damaged; download the folder again"
        )
    module = model.module
    if isinstance(module, Transformer):  # no kernel needs to be made for the shapes
        module = module.clone(dot_general=dot_general)
    shapes = {path: leaf.shape for path, leaf in _flat(nn.meta.unbox(shapes_of(module))).items()}
    placed = cast(
        dict[_Path, NamedSharding], {} if shardings is None else flatten_dict(shardings())
    )
    table = rows_of(family, config, stored)
    if scheme is not None:
        stored = packed_files.without_zero_biases(stored, {row.name for row in table})
    stored = _cut_as(table if layers is None else _cut(table, layers), family.cut, shapes, stored)
    if lora is not None:
        stored = lora.onto(folder, stored, table, family.spelled, config.tied_embeddings)
    rows = _as_held(table if layers is None else _cut(table, layers), shapes)
    faults += _misfits(rows, shapes, stored, layers is None)
    faults += _leftovers(table, family, config, stored)
    if model.module.separate_head:
        tied = [
            dataclasses.replace(row, path=_HEAD, transpose=True)
            for row in rows
            if row.path == ("embedding",)
        ]
        rows += _as_held(tied, shapes)
    for path, shape in shapes.items():
        if sum(math.prod(_part_shape(row, shape)) for row in rows if row.path == path) != math.prod(
            shape
        ):
            faults.append(
                f"no tensor, or only a part of one, is read into the parameter {'/'.join(path)}"
            )
    return _read_leaves(
        folder, rows, shapes, stored, faults, dtype, placed, not dequantise, in_int4, keep_bfloat16
    )


def read_rows(
    folder: pathlib.Path,
    rows: list[Tensor],
    shapes: dict[_Path, _Shape],
    stored: dict[str, Stored],
    dtype: DTypeLike,
    placed: dict[_Path, NamedSharding] | None = None,
) -> dict[str, ArrayTree]:
    """Reads parameters as `read_params`, by a table that names every tensor in `stored`.

    `shapes` and `placed` have each parameter's shape and sharding; None means the default device.
    """
    faults = row_faults(rows, shapes, stored)
    return _read_leaves(folder, rows, shapes, stored, faults, dtype, placed or {})


def row_faults(
    rows: list[Tensor], shapes: dict[_Path, _Shape], stored: dict[str, Stored]
) -> list[str]:
    """Returns a line for each tensor that `read_rows` refuses by its header."""
    named = {row.name for row in rows}
    unknown = [f"{name} is not a tensor of this format" for name in stored if name not in named]
    return _misfits(rows, shapes, stored) + unknown


def _read_leaves(
    folder: pathlib.Path,
    rows: list[Tensor],
    shapes: dict[_Path, _Shape],
    stored: dict[str, Stored],
    faults: list[str],
    dtype: DTypeLike,
    placed: dict[_Path, NamedSharding],
    packed: bool = False,
    in_int4: bool = False,
    keep_bfloat16: bool = False,
) -> dict[str, ArrayTree]:
    """Reads parameters that were checked.

    If `packed` is set, packed matrices stay so, and with `in_int4` others are rounded to 4 bits.
    With `keep_bfloat16` matrices that are stored in bfloat16 stay so.
    """
    refuse_weights(folder, faults)
    grouped = _grouped(rows, lambda row: row.path).items()
    kept_packed = {
        path: parts
        for path, parts in grouped
        if packed and packed_files.stays_packed(path, parts, shapes[path], stored)
    }
    to_round = {
        path
        for path, parts in grouped
        if in_int4
        and path not in kept_packed
        and packed_files.may_be_rounded(path, parts, shapes[path])
    }

    def kind_of(path: _Path, parts: Sequence[Tensor]) -> np.dtype:
        """Returns the dtype of a parameter that is neither packed nor rounded."""
        if parts[0].wide:
            return np.dtype(np.float32)
        matrix = keep_bfloat16 and path[-1] == "kernel" and len(shapes[path]) == 2
        kept = matrix and all(stored[part.name].kind == "BF16" for part in parts)
        return jnp.dtype(jnp.bfloat16 if kept else dtype)

    kinds = {path: kind_of(path, parts) for path, parts in grouped}
    cuts = []
    for path, parts in grouped:
        if path in placed and path in kept_packed:
            cuts.append(packed_files.check_shards(parts, stored, shapes[path], placed[path]))
        elif path in placed and path in to_round:
            turned = path[-1] != "weight"
            cuts.append(
                packed_files.check_rounded_shards(parts[0].name, shapes[path], turned, placed[path])
            )
    cure = "load in another dtype" if to_round else "load with dequantise=True"
    if misfits := [fault for fault in cuts if fault is not None]:
        packed_files.refuse_shards(misfits, cure)

    def bytes_of(path: _Path, shape: _Shape) -> float:
        held = placed[path].shard_shape(shape) if path in placed else shape
        each = kinds[path].itemsize
        if path in kept_packed:
            each = packed_files.held_bytes(kept_packed[path], stored)
        elif path in to_round:
            each = 0.57  # half a byte, and two for the scale of 32 to 128 numbers
        return math.prod(held) * each

    devices = next(iter(placed.values())).device_set if placed else devices_of(None)
    cure = "load it in bfloat16, or split it over more devices with mesh="
    needed = sum(bytes_of(path, shape) for path, shape in shapes.items())
    require(int(needed), devices, f"the parameters in {folder}", cure)
    platform = next(iter(devices)).platform
    # Largest first, because reading needs temporary copies and memory fills up.
    leaves = sorted(grouped, key=lambda leaf: -math.prod(shapes[leaf[0]]))
    params: dict[_Path, Array | Packed] = {}
    spoilt: set[str] = set()
    for path, parts in tqdm(
        leaves, desc=f"loading {folder.name}", unit="tensor", disable=None, leave=False
    ):
        if path in kept_packed:
            at = placed.get(path)
            leaf, bad = packed_files.read_leaf(
                parts, shapes[path], stored, at, platform, _part_shape
            )
            spoilt |= set(bad)
            params[path] = jax.block_until_ready(leaf)
            continue
        if path in to_round:
            whole = tuple(slice(None) for _ in shapes[path])
            dense = _reader(parts, shapes[path], stored, jnp.float32, spoilt)(whole)
            at, turned = placed.get(path), path[-1] != "weight"
            params[path] = jax.block_until_ready(
                packed_files.rounded_leaf(dense, turned, at, platform)
            )
            continue
        read = _reader(parts, shapes[path], stored, kinds[path], spoilt)
        if path in placed:
            leaf = jax.make_array_from_callback(shapes[path], placed[path], read, kinds[path])
        else:
            leaf = jax.device_put(read((slice(None),) * len(shapes[path])))
        params[path] = jax.block_until_ready(leaf)  # otherwise host copies would pile up
    if spoilt:
        lines = [f"{name} {_what_is_not_finite(stored[name], dtype)}" for name in sorted(spoilt)]
        raise ValueError(f"the weights in {folder} are not finite:\n  {listed(lines)}")
    return unflatten_dict(params)


def all_finite(numbers: np.ndarray) -> bool:
    """Returns whether a contiguous array of floats holds neither NaN nor infinity.

    It compares the bits of the exponent, in pieces that fit into a core's cache.  That takes a
    fraction of the time to read the array; `isfinite` of bfloat16 takes many times as long.
    """
    bits = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    exponent = np.array(np.inf, numbers.dtype).view(bits.dtype)  # all exponent bits are 1
    pieces = (bits[at : at + _PIECE] for at in range(0, bits.size, _PIECE))
    return all((piece & exponent).max() != exponent for piece in pieces)


def check_written(family: Family, config: TransformerConfig, params: Weights) -> None:
    """Raises ValueError if a parameter that would be written is in int8."""
    from specjax.models import Int8

    leaves = _flat(params)
    if any(isinstance(leaves.get(row.path), Int8) for row in family.tensors(config)):
        raise ValueError(
            "matrices in int8 as specjax.quantise makes them are in no published layout: save the "
            "model that was quantised, or the one that was loaded without activations="
        )


def write_params(
    file: pathlib.Path,
    family: Family,
    config: TransformerConfig,
    params: Weights,
    dtype: DTypeLike | None = None,
    described: Config | None = None,
) -> tuple[np.dtype, Config | None]:
    """Writes the parameters of a model; as `write_rows`, by the table of a family.

    Packed matrices are written as `packed_tables` makes them, whatever the dtype of the others;
    `described` is the configuration of the quantisation that they were read with.

    Returns:
      The dtype of the first row, and the configuration of the packed matrices, if there are some.

    Raises:
      ValueError: a packed matrix cannot be written.
    """
    rows, leaves = family.tensors(config), _flat(params)
    by_name = _grouped(_as_held(rows, leaves), lambda row: row.name)
    tables, quantisation = packed_files.packed_tables(by_name, leaves, described)
    packed = {path for path, leaf in leaves.items() if is_packed(leaf)}
    plain = [row for row in _as_held(rows, leaves) if row.path not in packed]
    return write_rows(file, plain, params, dtype, tables), quantisation


def write_rows(
    file: pathlib.Path,
    rows: list[Tensor],
    params: Weights,
    dtype: DTypeLike | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
) -> np.dtype:
    """Writes one safetensors file.

    Of several processes only the first writes; the others must call too, since they hold shards of
    the parameters.

    Args:
      file: is replaced.
      rows: the tensors, each made of one or several parameters.
      params: may hold more than the rows name.
      dtype: of the tensors; by default that of each parameter.
      tables: whole numbers and flags by name, which are written as they are.

    Returns:
      The dtype of the first row.
    """
    leaves, tables = _flat(params), dict(tables or {})
    tensors = {name: (table.shape, table.dtype, []) for name, table in tables.items()}
    for name, parts in _grouped(_as_held(rows, leaves), lambda row: row.name).items():
        kind = jnp.dtype(dtype or leaves[parts[0].path].dtype)
        tensors[name] = (_stored_shape(parts[0], leaves[parts[0].path].shape), kind, parts)
    names = {kind: name for name, kind in {**KINDS, **WHOLE, **FLOATS_OF_8_BITS}.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wider dtypes first, so that all tensors are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)
    for name in order:
        shape, kind, _ = tensors[name]
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": names[kind], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file if leader() else os.devnull, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in tqdm(
            order, desc=f"saving {file.name}", unit="tensor", disable=None, leave=False
        ):
            shape, kind, parts = tensors[name]
            tensor = np.array(tables[name]) if name in tables else np.empty(shape, kind)
            for row in parts:
                part = to_host(leaves[row.path])
                part = part if row.at is None else part[row.at]
                view = tensor.reshape(row.view or shape)[row.index]
                view[...] = (part.swapaxes(-1, -2) if row.transpose else part).reshape(view.shape)
            stream.write(tensor.reshape(-1).view(np.uint8).data)
    return tensors[rows[0].name][1]


def rounded_rows(
    family: Family, config: TransformerConfig, params: Weights
) -> dict[_Path, list[Tensor]]:
    """Returns the rows of the parameters that can be rounded to few bits, by their paths."""
    leaves = _flat(params)
    grouped = _grouped(_as_held(family.tensors(config), leaves), lambda row: row.path)
    return {
        path: rows
        for path, rows in grouped.items()
        if path in leaves and packed_files.may_be_rounded(path, rows, leaves[path].shape)
    }


def rows_of(
    family: Family, config: TransformerConfig, stored: Mapping[str, Stored]
) -> list[Tensor]:
    """Returns the table of the family, with the names as the stored ones are spelled."""
    rows = _table_of(family, config, stored)
    for own, spellings in family.prefixes.items():
        used = (prefix for prefix in spellings if any(name.startswith(prefix) for name in stored))
        prefix = next(used, own)
        rows = [
            dataclasses.replace(row, name=prefix + row.name.removeprefix(own))
            if row.name.startswith(own)
            else row
            for row in rows
        ]
    names = set(stored)
    return [_as_spelled(row, family.aliases, names) for row in rows] if family.aliases else rows


def _table_of(
    family: Family, config: TransformerConfig, stored: Mapping[str, Stored]
) -> list[Tensor]:
    """Returns the table of files that hold the experts of a layer as the stored ones do."""
    found = {file.shape for name, file in stored.items() if name.endswith(FUSED)}
    if family.fused_tensors is None or not found:
        return family.tensors(config)
    rows = family.fused_tensors(config)
    wanted = {row.shape for row in rows if row.name.endswith(FUSED)}
    turned = family.turned_tensors is not None and not found & {*wanted}
    return family.turned_tensors(config) if turned and family.turned_tensors else rows


def _as_spelled(row: Tensor, aliases: Mapping[str, str], stored: set[str]) -> Tensor:
    names = (row.name.replace(own, other) for own, other in aliases.items())
    there = next((name for name in names if name in stored), row.name)
    return row if row.name in stored else dataclasses.replace(row, name=there)


@dataclasses.dataclass(frozen=True)
class _Recut(Stored):
    """Rows of a matrix that the files hold in pieces, which are cut at other rows."""

    pieces: tuple[Stored, ...]
    first: int

    def map(self) -> np.ndarray:
        whole = np.concatenate([piece.map() for piece in self.pieces])
        return whole[self.first : self.first + self.shape[0]]


def _cut_as(
    rows: list[Tensor],
    cut: tuple[str, ...],
    shapes: dict[_Path, _Shape],
    stored: dict[str, Stored],
) -> dict[str, Stored]:
    """Returns the stored tensors, those in `Family.cut` cut as the table has them.

    Pieces that do not make up the same matrix are left as they are.
    """
    if not cut:
        return stored
    wanted = {row.name: _stored_shape(row, shapes[row.path]) for row in _as_held(rows, shapes)}
    changed = dict(stored)
    for name in wanted:
        names = [name.replace(cut[0], part) for part in cut]
        if cut[0] not in name or not {*names} <= {*stored} & {*wanted}:
            continue
        pieces = tuple(stored[name] for name in names)
        sizes = [wanted[name] for name in names]
        alike = len({(piece.kind, piece.shape[1:]) for piece in pieces}) == 1
        if not alike or sum(piece.shape[0] for piece in pieces) != sum(size[0] for size in sizes):
            continue
        first = 0
        for name, piece, size in zip(names, pieces, sizes, strict=True):
            if piece.shape != size:
                made = _Recut(piece.file, piece.kind, size, piece.start, pieces, first)
                changed[name] = made
            first += size[0]
    return changed


def _cut(rows: Iterable[Tensor], layers: Sequence[int]) -> list[Tensor]:
    """Returns the rows outside the layers, and those of `layers`, which become layers 0, 1, ..."""
    names = {f"layer_{old}": f"layer_{new}" for new, old in enumerate(layers)}
    return [
        dataclasses.replace(row, path=(names.get(row.path[0], row.path[0]), *row.path[1:]))
        for row in rows
        if row.path[0] in names or not row.path[0].startswith("layer_")
    ]


def _as_held(rows: Iterable[Tensor], held: Iterable[_Path]) -> list[Tensor]:
    """Returns the rows, with `transpose` flipped for kernels held as "weight" [out, in]."""
    known, changed = set(held), []
    for row in rows:
        turned = (*row.path[:-1], "weight")
        if row.path not in known and turned in known:
            row = dataclasses.replace(row, path=turned, transpose=not row.transpose)
        changed.append(row)
    return changed


def _grouped(rows: Iterable[Tensor], key: Callable[[Tensor], _K]) -> dict[_K, list[Tensor]]:
    groups: dict[_K, list[Tensor]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _flat(tree: Weights) -> dict[_Path, Array]:
    """Returns a tree as {path: leaf}."""
    return cast(dict[_Path, Array], flatten_dict(tree))


def _part_shape(row: Tensor, leaf: _Shape) -> _Shape:
    """Returns the shape of a row's slice of a parameter, in the layout of the file."""
    shape = leaf if row.at is None else leaf[1:]
    return (*shape[:-2], *shape[:-3:-1]) if row.transpose else shape


def _stored_shape(row: Tensor, leaf: _Shape) -> _Shape:
    return row.shape or _part_shape(row, leaf)


def _misfits(
    rows: list[Tensor], shapes: dict[_Path, _Shape], stored: dict[str, Stored], whole: bool = True
) -> list[str]:
    """Returns a line for each tensor of the table that is missing or has a wrong shape or dtype.

    If `whole`, the rows cover each tensor.
    """
    faults = []
    for name, parts in _grouped(rows, lambda row: row.name).items():
        shape = _stored_shape(parts[0], shapes[parts[0].path])
        if name not in stored:
            faults.append(f"{name} is missing (shape {list(shape)})")
            continue
        tensor = stored[name]
        read = sum(math.prod(_part_shape(row, shapes[row.path])) for row in parts)
        if tensor.shape != shape:
            faults.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
        elif tensor.kind not in KINDS:
            faults.append(f"{name} is stored as {tensor.kind}; specjax reads {', '.join(KINDS)}")
        elif whole and read != math.prod(shape):
            faults.append(
                f"{name} holds {math.prod(shape)} numbers, of which the family's table reads {read}"
            )
    return faults


def _leftovers(
    rows: list[Tensor], family: Family, config: TransformerConfig, stored: dict[str, Stored]
) -> list[str]:
    """Returns a line for each tensor that no row reads.

    Buffers, a second copy of a tied embedding, and the tensors of other models are ignored.
    """
    skipped = tuple(name.format(num_layers=config.num_layers) for name in family.skipped)
    skipped += mtp_beginnings(stored, config.num_layers)
    untied = rows_of(family, dataclasses.replace(config, tied_embeddings=False), stored)
    known = {row.name for row in rows} | {row.name for row in untied if row.path[0] == "head"}
    unread = [
        name
        for name in stored
        if name not in known and not name.endswith(family.ignored) and not name.startswith(skipped)
    ]
    return [f"{name} is not a tensor of this architecture" for name in unread]


def _what_is_not_finite(tensor: Stored, dtype: DTypeLike) -> str:
    """Describes a tensor that is not finite in `dtype`, and the fix."""
    numbers, nans, infinite, greatest = tensor.map().reshape(-1), 0, 0, 0.0
    for at in range(0, numbers.size, _PIECE):
        piece = np.abs(numbers[at : at + _PIECE].astype(np.float64))
        nans, infinite = nans + np.isnan(piece).sum(), infinite + np.isinf(piece).sum()
        greatest = max(greatest, piece.max())
    if nans or infinite:
        return (
            f"holds {nans} NaN and {infinite} infinities: download it again; "
            "if it was trained so, take a checkpoint from before its loss diverged"
        )
    return f"goes up to {greatest:.3g}, beyond {jnp.dtype(dtype)}: load it in bfloat16 or float32"


def _reader(
    parts: list[Tensor],
    leaf: _Shape,
    stored: dict[str, Stored],
    dtype: DTypeLike,
    spoilt: set[str],
) -> Callable[[_Index | None], np.ndarray]:
    """Returns a function from an index of a parameter (a slice per dimension) to a new array.

    It adds to `spoilt` the names of tensors whose numbers in `dtype` and this index are not finite.
    """
    by_index = {row.at: row for row in parts}

    def part(at: int | None) -> np.ndarray:
        row = by_index[at]
        tensor = stored[row.name].map()
        view = tensor.reshape(row.view or tensor.shape)[row.index].reshape(_part_shape(row, leaf))
        return view.swapaxes(-1, -2) if row.transpose else view

    def read(index: _Index | None) -> np.ndarray:
        assert index is not None  # JAX passes None only without a shape
        out = np.empty(
            [len(range(*s.indices(size))) for s, size in zip(index, leaf, strict=True)], dtype
        )
        if None in by_index:
            fill(out, None, index)
        else:  # a stack of experts
            for i, at in enumerate(range(*index[0].indices(leaf[0]))):
                fill(out[i], at, index[1:])
        return out

    def fill(out: np.ndarray, at: int | None, index: _Index) -> None:
        with np.errstate(over="ignore"):  # float16 may overflow, which is detected below
            out[...] = part(at)[index]
        if not all_finite(out):
            spoilt.add(by_index[at].name)

    return read
