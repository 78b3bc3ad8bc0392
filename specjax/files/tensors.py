"""Safetensors files as parameters and back, by the rows of a family's table.

A stored tensor is a lazy array over its part of the file, mapped while it is read: the part that a row names, its
transpose and the slice of a device are views of it.  So only what a device will hold is read, and no more than one
parameter stands in host memory beside it.  Writing holds one stored tensor at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from tqdm import tqdm

from specjax.models import Family, LinenModel, Tensor, TransformerConfig
from specjax.parallel import devices_of, leader, require, to_host

SINGLE, INDEX, SHARDS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)

_KINDS = {
    "F32": jnp.dtype("float32"),
    "BF16": jnp.dtype("bfloat16"),
    "F16": jnp.dtype("float16"),
    "F64": jnp.dtype("float64"),
}
"""What safetensors calls a dtype that can be a weight."""

_HEAD = ("head", "kernel")
_PIECE = 2**17  # numbers

_Shape = tuple[int, ...]
_Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file, not yet read."""

    file: pathlib.Path
    kind: str
    shape: _Shape
    start: int  # byte of the file

    def map(self) -> np.ndarray:
        """A view of the file.  Nothing is read before an element is asked for."""
        if 0 in self.shape:
            return np.zeros(self.shape, _KINDS[self.kind])
        return np.asarray(np.memmap(self.file, _KINDS[self.kind], "r", self.start, self.shape))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file of a model folder.  Raises ValueError or OSError, which name the file."""
    try:
        found = json.loads(read_bytes(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def read_bytes(path: pathlib.Path, size: int = -1) -> bytes:
    """A file, or its first `size` bytes.  Raises OSError, which names the file and the cure."""
    try:
        with open(path, "rb") as stream:
            return stream.read(size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing; a model folder holds config.json and {SINGLE}"
        ) from None
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror}): it must be a file that you may read"
        ) from None


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the weights.  Raises ValueError or OSError, which say what is missing."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return [single]
    if index.exists():
        files = [folder / name for name in shard_names(index)]
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise FileNotFoundError(
                f"{index} names {', '.join(missing) or 'no file'}: download the missing shards"
            )
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} holds pickled weights (pytorch_model.bin) only, and reading those executes what they contain; "
            "specjax reads safetensors: convert with transformers' save_pretrained(safe_serialization=True)"
        )
    raise FileNotFoundError(f"{folder} holds no {SINGLE} and no {INDEX}")


def shard_names(index: pathlib.Path) -> list[str]:
    """The files that an index names."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(n, str) and n == pathlib.Path(n).name for n in names.values()
    ):
        raise ValueError(
            f"{index}: weight_map must map the names of tensors to files of this folder"
        )
    return sorted(set(names.values()))


def read_params(
    folder: pathlib.Path, family: Family, model: LinenModel, dtype: Any, shardings: Any = None
) -> dict[str, Any]:
    """The parameters of `model`, in `dtype`.

    Args:
      folder: with safetensors files.
      family: names their tensors.
      model: over a `Transformer`.
      dtype: to convert to.
      shardings: a tree like the parameters; each device reads its own slice of each tensor.  None: the default device.

    Raises:
      ValueError: all that is missing, misshapen, twice there, of another dtype or left over, at
        once; or more than the devices have memory for; or every tensor with NaN or infinities in
        `dtype` (of several processes, each says so of what it reads).
    """
    shapes = {
        path: leaf.shape
        for path, leaf in _flat(jax.eval_shape(model.init, jax.random.key(0))).items()
    }
    placed = {} if shardings is None else _flat(shardings)
    stored, faults = _open(weight_files(folder))
    rows = _as_held(_rows(family, model.module.config, stored), shapes)
    faults += _misfits(rows, shapes, stored) + _leftovers(rows, family, model.module.config, stored)
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
    if faults:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(faults)
        )
    held = (
        placed[path].shard_shape(shape) if path in placed else shape
        for path, shape in shapes.items()
    )
    devices = next(iter(placed.values())).device_set if placed else devices_of(None)
    cure = "load it in bfloat16, or split it over more devices with mesh="
    require(
        sum(map(math.prod, held)) * jnp.dtype(dtype).itemsize,
        devices,
        f"the parameters in {folder}",
        cure,
    )
    # What is greatest first: the copies that reading it takes are gone when the memory fills up.
    leaves = sorted(_grouped(rows, "path").items(), key=lambda leaf: -math.prod(shapes[leaf[0]]))
    params: dict[_Path, Any] = {}
    spoilt: set[str] = set()
    for path, parts in tqdm(
        leaves, desc=f"loading {folder.name}", unit="tensor", disable=None, leave=False
    ):
        read = _reader(parts, shapes[path], stored, dtype, spoilt)
        if path in placed:
            leaf = jax.make_array_from_callback(shapes[path], placed[path], read)
        else:
            leaf = jax.device_put(read((slice(None),) * len(shapes[path])))
        params[path] = jax.block_until_ready(leaf)  # or the host's copies would queue up
    if spoilt:
        lines = [f"  {name} {_what_is_not_finite(stored[name], dtype)}" for name in sorted(spoilt)]
        raise ValueError(f"the weights in {folder} are no finite numbers:\n" + "\n".join(lines))
    return unflatten_dict(params)


