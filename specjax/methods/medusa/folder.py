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

from specjax._internal.checks import items, number, shown, whole
from specjax.files import (
    KINDS,
    Stored,
    all_finite,
    check_links,
    listed,
    named,
    read_header,
    read_json,
)
from specjax.methods.medusa.drafter import MedusaAdapter
from specjax.methods.medusa.network import MedusaHeads
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import leader, to_host

_WEIGHTS = "medusa_lm_head.safetensors"
_VERSIONS = {"1": 1, "1.0": 1, "2": 2, "2.0": 2}
_MOST = 1024  # heads, and layers of a head
_NODES = 4096  # of a tree of choices


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
    if not isinstance(target, LanguageModel):
        raise ValueError(f"target={shown(target)}; pass what specjax.load(folder) returns")
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
    try:
        adapter = MedusaAdapter(
            params=weights,
            name=folder.name,
            heads=heads,
            choices=config["choices"],
            acceptance=config["acceptance"],
            marks=config["marks"],
        )
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    adapter.check(target)
    if len(adapter.acceptance) not in (0, len(adapter.proposer.choices)):
        raise ValueError(
            f"{folder / 'config.json'}: acceptance has {len(adapter.acceptance)} values; it must "
            "have one per choice"
        )
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
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; a folder of Medusa heads holds config.json and {_WEIGHTS}"
        )
    fields = read_json(path)

    def count(name: str) -> int:
        if name not in fields:
            raise ValueError(f"{path} lacks {name!r}: is this a folder of Medusa heads?")
        wanted = f"a whole number in [1, {_MOST}]"
        return whole(f"{path}: {name}", fields[name], 1, _MOST, wanted)

    version = fields.get("version", 1)
    if str(version) not in _VERSIONS:
        raise ValueError(f"{path}: version is {shown(version)}; specjax reads 1 and 2")
    ours = fields.get("specjax", {})
    if not isinstance(ours, dict):
        raise ValueError(f'{path}: "specjax" is {shown(ours)}; it must be an object')

    def numbers(name: str, least: float, most: float) -> tuple[float, ...]:
        values = items(ours.get(name, ()))
        plain = [None] if values is None else [number(value) for value in values]
        kept = [value for value in plain if value is not None and least <= value <= most]
        if len(kept) < len(plain):
            raise ValueError(
                f"{path}: {name} is {shown(ours[name])}; it must be a list of numbers in "
                f"[{least:g}, {most:g}]"
            )
        return tuple(map(float, kept))

    choices = items(ours.get("choices", ()))
    paths = [None] if choices is None else [items(choice) for choice in choices]
    if len(paths) > _NODES:
        raise ValueError(f"{path}: choices has {len(paths)} paths; at most {_NODES} are read")
    if not all(p is not None and all(type(rank) is int for rank in p) for p in paths):
        raise ValueError(
            f"{path}: choices is {shown(ours['choices'])}; it must be a list of lists of whole "
            "numbers, a path each"
        )
    return {
        "heads": count("medusa_num_heads"),
        "layers": count("medusa_num_layers"),
        "version": _VERSIONS[str(version)],
        "choices": tuple(tuple(p or ()) for p in paths),
        "acceptance": numbers("acceptance", 0.0, 1.0),
        "marks": numbers("target", -3.4e38, 3.4e38),
    }


def _stored(folder: pathlib.Path, config: _Config, own: bool) -> dict[str, Stored]:
    """Returns the tensors of a folder by name, as many as the configuration names."""
    path = folder / _WEIGHTS
    if not path.exists():
        if list(folder.glob("*.pt")):
            raise ValueError(
                f"{folder} holds pickled weights (.pt) only, and reading those executes what they "
                f"contain: convert them to {_WEIGHTS} with safetensors.torch.save_file"
            )
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
    if faults:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json and the target {target.name}:\n  "
            f"{listed(faults)}"
        )
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
