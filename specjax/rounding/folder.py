"""`quantise_folder`: writes a model's folder with its matrices in few bits."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from specjax._internal.checks import chosen, settle, shown, within
from specjax.files import (
    KINDS,
    Outline,
    Packed,
    file_of,
    find_folder,
    group_for,
    load,
    open_tensors,
    read_outline,
    rounded,
    rounded_leaf,
    rounded_rows,
    save,
    weight_files,
)
from specjax.models import FAMILIES, LanguageModel, LinenModel, Transformer
from specjax.rounding.calibrated import round_layers
from specjax.rounding.gptq import solved
from specjax.rounding.pieces import pieces_of

METHODS = ("nearest", "gptq")
"""The ways to choose the codes."""

_Path = tuple[str, ...]


def quantise_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    method: str = "nearest",
    *,
    bits: int = 4,
    group: int | None = None,
    texts: Sequence[str] | None = None,
    samples: int = 128,
    length: int = 512,
) -> LanguageModel:
    """Writes a folder with the matrices of linear maps in 4 or 8 bits, and returns its model.

    The folder is in pack-quantized of compressed-tensors, which vLLM reads.  The embedding, the
    output matrix, routers and norms are those of the files.

    Args:
      folder: of a model, or `org/name` on the Hub.
      out: the new folder; it must not exist yet.
      method: "nearest" rounds every number to the nearest code.  "gptq" rounds the columns one
        after the other, each with the errors of those before it, so that the outputs on `texts`
        change the least (Frantar et al. 2022, arXiv 2210.17323); experts are rounded to nearest.
      bits: of a number: 4 or 8.
      group: the inputs that share a scale.  By default in 4 bits 128, 64 or 32, the first that
        divides the inputs of a matrix, and in 8 bits all inputs of an output.
      texts: that "gptq" reads, such as what the model will be used for.
      samples: the most pieces that are cut of them.
      length: the tokens of a piece.

    Raises:
      ValueError: the folder is packed already, `out` exists, a method or a number of bits that is
        not known, a group that does not divide the inputs of a matrix, experts that are stored in
        one tensor, or texts that are missing or not needed.  All are raised before weights are
        read.

    Example:
      >>> small = specjax.quantise_folder(specjax.shipped("tiny/target"), "in-4-bits", group=32)
      >>> small.model.vocab_size
      512
    """
    chosen("method", method, METHODS)
    for name, value in {"samples": samples, "length": length}.items():
        within(name, value, 1)
    source, out = find_folder(folder), pathlib.Path(out)
    needs = method == "gptq"
    settle(
        (bits not in (4, 8), f"bits={shown(bits)} is not allowed; pass 4 or 8"),
        (
            out.exists(),
            f"{out} exists already, and is not replaced: pass a folder that is not there yet",
        ),
        (
            needs and not texts,
            'method="gptq" needs text to calibrate with: pass texts=[...], or method="nearest"',
        ),
        (
            not needs and texts is not None,
            f'method={method!r} reads no text: leave texts out, or pass method="gptq"',
        ),
    )
    outline = read_outline(source)
    groups = _groups(source, outline, bits, group)
    model = load(source, _dtype_of(source))
    tokens = pieces_of("texts", texts, model, samples, length) if needs and texts else None
    made = _rounded(model, groups, bits, tokens)
    save(made, out)
    return dataclasses.replace(made, name=out.name, mtp=0, folder=out)


def _groups(
    source: pathlib.Path, outline: Outline, bits: int, group: int | None
) -> dict[_Path, int]:
    """Returns the inputs of a group of each matrix that is rounded, by the configuration."""
    packed = "GGUF" if file_of(source) else outline.scheme and outline.scheme.method
    if packed:
        raise ValueError(
            f"{source} is packed already ({packed}), and what was rounded is not "
            "rounded again: pass the plain folder of this model"
        )
    if group is not None:
        within("group", group, 1)
    config = outline.config
    network = LinenModel(Transformer(config))
    shapes = cast(dict, jax.eval_shape(network.init, jax.random.key(0)))
    rows = rounded_rows(FAMILIES[config.family], config, shapes)
    fused = {row.name for parts in rows.values() for row in parts if len(row.shape or ()) > 2}
    if fused:
        raise ValueError(
            f"{sorted(fused)[0]} holds the matrices of several experts, which pack-quantized has "
            'no form for: load the model with dtype="int4" where it is used'
        )
    leaves = cast(dict[_Path, Any], flatten_dict(shapes))
    inputs = {path: leaves[path].shape[-2] for path in rows}
    if group is not None:
        odd = {rows[path][0].name: many for path, many in inputs.items() if many % group}
        if odd:
            name, many = next(iter(odd.items()))
            raise ValueError(
                f"group={shown(group)} does not divide the {many} inputs of {name}"
                f"{f' and of {len(odd) - 1} more matrices' * (len(odd) > 1)}: pass one that divides"
                " them, or leave it out"
            )
    return {
        path: group or (many if bits == 8 else group_for(many)) for path, many in inputs.items()
    }


def _dtype_of(source: pathlib.Path) -> np.dtype:
    """Returns the dtype of most numbers in the files, in which the others are written."""
    many: dict[str, int] = {}
    for tensor in open_tensors(weight_files(source))[0].values():
        if tensor.kind in ("F32", "BF16", "F16"):
            many[tensor.kind] = many.get(tensor.kind, 0) + int(np.prod(tensor.shape))
    return KINDS[max(many, key=lambda kind: many[kind])] if many else np.dtype(jnp.float32)


def _rounded(
    model: LanguageModel, groups: dict[_Path, int], bits: int, tokens: np.ndarray | None
) -> LanguageModel:
    leaves = cast(dict[_Path, Any], flatten_dict(model.params))
    held = {}
    for path in groups:
        turned = (*path[:-1], "weight")
        held[path if path in leaves else turned] = groups[path]
    platform = next(iter(jax.tree.leaves(model.params)[0].devices())).platform

    def to(path: _Path, products: Array | None) -> Any:
        wide = np.asarray(leaves[path]).astype(np.float32)
        group = held[path]

        def round_to(matrix: np.ndarray) -> Packed:
            if products is None:  # method "nearest", and experts with the other
                return rounded(matrix, bits, group)
            return solved(matrix, products, bits, group)

        return rounded_leaf(wide, path[-1] != "weight", None, platform, round_to)

    mine = {path: leaves[path] for path in held}
    if tokens is None:
        made = {path: to(path, None) for path in mine}
    else:
        made = round_layers(model, mine, tokens, to)
    params = unflatten_dict({**leaves, **made})
    return dataclasses.replace(model, params=params)