def all_finite(numbers: np.ndarray) -> bool:
    """Whether a contiguous array of floats holds neither NaN nor infinity.

    The bits of the exponent are compared, a piece at a time that a core's cache holds: that costs a
    fraction of reading the array, and the `isfinite` of bfloat16 many times as much.
    """
    bits = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    exponent = np.array(np.inf, numbers.dtype).view(bits.dtype)  # all of its ones
    pieces = (bits[at : at + _PIECE] for at in range(0, bits.size, _PIECE))
    return all((piece & exponent).max() != exponent for piece in pieces)


def write_params(
    file: pathlib.Path, family: Family, config: TransformerConfig, params: Any, dtype: Any = None
) -> np.dtype:
    """Write one safetensors file, rounded to `dtype` (None: as they are).  Returns the dtype of the first tensor.

    Of several processes the first writes; the others must call too, since they hold parts of what it writes.
    """
    leaves = _flat(params)
    tensors = {}
    for name, parts in _grouped(_as_held(family.tensors(config), leaves), "name").items():
        kind = jnp.dtype(dtype or leaves[parts[0].path].dtype)
        tensors[name] = (_stored_shape(parts[0], leaves[parts[0].path].shape), kind, parts)
    names = {kind: name for name, kind in _KINDS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Greater numbers first, so that all are aligned.
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
            whole = np.empty(shape, kind)
            for row in parts:
                part = to_host(leaves[row.path])
                part = part if row.at is None else part[row.at]
                place = whole.reshape(row.view or shape)[row.index]
                place[...] = (part.T if row.transpose else part).reshape(place.shape)
            stream.write(whole.reshape(-1).view(np.uint8).data)
    return next(iter(tensors.values()))[1]


def _open(files: Iterable[pathlib.Path]) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor of the files, by name, and complaints about those that are there twice."""
    found: dict[str, Stored] = {}
    faults = []
    for file in files:
        for name, tensor in _header(file):
            if name in found:
                faults.append(f"{name} is in two files")
            found[name] = tensor
    return found, faults


def _header(file: pathlib.Path) -> Iterator[tuple[str, Stored]]:
    length = int.from_bytes(read_bytes(file, 8), "little")
    try:
        safetensors.safe_open(
            file, "np"
        )  # which checks every offset, shape and dtype against the file's length
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or truncated ({error}); download it again") from None
    for name, entry in json.loads(read_bytes(file, 8 + length)[8:]).items():
        if name != "__metadata__":
            yield (
                name,
                Stored(
                    file,
                    entry["dtype"],
                    tuple(entry["shape"]),
                    8 + length + entry["data_offsets"][0],
                ),
            )


def _rows(family: Family, config: TransformerConfig, stored: Iterable[str]) -> list[Tensor]:
    """The table of the family, with the names that older files use where these are such."""
    rows = family.tensors(config)
    if family.prefix and not any(name.startswith(family.prefix) for name in stored):
        rows = [dataclasses.replace(row, name=row.name.removeprefix(family.prefix)) for row in rows]
    return rows


def _as_held(rows: Iterable[Tensor], held: Iterable[_Path]) -> list[Tensor]:
    """The rows, each turned about where the parameters hold a kernel [in, out] as a weight [out, in]."""
    known, found = set(held), []
    for row in rows:
        turned = (*row.path[:-1], "weight")
        if row.path not in known and turned in known:
            row = dataclasses.replace(row, path=turned, transpose=not row.transpose)
        found.append(row)
    return found


def _grouped(rows: Iterable[Tensor], field: str) -> dict[Any, list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for row in rows:
        found.setdefault(getattr(row, field), []).append(row)
    return found


def _flat(tree: Any) -> dict[_Path, Any]:
    found: Any = flatten_dict(tree)  # whose type says that leaves may be branches
    return found


def _part_shape(row: Tensor, leaf: _Shape) -> _Shape:
    """What a row reads of a parameter, turned as it is stored."""
    shape = leaf if row.at is None else leaf[1:]
    return shape[::-1] if row.transpose else shape


def _stored_shape(row: Tensor, leaf: _Shape) -> _Shape:
    return row.shape or _part_shape(row, leaf)


def _misfits(
    rows: list[Tensor], shapes: dict[_Path, _Shape], stored: dict[str, Stored]
) -> list[str]:
    faults = []
    for name, parts in _grouped(rows, "name").items():
        shape = _stored_shape(parts[0], shapes[parts[0].path])
        if name not in stored:
            faults.append(f"{name} is missing (shape {list(shape)})")
            continue
        found, read = (
            stored[name],
            sum(math.prod(_part_shape(row, shapes[row.path])) for row in parts),
        )
        if found.shape != shape:
            faults.append(f"{name} has shape {list(found.shape)} instead of {list(shape)}")
        elif found.kind not in _KINDS:
            faults.append(f"{name} is stored as {found.kind}; specjax reads {', '.join(_KINDS)}")
        elif read != math.prod(shape):
            faults.append(
                f"{name} holds {math.prod(shape)} numbers, of which the family's table reads {read}"
            )
    return faults


def _leftovers(
    rows: list[Tensor], family: Family, config: TransformerConfig, stored: dict[str, Stored]
) -> list[str]:
    """Tensors that nothing reads, but for buffers and for the second copy of a tied embedding."""
    untied = _rows(family, dataclasses.replace(config, tied_embeddings=False), stored)
    known = {row.name for row in rows} | {row.name for row in untied if row.path[0] == "head"}
    unread = [name for name in stored if name not in known and not name.endswith(family.ignored)]
    return [f"{name} is not a tensor of this architecture" for name in unread]


def _what_is_not_finite(tensor: Stored, dtype: Any) -> str:
    """What is wrong with a tensor that is not finite in `dtype`, and the cure."""
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
    dtype: Any,
    spoilt: set[str],
) -> Callable[[Any], np.ndarray]:
    """A function from slices of a parameter, one a dimension, to a fresh array of its numbers.

    It adds to `spoilt` the names of tensors that are not finite, in `dtype` and in these slices.
    """
    by_place = {row.at: row for row in parts}

    def part(at):
        row = by_place[at]
        whole = stored[row.name].map()
        found = whole.reshape(row.view or whole.shape)[row.index].reshape(_part_shape(row, leaf))
        return found.T if row.transpose else found

    def read(index):
        out = np.empty(
            [len(range(*s.indices(size))) for s, size in zip(index, leaf, strict=True)], dtype
        )
        if None in by_place:
            fill(out, None, index)
        else:  # a stack of experts
            for i, at in enumerate(range(*index[0].indices(leaf[0]))):
                fill(out[i], at, index[1:])
        return out

    def fill(out, at, index):
        with np.errstate(over="ignore"):  # of float16: what overflows is found below
            out[...] = part(at)[index]
        if not all_finite(out):
            spoilt.add(by_place[at].name)

    return read
