"""Writes FP8 and FP4 as they were read: the same codes, and scales of the same shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from specjax.files.packed.matrix import nibbles
from specjax.models import Config, Packed, Tensor
from specjax.parallel import to_host

_CURE = "load it with dequantise=True, and save that"
_WEIGHT = ".weight"


class _Names(NamedTuple):
    """The ends of the names of a matrix's tensors, in the place of `removed`."""

    removed: str
    codes: str
    scale: str
    whole: str = ""


_FP8 = {
    "fp8": _Names("", "", "_scale_inv"),
    "compressed-tensors": _Names("", "", "_scale"),
    "modelopt": _Names("", "", "_scale"),
}
_NV = {
    "compressed-tensors": _Names(
        _WEIGHT, ".weight_packed", ".weight_scale", ".weight_global_scale"
    ),
    "modelopt": _Names("", "", "_scale", "_scale_2"),
}
_MX = {
    "compressed-tensors": _Names(_WEIGHT, ".weight_packed", ".weight_scale"),
    "mxfp4": _Names("", "_blocks", "_scales"),
}


def float_tables(
    name: str, rows: Sequence[Tensor], leaves: Sequence[Packed], described: Config
) -> dict[str, np.ndarray]:
    """Returns the tensors of one matrix of a file, or of a stack of them.

    Args:
      name: of the matrix in a file that is not quantised.
      rows: its parts.
      leaves: the parameter of each.
      described: the configuration of the quantisation that they were read with.

    Raises:
      ValueError: the configuration has another method, or the parts have several forms.
    """
    first, method = leaves[0], str(described.get("quant_method", "compressed-tensors"))
    kinds = _FP8 if not first.fp4 else _MX if first.whole is None else _NV
    alike = {(leaf.fp4, leaf.group, leaf.rows, leaf.divided, leaf.inputs) for leaf in leaves}
    if method not in kinds or len(alike) > 1:
        raise ValueError(
            f"{name} is packed in a format that cannot be written with the method {method}: {_CURE}"
        )
    names = kinds[method]
    turned = rows[0].transpose != first.turned
    parts = [_matrix(leaf, row.at) for row, leaf in zip(rows, leaves, strict=True)]

    def joined(part: str) -> np.ndarray:
        """Returns [..., out, n], the outputs of each row in their places."""
        many, dtype = parts[0][part].shape[-1], parts[0][part].dtype
        axis = -2 if turned else -1
        shape = list(rows[0].shape or _shape(parts[0]["codes"], turned))
        shape[axis] = many
        made = np.empty(shape, dtype)
        for row, each in zip(rows, parts, strict=True):
            view = list(row.view or shape)
            view[axis] = many
            place = made.reshape(view)[row.index]
            own = each[part].swapaxes(-1, -2) if turned else each[part]
            place[...] = own.reshape(place.shape)
        return made.swapaxes(-1, -2) if turned else made

    codes, scale = joined("codes"), joined("scales")
    start = name.removesuffix(names.removed)
    if not first.fp4:
        return {start: codes, start + names.scale: _grid(name, scale, first.rows)}
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    if method == "mxfp4":
        pairs = pairs.reshape(*pairs.shape[:-1], -1, first.group // 2)
    made = {start + names.codes: np.ascontiguousarray(pairs), start + names.scale: scale}
    if first.whole is not None:
        factors = {float(part["whole"].flat[0]) for part in parts}
        if len(factors) > 1:
            raise ValueError(f"{name} is made of matrices with several factors: {_CURE}")
        shape = (1,) if first.divided else ()
        made[start + names.whole] = np.full(shape, factors.pop(), np.float32)
    return made


def described_again(described: Config) -> Config:
    """Returns the configuration for a folder without the scales of activations."""
    changed = {"activation_scheme": "dynamic"} if "activation_scheme" in described else {}
    return {**described, **changed}


def _shape(codes: np.ndarray, turned: bool) -> tuple[int, ...]:
    *stack, outputs, inputs = codes.shape
    return (*stack, inputs, outputs) if turned else (*stack, outputs, inputs)


def _grid(name: str, scale: np.ndarray, rows: int) -> np.ndarray:
    """Returns the scales of blocks, of outputs or of the matrix, of those of each output."""
    outputs = scale.shape[-2]
    rows = min(rows, outputs)
    grid = scale[..., ::rows, :]
    if not np.array_equal(np.repeat(grid, rows, axis=-2)[..., :outputs, :], scale):
        raise ValueError(f"{name} is made of matrices whose blocks do not fit each other: {_CURE}")
    if scale.ndim == 2 and rows == outputs and grid.shape[-1] == 1:
        grid = grid.reshape(1)
    if grid.dtype == np.uint8:  # exponents
        grid = np.ascontiguousarray(grid).view(ml_dtypes.float8_e8m0fnu)
    return grid


def _matrix(leaf: Packed, at: int | None) -> Mapping[str, Any]:
    """Returns codes [..., out, in], scales [..., out, groups] and the factor [..., out, 1]."""
    host = jax.tree.map(to_host, leaf)
    host = host if at is None else jax.tree.map(lambda part: part[at], host)
    codes, scales = np.asarray(host.codes), np.asarray(host.scales)
    whole = None if host.whole is None else np.asarray(host.whole)
    if leaf.pairs:
        codes = nibbles(codes)
    if leaf.in_groups:
        codes = np.moveaxis(codes, -1, -3)
        codes = codes.reshape(*codes.shape[:-2], -1)[..., : leaf.inputs]
        scales = scales.swapaxes(-1, -2)
        whole = None if whole is None else whole.swapaxes(-1, -2)
    if leaf.fp4:
        codes = codes.astype(np.uint8)
    return {"codes": codes, "scales": scales, "whole": whole}
