"""Small folders with packed weights, made in NumPy from the folders of `folders` and others."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import folders
import numpy as np
from packed_formats import FORMATS, LINEAR, Maker

from specjax.files import open_tensors
from specjax.files.packed.matrix import raw


def packed(model: folders.Llama, format: str, plain: str = "(?!)", seed: int = 0) -> folders.Llama:
    """The model with its linear maps in a format, but for those whose names match `plain`."""
    make, config = FORMATS[format]
    maker, tensors = Maker(seed), {}
    for name, tensor in model.tensors.items():
        if LINEAR.search(name) and not re.search(plain, name):
            start = name.removesuffix("weight")
            made = make(maker, *tensor.shape)
            tensors |= {start + end: part for end, part in made.items()}
        else:
            tensors[name] = tensor
    return folders.Llama({**model.config, "quantization_config": config}, tensors)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a folder; the reader of the package for NumPy has no dtypes of 8 bits."""
    stored, _ = open_tensors([folder / "model.safetensors"])
    return {name: np.array(raw(tensor)).reshape(tensor.shape) for name, tensor in stored.items()}


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Let `change` modify the tensors of a folder."""
    tensors = read_tensors(folder)
    change(tensors)
    folders.save_tensors(tensors, folder / "model.safetensors")


def write(
    format: str, name: str, plain: str = "(?!)", seed: int = 0, **config: Any
) -> pathlib.Path:
    """The folder of a Llama with packed weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **config}
    made = packed(folders.random_llama(seed, **sizes), format, plain, seed)
    folder = folders.ROOT / name
    made.save_pretrained(folder)
    return folder
