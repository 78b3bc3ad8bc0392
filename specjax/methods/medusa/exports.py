"""Reads and writes folders of Medusa heads in any of `engines.HEAD_FORMATS`.

Only tensors are ever unpickled.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax._internal.checks import reworded, settle
from specjax._internal.extras import imported
from specjax.files import read_json
from specjax.methods.medusa.engines import HEAD_FORMATS, Config, Form, HeadFormat, HeadTensors

_KINDS = ("float64", "float32", "float16", "bfloat16")


def read_heads(folder: pathlib.Path, name: str, target_head: np.ndarray) -> HeadTensors:
    """Reads a folder of the format `name`.

    Args:
      folder: the folder.
      name: a key of `HEAD_FORMATS`.
      target_head: [V, E], the target's linear map to the vocabulary.

    Raises:
      ValueError: tensors are missing, unexpected or of a wrong shape, all listed at once; the file
        holds another target's map; or it is damaged.
      OSError: a file is missing.
    """
    made, (vocab, size) = HEAD_FORMATS[name], target_head.shape
    config = read_json(folder / "config.json")
    form = _form(folder / "config.json", config, made)
    settle(
        *(
            (
                config.get(key, wanted) != wanted,
                f"{folder}: {key} is {config.get(key)}, and the target's {wanted}: pass the target "
                "of these heads",
            )
            for key, wanted in (("hidden_size", size), ("vocab_size", vocab))
        )
    )
    stored, names, faults = _load(folder / made.file), made.names(form), []
    for there, ours in names.items():
        shape = (size,) if ours.endswith("bias") else (size, size)
        if ".linear." not in ours:
            shape = (vocab, size)
        if there not in stored:
            faults.append(f"{there} is missing (shape {list(shape)})")
        elif stored[there].shape != shape:
            faults.append(f"{there} has shape {list(stored[there].shape)} instead of {list(shape)}")
        elif stored[there].dtype.name not in _KINDS:
            faults.append(
                f"{there} is stored as {stored[there].dtype.name}; heads are {', '.join(_KINDS)}"
            )
    faults += [
        f"{there} is not a tensor of heads of this shape"
        for there in sorted(set(stored) - set(names))
    ]
    if not faults and not form.own_heads:
        for there, ours in names.items():
            if ".linear." not in ours and not _same(stored.pop(there), target_head):
                faults.append(
                    f"{there} is not the target's own linear map: pass the target of these heads"
                )
    none = f"{folder} holds no heads of the format {name} for this target:\n  "
    settle((faults, none + "\n  ".join(faults)))
    return HeadTensors(
        form, {ours: stored[there] for there, ours in names.items() if there in stored}
    )
    return


def write_heads(
    folder: pathlib.Path, name: str, heads: HeadTensors, target_head: np.ndarray
) -> None:
    """Writes a folder of the format `name`, config.json last.

    The target's linear map is rounded to the type of the heads.

    Raises:
      ValueError: the reader of this format would misread these heads; the message has the cure.
    """
    made, (vocab, size), form = HEAD_FORMATS[name], target_head.shape, heads.form
    fault = made.refuse(heads)
    others = ", ".join(other for other, row in HEAD_FORMATS.items() if row.refuse(heads) is None)
    cure = f"train heads with one block, or choose {others}"
    settle((fault is not None, f"--format {name}: {fault}; {cure}"))
    kind = heads.tensors["0.0.linear.weight"].dtype
    tensors = {  # copies, since safetensors refuses tensors that share memory
        there: np.array(
            heads.tensors[ours] if ours in heads.tensors else target_head.astype(kind), order="C"
        )
        for there, ours in made.names(form).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / made.file, tensors)
    # A file that repeats the target's map for each head looks like version 1 otherwise.
    ours = form.ours if form.own_heads else {**form.ours, "version": 2}
    config = {
        **made.write(form, size, vocab),
        "base_model_name_or_path": form.base,
        "specjax": ours,
    }
    (folder / "config.json").write_text(json.dumps(config) + "\n")


def _form(path: pathlib.Path, config: Config, made: HeadFormat) -> Form:
    lacks = reworded(f"{path} lacks ", ": is it of another format?", (KeyError,))
    with lacks, reworded(f"{path}: ", kinds=(ValueError, TypeError, AttributeError)):
        ours, base = dict(config.get("specjax", {})), config.get("base_model_name_or_path", "")
        heads, layers, own = made.read(config)
        own = ours.pop("version", 1) == 1 and own
        form = Form(int(heads), int(layers), own, str(base), ours)
    counts = form.num_heads, form.num_layers
    fault = f"{path} has {counts[0]} heads of {counts[1]} blocks; there must be one or more"
    settle((min(counts) < 1, fault))
    return form


def _same(stored: np.ndarray, target_head: np.ndarray) -> bool:
    return np.array_equal(stored, target_head.astype(stored.dtype))


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: is the folder of another format?")
    torch: Any = None
    if path.suffix == ".pt":
        torch = imported("torch", f"{path} is read with PyTorch: pip install torch")
    # safetensors and torch raise errors of their own
    with reworded(f"{path} is damaged, or holds more than tensors (", ")", (Exception,)):
        if torch is not None:
            # With weights_only, loading executes no code from the file.
            state = torch.load(path, map_location="cpu", weights_only=True)
            return {name: _as_numpy(tensor, torch.uint8) for name, tensor in state.items()}
        with safetensors.safe_open(path, "np") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}


def _save(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    if path.suffix != ".pt":
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        return
    message = f"{path.name} is written with PyTorch: pip install torch, or choose another format"
    torch: Any = imported("torch", message)
    made = {
        n: torch.from_numpy(a.view(np.uint8)).view(getattr(torch, a.dtype.name))
        for n, a in tensors.items()
    }
    torch.save(made, path)


def _as_numpy(tensor: Any, octets: Any) -> np.ndarray:
    """Returns a tensor of PyTorch, by way of bytes: torch cannot convert bfloat16 to NumPy."""
    kind = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    array = np.empty(tuple(tensor.shape), kind)
    array.reshape(-1).view(np.uint8)[:] = tensor.contiguous().view(-1).view(octets).numpy()
    return array
