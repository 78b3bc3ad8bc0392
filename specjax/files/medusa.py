"""Reads and writes folders of Medusa heads, in the format of the authors' code.

A folder holds `config.json` and `medusa_lm_head.safetensors` with the tensors

    {head}.{block}.linear.weight [E, E]   {head}.{block}.linear.bias [E]
    {head}.{blocks}.weight [V, E]         only in version 1

Fields that only specjax reads are under "specjax" in the configuration: the tree with its measured
acceptance, and a few weights that identify the target (`target_marks`).
"""

from __future__ import annotations

import json
import pathlib
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import Array
from jax.typing import DTypeLike

from specjax.drafters import MedusaAdapter
from specjax.files.tensors import all_finite
from specjax.models import LanguageModel, MedusaHeads, head_matrix
from specjax.parallel import leader, to_host

_WEIGHTS = "medusa_lm_head.safetensors"
_STORED = ("F64", "F32", "F16", "BF16")


class _Config(TypedDict):
    """The fields of `config.json`."""

    heads: int
    layers: int
    version: int
    choices: tuple[tuple[int, ...], ...]
    acceptance: tuple[float, ...]
    marks: tuple[float, ...]


def load_medusa(path: str | pathlib.Path, target: LanguageModel) -> MedusaAdapter:
    """Read the heads in a folder, in the dtype of the target's weights.

    Raises:
      ValueError: with everything that does not fit the configuration or the target, and the fix.
      FileNotFoundError: there is no such folder, or it lacks a file.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; pass one that holds config.json and {_WEIGHTS}"
        )
    config = _read_config(folder / "config.json")
    matrix = head_matrix(target.params)
    own = config["version"] == 1
    cap = None if own else target.model.module.config.logit_softcap
    (size, vocab), layers = matrix.shape, config["layers"]
    heads = MedusaHeads(
        config["heads"], size, vocab, num_layers=layers, own_heads=own, logit_softcap=cap
    )
    weights = _read_weights(folder, heads, target, matrix.dtype)
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
    """Write heads.  Of several processes only the first writes, but all must call.

    Args:
      folder: created if needed; files of these names in it are replaced.
      adapter: the heads.
      base: the target's name, for `base_model_name_or_path`.
      dtype: of the file; by default that of the parameters.
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
    """Name of a tensor -> parameter, index into it, and whether it is stored transposed."""
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
    try:
        fields = json.loads(path.read_text())
        ours = fields.get("specjax", {})
        config: _Config = {
            "heads": int(fields["medusa_num_heads"]),
            "layers": int(fields["medusa_num_layers"]),
            "version": int(float(fields.get("version", 1))),
            "choices": tuple(tuple(map(int, choice)) for choice in ours.get("choices", ())),
            "acceptance": tuple(map(float, ours.get("acceptance", ()))),
            "marks": tuple(map(float, ours.get("target", ()))),
        }
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}: is this a folder of Medusa heads?") from None
    except (ValueError, TypeError, AttributeError) as error:  # broken JSON is a ValueError
        raise ValueError(f"{path} is no configuration of Medusa heads: {error}") from None
    for name, count in (("heads", config["heads"]), ("layers", config["layers"])):
        if count < 1:
            raise ValueError(f"{path}: medusa_num_{name} is {count}; it must be at least 1")
    if config["version"] not in (1, 2):
        raise ValueError(f"{path}: version is {fields['version']!r}; specjax reads 1 and 2")
    return config


def _read_weights(
    folder: pathlib.Path, heads: MedusaHeads, target: LanguageModel, dtype: np.dtype
) -> dict[str, Array]:
    path = folder / _WEIGHTS
    if not path.exists():
        if list(folder.glob("*.pt")):
            raise ValueError(
                f"{folder} holds pickled weights (.pt) only, and reading those executes what they "
                f"contain: convert them to {_WEIGHTS} with safetensors.torch.save_file"
            )
        raise FileNotFoundError(f"{folder} holds no {_WEIGHTS}")
    try:
        handle = safetensors.safe_open(path, "np")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); download it again") from None
    wanted, faults, size = _tensors(heads), [], heads.hidden_size
    shapes = {"kernel": (size, size), "bias": (size,), "head": (heads.vocab_size, size)}
    names = set(handle.keys())
    for name, (leaf, _, _) in wanted.items():
        shape = shapes[leaf]
        if name not in names:
            faults.append(f"{name} is missing (shape {list(shape)})")
        elif (stored := tuple(handle.get_slice(name).get_shape())) != shape:
            faults.append(f"{name} has shape {list(stored)} instead of {list(shape)}")
        elif (kind := handle.get_slice(name).get_dtype()) not in _STORED:
            faults.append(f"{name} is stored as {kind}; specjax reads {', '.join(_STORED)}")
    faults += [f"{name} is not a tensor of such heads" for name in sorted(names - set(wanted))]
    if faults:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json and the target {target.name}:\n  "
            + "\n  ".join(faults)
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
        tensor = handle.get_tensor(name)
        with np.errstate(over="ignore"):  # float16 may overflow, which is detected below
            arrays[leaf][at] = tensor.T if transpose else tensor
        if not all_finite(arrays[leaf][at]):
            spoilt.append(name)
    if spoilt:
        raise ValueError(
            f"{path}: {', '.join(spoilt)} hold NaN or infinities in {jnp.dtype(dtype)}: "
            "download it again, or take heads from before their loss diverged"
        )
    return {leaf: jnp.asarray(array) for leaf, array in arrays.items()}
