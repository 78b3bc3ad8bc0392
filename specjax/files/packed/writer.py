"""Writes packed matrices: whole numbers as compressed-tensors, and others as they were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.files.packed.floats import described_again, float_tables
from specjax.files.packed.matrix import E4M3, nibbles
from specjax.models import Config, Packed, Tensor
from specjax.parallel import to_host

_WEIGHT = ".weight"
_CURE = "load it with dequantise=True, and save that"

Leaves = Mapping[tuple[str, ...], Any]


def packed_tables(
    rows: Mapping[str, Sequence[Tensor]], leaves: Leaves, described: Config | None = None
) -> tuple[dict[str, np.ndarray], Config | None]:
    """Returns the tensors of the packed matrices, and the configuration of their quantisation.

    Args:
      rows: the rows of each stored tensor, by its name.
      leaves: the parameters by path.
      described: the configuration of the quantisation that they were read with.

    Raises:
      ValueError: a matrix cannot be written, or only a part of a tensor is packed; the message has
        the cure.
    """
    tables: dict[str, np.ndarray] = {}
    kinds: dict[tuple[object, ...], list[str]] = {}
    plain, floats = [], False
    for name, parts in rows.items():
        held = [leaves[row.path] for row in parts]
        if not any(isinstance(leaf, Packed) for leaf in held):
            if name.endswith(_WEIGHT) and parts[0].transpose:
                plain.append(name.removesuffix(_WEIGHT))
            continue
        if described and all(isinstance(leaf, Packed) and _is_float(leaf) for leaf in held):
            floats = True
            tables |= float_tables(name, parts, held, described)
            continue
        if not all(isinstance(leaf, Packed) and _is_whole(leaf) for leaf in held):
            raise ValueError(
                f"{name} is packed in a format that cannot be written (only whole numbers can): "
                f"{_CURE}"
            )
        if not name.endswith(_WEIGHT) or any(len(row.shape or ()) > 2 for row in parts):
            raise ValueError(f"{name} holds packed matrices of several experts: {_CURE}")
        start = name.removesuffix(_WEIGHT)
        made, kind = _tensors(name, parts, held)
        tables |= {f"{start}.weight_{end}": table for end, table in made.items()}
        kinds.setdefault(kind, []).append(start)
    if described and floats and kinds:
        raise ValueError(
            f"{next(iter(kinds.values()))[0]} is packed in whole numbers, and other matrices in FP8"
            f" or FP4, which no single configuration describes: {_CURE}"
        )
    if described and floats:
        return tables, described_again(described)
    return tables, _config(kinds, plain) if kinds else None


def _is_float(leaf: Packed) -> bool:
    return leaf.fp4 or leaf.codes.dtype == E4M3


def _is_whole(leaf: Packed) -> bool:
    whole = leaf.codes.dtype in (np.uint8, np.int8, ml_dtypes.uint4)
    return whole and not leaf.fp4 and leaf.least is None


def _tensors(
    name: str, rows: Sequence[Tensor], leaves: Sequence[Packed]
) -> tuple[dict[str, np.ndarray], tuple[object, ...]]:
    """Returns the tensors of a matrix by the ends of their names, and its kind of quantisation."""
    parts = [_whole(leaf, row.at) for row, leaf in zip(rows, leaves, strict=True)]
    bits, group, inputs = parts[0]["bits"], leaves[0].group, parts[0]["codes"].shape[-1]
    if len({(part["bits"], leaf.group) for part, leaf in zip(parts, leaves, strict=True)}) > 1:
        raise ValueError(f"{name} is made of matrices in several formats: {_CURE}")
    outputs = rows[0].shape[0] if rows[0].shape else len(parts[0]["codes"])

    def joined(part: str) -> np.ndarray:
        """Returns [out, n], the outputs of each row in their places."""
        first = parts[0][part]
        many = first.shape[-1]
        made = np.empty((outputs, many), first.dtype)
        for row, each in zip(rows, parts, strict=True):
            view = (*row.view[:-1], many) if row.view else made.shape
            place = made.reshape(view)[row.index]
            place[...] = each[part].reshape(place.shape)
        return made

    half = 2 ** (bits - 1)
    codes, zeros = joined("codes"), joined("zeros")
    made = {"scale": joined("scales"), "shape": np.array([outputs, inputs])}
    order = parts[0]["order"]
    if order is not None:
        if any(not np.array_equal(part["order"], order) for part in parts):
            raise ValueError(f"{name} is made of matrices with several orders of inputs: {_CURE}")
        back = np.empty_like(codes)
        back[:, order] = codes
        codes, index = back, np.empty(inputs, np.int32)
        index[order] = np.arange(inputs, dtype=np.int32) // group
        made["g_idx"] = index
    symmetric = bool((zeros == half).all())
    if not symmetric:
        made["zero_point"] = _words(zeros.T, bits).T
    made["packed"] = _words(codes, bits)
    grouped = made["scale"].shape[1] > 1
    return made, (bits, group if grouped else None, symmetric, order is not None)


def _whole(leaf: Packed, at: int | None) -> dict[str, Any]:
    """Returns a matrix with codes and zeros in [0, 2^bits)."""
    host = jax.tree.map(to_host, leaf)
    host = host if at is None else jax.tree.map(lambda part: part[at], host)
    bits = 4 if leaf.pairs or leaf.codes.dtype == ml_dtypes.uint4 else 8
    codes, zeros = np.asarray(host.codes), host.zeros
    if leaf.pairs:
        codes = nibbles(codes)
    scales = np.asarray(host.scales)
    if leaf.in_groups:
        codes = np.moveaxis(codes, -1, 0).reshape(codes.shape[-1], -1)[:, : leaf.inputs]
        scales, zeros = scales.T, None if zeros is None else np.asarray(zeros).T
    if zeros is None:
        zeros = np.full(scales.shape, leaf.offset, np.int16)
    up = 128 if codes.dtype == np.int8 else 0
    return {
        "bits": bits,
        "codes": (codes.astype(np.int16) + up).astype(np.uint8),
        "zeros": (np.asarray(zeros).astype(np.int16) + up).astype(np.uint8),
        "scales": scales,
        "order": host.order,
    }


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns codes [..., n] as words of int32, lowest bits first, the last one filled with 0."""
    many = 32 // bits
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % many)]
    parts = np.pad(codes, padding).reshape(*codes.shape[:-1], -1, many).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (parts << shifts).sum(-1, dtype=np.uint32).view(np.int32)


def _config(kinds: Mapping[tuple[object, ...], list[str]], plain: list[str]) -> Config:
    groups = {}
    for number, ((bits, group, symmetric, ordered), names) in enumerate(kinds.items()):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "actorder": "group" if ordered else None,
            "dynamic": False,
        }
        # One kind is that of every linear map which is not left out.
        targets = ["Linear"] if len(kinds) == 1 else names
        groups[f"group_{number}"] = {"targets": targets, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
    }
