"""Reads and writes folders of Medusa heads, in the format of the authors' code.

A folder holds `config.json` and `medusa_lm_head.safetensors` with the tensors

    {head}.{block}.linear.weight [E, E]   {head}.{block}.linear.bias [E]
    {head}.{blocks}.weight [V, E]         only in version 1

Fields that only specjax reads are under "specjax" in the configuration: the tree with its measured
acceptance, and a few weights that identify the target (`target_marks`).
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import settle, shown, typed
from specjax._internal.fields import OBJECT, Kind, check, count, is_whole, list_of, one_of, real
from specjax.files import (
    CONFIG,
    KINDS,
    Stored,
    all_finite,
    check_links,
    listed,
    named,
    read_header,
    read_json,
    refuse_pickled,
    refuse_weights,
)
from specjax.methods.medusa.drafter import MedusaAdapter
from specjax.methods.medusa.network import MedusaHeads
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import leader, to_host

_WEIGHTS = "medusa_lm_head.safetensors"
_MOST = 1024  # heads, and layers of a head
_NODES = 4096  # of a tree of choices

_FIELDS = {
    "medusa_num_heads": count(1, _MOST),
    "medusa_num_layers": count(1, _MOST),
    "version": one_of((1, 2, "1", "1.0", "2", "2.0")),
}
_PATHS = list_of(list_of(Kind("a whole number", is_whole)), "paths")
_OURS = {
    "choices": Kind(
        f"a list of at most {_NODES} paths, each a list of whole numbers",
        lambda value: _PATHS.accepts(value) and len(value) <= _NODES,
    ),
    "acceptance": list_of(real(least=0.0, most=1.0), "numbers"),
    "target": list_of(real(), "numbers"),
}
"""The fields under "specjax"."""


class _Config(TypedDict):
    """The fields of `config.json`."""

    heads: int
    layers: int
    version: int
    choices: tuple[tuple[int, ...], ...]
    acceptance: tuple[float, ...]
    marks: tuple[float, ...]


def load_medusa(path: str | pathlib.Path, target: LanguageModel) -> MedusaAdapter:
    """Reads the heads in a folder, in the dtype of the target's weights.

    Raises:
      ValueError: with every mismatch with the configuration or the target, and the fix.
      FileNotFoundError: there is no such folder, or it lacks a file.

    Example:
      >>> target = specjax.load(specjax.shipped("pycode/target"))
      >>> heads = specjax.load_medusa(specjax.shipped("pycode/medusa"), target)
      >>> heads.proposer.num_nodes
      8
    """
    typed("what specjax.load(folder) returns", LanguageModel, target=target)
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise ValueError(f"path={shown(path)}; pass a folder of Medusa heads")
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; pass one that holds config.json and {_WEIGHTS}"
        )
    check_links(folder)
    with named(folder):
        return _load(folder, target)


def _load(folder: pathlib.Path, target: LanguageModel) -> MedusaAdapter:
    config = _read_config(folder / "config.json")
    matrix = head_matrix(target.params)
    own = config["version"] == 1
    cap = None if own else target.model.module.config.logit_softcap
    (size, vocab), layers = matrix.shape, config["layers"]
    stored = _stored(folder, config, own)
    heads = MedusaHeads(
        config["heads"], size, vocab, num_layers=layers, own_heads=own, logit_softcap=cap
    )
    weights = _read_weights(folder, stored, heads, target, matrix.dtype)
    with named(folder / CONFIG):
        adapter = MedusaAdapter(
            params=weights,
            name=folder.name,
            heads=heads,
            choices=config["choices"],
            acceptance=config["acceptance"],
            marks=config["marks"],
        )
        values = len(adapter.acceptance)
        each = values in (0, len(adapter.proposer.choices))
        settle((not each, f"acceptance has {values} values; it must have one per choice"))
    adapter.check(target)
    return adapter


def save_medusa(
    folder: str | pathlib.Path, adapter: MedusaAdapter, base: str, dtype: DTypeLike | None = None
) -> None:
    """Writes heads.  Of several processes only the first writes, but all must call.

    Args:
      folder: created if needed; files of these names in it are replaced.
      adapter: the heads.
      base: the target's name, for `base_model_name_or_path`.
      dtype: of the file; by default that of the parameters.

    Example:
      >>> target = specjax.load(specjax.shipped("pycode/target"))
      >>> heads = specjax.load_medusa(specjax.shipped("pycode/medusa"), target)
      >>> specjax.save_medusa("heads", heads, base="org/target")
    """
    folder, heads, params = pathlib.Path(folder), adapter.heads, to_host(adapter.params)
    if not leader():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": base,
        **({} if heads.own_heads else {"version": "2"}),
        "specjax": {
            "choices": adapter.choices,
            "acceptance": adapter.acceptance,
            "target": adapter.marks,
        },
    }
    (folder / "config.json").write_text(json.dumps(config) + "\n")
    leaves = {name: leaf.astype(dtype or leaf.dtype) for name, leaf in params.items()}
    tensors = {
        name: np.ascontiguousarray(leaves[leaf][at].T if transpose else leaves[leaf][at])
        for name, (leaf, at, transpose) in _tensors(heads).items()
    }
    safetensors.numpy.save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _tensors(heads: MedusaHeads) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    """Maps the name of each tensor to its parameter, an index, and whether it is transposed."""
    tensors: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    for head in range(heads.num_heads):
        for layer in range(heads.num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = ("kernel", (layer, head), True)
            tensors[f"{head}.{layer}.linear.bias"] = ("bias", (layer, head), False)
        if heads.own_heads:
            tensors[f"{head}.{heads.num_layers}.weight"] = ("head", (head,), True)
    return tensors


def _read_config(path: pathlib.Path) -> _Config:
    fields = read_json(path)
    with named(path):
        check({"version": 1, **fields}, _FIELDS, optional=False)
        ours = OBJECT.read(fields, "specjax", {})
        check(ours, _OURS)
    return {
        "heads": fields["medusa_num_heads"],
        "layers": fields["medusa_num_layers"],
        "version": int(float(fields.get("version", 1))),
        "choices": tuple(map(tuple, ours.get("choices") or ())),
        "acceptance": tuple(map(float, ours.get("acceptance") or ())),
        "marks": tuple(map(float, ours.get("target") or ())),
    }


def _stored(folder: pathlib.Path, config: _Config, own: bool) -> dict[str, Stored]:
    """Returns the tensors of a folder by name, as many as the configuration names."""
    path = folder / _WEIGHTS
    if not path.exists():
        refuse_pickled(folder)
        raise FileNotFoundError(f"{folder} holds no {_WEIGHTS}")
    stored = dict(read_header(path))
    needed = config["heads"] * (2 * config["layers"] + own)
    if needed > 2 * len(stored) + _NODES:  # a list of all that is missing would be too long
        raise ValueError(
            f"{folder / 'config.json'} says {config['heads']} heads of {config['layers']} layers, "
            f"which have {needed} tensors, and {_WEIGHTS} holds {len(stored)}: one of the files is "
            "damaged, or belongs to other heads"
        )
    return stored


def _read_weights(
    folder: pathlib.Path,
    stored: dict[str, Stored],
    heads: MedusaHeads,
    target: LanguageModel,
    dtype: np.dtype,
) -> dict[str, Array]:
    path = folder / _WEIGHTS
    wanted, faults, size = _tensors(heads), [], heads.hidden_size
    shapes = {"kernel": (size, size), "bias": (size,), "head": (heads.vocab_size, size)}
    for name, (leaf, _, _) in wanted.items():
        shape = shapes[leaf]
        if name not in stored:
            faults.append(f"{name} is missing (shape {list(shape)})")
        elif stored[name].shape != shape:
            faults.append(f"{name} has shape {list(stored[name].shape)} instead of {list(shape)}")
        elif stored[name].kind not in KINDS:
            faults.append(
                f"{name} is stored as {stored[name].kind}; specjax reads {', '.join(KINDS)}"
            )
    faults += [
        f"{name} is not a tensor of such heads" for name in sorted(set(stored) - set(wanted))
    ]
    refuse_weights(folder, faults, target.name)
    stack = (heads.num_layers, heads.num_heads)
    shapes = {
        "kernel": (*stack, size, size),
        "bias": (*stack, size),
        "head": (heads.num_heads, size, heads.vocab_size),
    }
    arrays = {leaf: np.empty(shapes[leaf], dtype) for leaf, _, _ in wanted.values()}
    spoilt = []
    for name, (leaf, at, transpose) in wanted.items():
        tensor = stored[name].map()
        with np.errstate(over="ignore"):  # float16 may overflow, which is detected below
            arrays[leaf][at] = tensor.T if transpose else tensor
        if not all_finite(arrays[leaf][at]):
            spoilt.append(name)
    if spoilt:
        raise ValueError(
            f"{path}: {listed(spoilt)} hold NaN or infinities in {jnp.dtype(dtype)}: "
            "download it again, or take heads from before their loss diverged"
        )
    return {leaf: jnp.asarray(array) for leaf, array in arrays.items()}
