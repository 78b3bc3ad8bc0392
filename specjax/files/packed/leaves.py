"""Puts packed matrices onto devices as `models.Packed`, by the rows of a family's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax.files.headers import Stored
from specjax.files.packed.matrix import E4M3, Packed, PackedTensor, Scales
from specjax.files.packed.rounding import group_for, rounded
from specjax.models import Packed as Held
from specjax.models import Tensor
from specjax.parallel import Indivisible

_Shape = tuple[int, ...]
_STACKED = ("gate", "up", "down")
_MATRIX = ("kernel", "weight")


def may_be_packed(path: tuple[str, ...], rows: Sequence[Tensor], leaf: _Shape) -> bool:
    """Returns whether a parameter is a matrix of a linear map, or a stack of those of experts.

    Embeddings, output matrices, routers and what stays in float32 are not.
    """
    stack = len(leaf) == 3 and path[-1] in _STACKED
    matrix = len(leaf) == 2 and path[-1] in _MATRIX and path[0] not in ("head", "embedding")
    return (stack or matrix) and not any(row.wide for row in rows)


def may_be_rounded(path: tuple[str, ...], rows: Sequence[Tensor], leaf: _Shape) -> bool:
    """Returns whether a plain parameter can be rounded to few bits; routers and gates stay."""
    return may_be_packed(path, rows, leaf) and not {*path} & {"router", "shared_gate"}


def stays_packed(
    path: tuple[str, ...], rows: Sequence[Tensor], leaf: _Shape, stored: Mapping[str, Stored]
) -> bool:
    """Returns whether a parameter of a packed folder can be held packed, by the headers.

    What `may_be_packed` leaves out is dequantised, as are the matrices that latent attention cuts
    by heads, and stacks of experts of several forms.
    """
    if not may_be_packed(path, rows, leaf):
        return False
    tensors = [stored.get(row.name) for row in rows]
    alike = {_kind(tensor) for tensor in tensors if isinstance(tensor, PackedTensor)}
    return (
        all(isinstance(tensor, PackedTensor) for tensor in tensors)
        and len(alike) == 1
        and all(
            _keeps_inputs(row, cast(PackedTensor, tensor))
            for row, tensor in zip(rows, tensors, strict=True)
        )
    )


def held_bytes(rows: Sequence[Tensor], stored: Mapping[str, Stored]) -> float:
    """Returns the bytes for each number of a packed parameter."""
    tensors = (stored[row.name] for row in rows)
    return max(t.bytes_of_a_number for t in tensors if isinstance(t, PackedTensor))


def check_shards(
    rows: Sequence[Tensor], stored: Mapping[str, Stored], leaf: _Shape, at: NamedSharding
) -> str | None:
    """Returns a line if the devices would divide a group of inputs, or inputs out of order."""
    turned = _turned(rows[0], stored)
    axis = len(leaf) - (2 if turned else 1)
    inputs = leaf[axis]
    mine = at.shard_shape(leaf)[axis]
    if mine == inputs:
        return None
    name = rows[0].name
    tensor = cast(PackedTensor, stored[name])
    if "order" in tensor.parts:
        return f"{name} has its inputs in an order of its own (act-order)"
    if tensor.group < inputs and mine % tensor.group:
        return (
            f"{name} has groups of {tensor.group} inputs, and each of {inputs // mine} devices "
            f"would hold {mine / tensor.group:g} groups"
        )
    return None


def check_rounded_shards(name: str, leaf: _Shape, turned: bool, at: NamedSharding) -> str | None:
    """Returns a line if the devices would divide a group of a matrix that is rounded to 4 bits."""
    axis = len(leaf) - (2 if turned else 1)
    mine, group = at.shard_shape(leaf)[axis], group_for(leaf[axis])
    if mine == leaf[axis] or mine % group == 0:
        return None
    return f"{name} has groups of {group} inputs, and each device would hold {mine} inputs"


def refuse_shards(faults: Sequence[str], cure: str = "load with dequantise=True") -> None:
    """Raises Indivisible with the lines of `check_shards`, if there are some.

    `cure` is the last of the cures that its message names.
    """
    if faults:
        lines = "\n  ".join([*faults[:10], *[f"and {len(faults) - 10} more"] * (len(faults) > 10)])
        raise Indivisible(
            "packed matrices cannot be split so: use fewer devices along the mesh axis model, pass "
            f"rules={{}}, or {cure}:\n  {lines}"
        )


def read_leaf(
    rows: Sequence[Tensor],
    leaf: _Shape,
    stored: Mapping[str, Stored],
    at: NamedSharding | None,
    platform: str,
    part_shape: Callable[[Tensor, _Shape], _Shape],
) -> tuple[Held, list[str]]:
    """Returns a packed parameter on its devices, and the tensors that are not finite.

    Args:
      rows: that make up the parameter.
      leaf: the shape of the dense parameter.
      stored: the tensors of the files.
      at: the sharding of the dense parameter; None: the default device.
      platform: of the devices.
      part_shape: returns the shape of a row's slice of a parameter in the layout of the file.
    """
    turned, spoilt, pieces = _turned(rows[0], stored), [], []
    for row in sorted(rows, key=lambda row: row.at or 0):
        piece = _piece(row, cast(PackedTensor, stored[row.name]), part_shape(row, leaf))
        codes = piece.codes
        if codes.dtype == E4M3 and ((codes.view(np.uint8) & 0x7F) == 0x7F).any():
            spoilt.append(row.name)
        elif not all(np.isfinite(part).all() for part in _beside_codes(piece)):
            spoilt.append(row.name)
        pieces.append(piece)
    whole = pieces[0] if rows[0].at is None else _stacked(pieces)
    return _placed(whole, turned, at, platform), spoilt


def _beside_codes(piece: Packed) -> list[np.ndarray]:
    """Returns the numbers that lie between the codes of a GGUF file, so that no header has them."""
    if piece.scales.each.dtype not in (np.float16, np.float32):
        return []
    return [piece.scales.each] + ([] if piece.least is None else [piece.least])


def rounded_leaf(
    matrix: np.ndarray,
    turned: bool,
    at: NamedSharding | None,
    platform: str,
    round_to: Callable[[np.ndarray], Packed] = rounded,
) -> Held:
    """Returns a dense parameter in few bits on its devices.

    Args:
      matrix: the parameter; [..., in, out] if `turned`, else [..., out, in].
      turned: see there.
      at, platform: as for `read_leaf`.
      round_to: rounds [..., out, in]; by default to the nearest number of 4 bits.
    """
    matrix = matrix.swapaxes(-1, -2) if turned else matrix
    return _placed(round_to(np.ascontiguousarray(matrix)), turned, at, platform)


def _kind(tensor: PackedTensor) -> object:
    parts = {end: (part.kind, part.shape) for end, part in tensor.parts.items()}
    return tensor.form, tensor.turned, *sorted(parts.items())


def _turned(row: Tensor, stored: Mapping[str, Stored]) -> bool:
    """Returns whether the parameter is [in, out]."""
    return row.transpose != cast(PackedTensor, stored[row.name]).turned


def _keeps_inputs(row: Tensor, tensor: PackedTensor) -> bool:
    """Returns whether a row takes all inputs of the outputs that it takes."""
    view = row.view or tensor.shape
    axis = len(view) - (2 if tensor.turned else 1)
    size = tensor.shape[-2 if tensor.turned else -1]
    index = list(row.index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index[place : place + 1] = [slice(None)] * (len(view) - len(index) + 1)
    return view[axis] == size and (axis >= len(index) or index[axis] == slice(None))


def _piece(row: Tensor, tensor: PackedTensor, part: _Shape) -> Packed:
    """Returns the outputs that a row takes of a matrix."""
    matrix, turned = tensor.packed(), tensor.turned

    def cut(each: np.ndarray) -> np.ndarray:
        """Cuts [..., out, n]: codes, or numbers of groups."""
        many = each.shape[-1]
        view, shape = list(row.view or tensor.shape), list(part)
        axis = -2 if turned else -1
        view[axis] = shape[axis] = many
        each = each.swapaxes(-1, -2) if turned else each
        made = each.reshape(view)[row.index].reshape(shape)
        return made.swapaxes(-1, -2) if turned else made

    scales, zeros = matrix.scales, matrix.zeros
    return dataclasses.replace(
        matrix,
        codes=cut(matrix.codes),
        scales=Scales(
            cut(scales.each), None if scales.whole is None else cut(scales.whole), scales.divided
        ),
        zeros=None if zeros is None else cut(zeros),
        least=None if matrix.least is None else cut(matrix.least),
    )


def _stacked(pieces: Sequence[Packed]) -> Packed:
    """Returns the matrices of experts as one stack."""
    first = pieces[0]
    offsets = {piece.offset for piece in pieces}
    if len(offsets) > 1 or any(piece.zeros is not None for piece in pieces):
        # Some of them are symmetric.
        pieces = [
            dataclasses.replace(
                piece,
                offset=0,
                zeros=np.full(piece.scales.each.shape, piece.offset, np.int16)
                if piece.zeros is None
                else piece.zeros + np.int16(piece.offset),
            )
            for piece in pieces
        ]
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    whole = [piece.scales.whole for piece in pieces if piece.scales.whole is not None]
    inputs = np.arange(first.codes.shape[-1], dtype=np.int32)
    orders = [inputs if piece.order is None else piece.order for piece in pieces]
    ordered = any(piece.order is not None for piece in pieces)
    return dataclasses.replace(
        pieces[0],
        codes=np.stack([piece.codes for piece in pieces]),
        scales=Scales(
            np.stack([piece.scales.each for piece in pieces]),
            np.stack(whole) if whole else None,
            first.scales.divided,
        ),
        zeros=np.stack(zeros) if zeros else None,
        order=np.stack(orders) if ordered else None,
    )


def _placed(matrix: Packed, turned: bool, at: NamedSharding | None, platform: str) -> Held:
    codes, offset, zeros = matrix.codes, matrix.offset, matrix.zeros
    inputs, groups = codes.shape[-1], matrix.scales.each.shape[-1]
    pairs, in_groups = False, platform != "cpu"
    if matrix.bits == 4 and in_groups:
        codes = codes.astype(ml_dtypes.uint4)
    elif matrix.bits == 4 and inputs % 2 == 0 and matrix.group % 2 == 0:
        codes, pairs = codes[..., 0::2] | (codes[..., 1::2] << 4), True
    elif offset == 128:
        codes, offset = (codes ^ 0x80).view(np.int8), 0
    if zeros is not None:
        zeros = zeros.astype(np.int8 if codes.dtype == np.int8 else np.uint8)
    factor = matrix.scales.whole
    if in_groups:
        codes = _in_groups(codes, groups, matrix.group)
    axes = None if at is None else _axes(at, len(matrix.codes.shape), turned)

    def put(array: np.ndarray | None, of_codes: bool = False) -> Array | None:
        if array is None:
            return None
        if in_groups and not of_codes:
            array = array.swapaxes(-1, -2)
        array = np.ascontiguousarray(array)
        if at is None or axes is None:
            return jax.device_put(array)
        stack, outer, inner = axes
        many = array.shape[-2 if in_groups else -1] > 1
        if in_groups and of_codes:
            each = (inner, None, outer) if groups > 1 else (None, inner, outer)
        elif in_groups:
            each = (inner if many else None, outer)
        else:
            each = (outer, inner if of_codes or many else None)
        where = NamedSharding(at.mesh, PartitionSpec(*stack, *each))
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

    order = None
    if matrix.order is not None:
        everywhere = None if at is None else NamedSharding(at.mesh, PartitionSpec())
        order = jax.device_put(np.ascontiguousarray(matrix.order), everywhere)
    return Held(
        codes=cast(Array, put(codes, True)),
        scales=cast(Array, put(matrix.scales.each)),
        zeros=put(zeros),
        whole=put(factor),
        order=order,
        offset=offset,
        inputs=inputs,
        group=matrix.group,
        fp4=matrix.fp4,
        pairs=pairs,
        in_groups=in_groups,
        turned=turned,
        least=put(matrix.least),
        rows=matrix.rows,
        divided=matrix.scales.divided,
    )


def _in_groups(codes: np.ndarray, groups: int, group: int) -> np.ndarray:
    """Returns codes [..., out, in] as [..., groups, group, out], filled with codes of 0."""
    *outer, inputs = codes.shape
    if groups == 1:
        group = inputs
    if extra := groups * group - inputs:
        filled = np.zeros((*outer, inputs + extra), codes.dtype)
        filled[..., :inputs] = codes
        codes = filled
    return np.moveaxis(codes.reshape(*outer, groups, group), -3, -1)


def _axes(at: NamedSharding, count: int, turned: bool) -> tuple[list[Any], Any, Any]:
    """Returns the axes of the mesh along a stack, the outputs and the inputs."""
    *stack, one, two = (*at.spec, *[None] * (count - len(at.spec)))
    return (stack, two, one) if turned else (stack, one, two)
