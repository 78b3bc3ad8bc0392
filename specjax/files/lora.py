"""Reads LoRA folders as PEFT writes them, and merges them into the weights while they are read.

    adapter_config.json          the rank, alpha, and variants of the method
    adapter_model.safetensors    for each changed matrix A [rank, in] and B [out, rank], and whole
                                 matrices (modules_to_save)

A merged matrix [out, in] is W + scale B A.  The scale is alpha / rank, or alpha / sqrt(rank) with
rank stabilisation.  Matrices that a family stores as [in, out] (GPT-2's, `fan_in_fan_out`) change
by the transpose.

References: Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1; Kalajdzievski 2023, rsLoRA,
arXiv 2312.03732.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax._internal.checks import shown
from specjax._internal.fields import Kind, check, real
from specjax.files.folder import listed, named, read_json
from specjax.files.headers import KINDS, Stored, open_tensors
from specjax.files.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_folder
from specjax.models import Tensor

_MERGE = "merge it with PEFT (merge_and_unload), and load the merged folder"
_ROOT = "base_model.model."
_PARTS = (  # the names of A and B: of a linear map, and of an embedding
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_embedding_A", ".lora_embedding_B"),
)
_CHANGING = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also change the base's weights, so that the base on disk is another."""

_PATTERN = re.compile(r"\^?[\w.]+\$?")  # a name of modules

_OTHER_METHODS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of B",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "single rows of the embedding",
    "target_parameters": "parameters without a module",
}
"""Fields of adapter_config.json that are refused if they are set."""

_KINDS = {
    "peft_type": Kind(f"LORA: for another method, {_MERGE}", lambda value: value == "LORA"),
    "bias": Kind(f"none: {_MERGE}", lambda value: value == "none"),
    "init_lora_weights": Kind(
        f"one that leaves the base's weights as they are, unlike {', '.join(_CHANGING)}: convert "
        "it to a plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)",
        lambda value: not str(value).lower().startswith(_CHANGING),
    ),
    "alpha_pattern": Kind(
        f"a map from names of modules, not other regular expressions, to numbers: {_MERGE}",
        lambda value: isinstance(value, dict) and all(map(_PATTERN.fullmatch, value)),
    ),
    **{
        name: Kind(f"unset, since {method} cannot be merged here: {_MERGE}", lambda value: False)
        for name, method in _OTHER_METHODS.items()
    },
}
"""The fields of adapter_config.json that decide whether specjax can merge a folder."""


@dataclasses.dataclass(frozen=True)
class Change:
    """The low-rank change of one matrix."""

    a: Stored  # [rank, in]
    b: Stored  # [out, rank]
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def product(self) -> np.ndarray:
        """Returns the change [out, in] in float32."""
        a, b = (part.map().astype(np.float32) for part in (self.a, self.b))
        return np.float32(self.scale) * (b @ a)


@dataclasses.dataclass(frozen=True)
class Merged(Stored):
    """A tensor of the base with its change.  The latest one that was merged is in `latest`."""

    change: Change
    turned: bool  # stored as [in, out]
    latest: dict[Stored, np.ndarray] = dataclasses.field(compare=False, hash=False)
    base: Stored = dataclasses.field(compare=False, hash=False)  # may be packed

    def map(self) -> np.ndarray:
        """Returns the merged tensor in float32."""
        if self not in self.latest:  # each device and each part of a fused tensor asks again
            self.latest.clear()
            product = self.change.product()
            product = product.T if self.turned else product
            self.latest[self] = self.base.map().astype(np.float32) + product
        return self.latest[self]


@dataclasses.dataclass(frozen=True)
class Lora:
    """An adapter that `open_lora` has read."""

    folder: pathlib.Path
    base: str  # the model that it was trained for, as it says itself
    changes: Mapping[str, Change]  # by the name of the module
    saved: Mapping[str, Stored]  # whole tensors, by name

    def onto(
        self,
        base: pathlib.Path,
        stored: Mapping[str, Stored],
        rows: Sequence[Tensor],
        spelled: Callable[[str], list[str]],
        tied: bool,
    ) -> dict[str, Stored]:
        """Returns the base's tensors with the adapter.

        Args:
          base: its folder, for messages.
          stored: the base's tensors by name.
          rows: the table of the base's family, with the names in `stored`.
          spelled: returns the name of a tensor in all spellings.
          tied: True if the output matrix is the embedding.

        Raises:
          ValueError: with every tensor of the adapter that does not fit the base.
        """
        ours = {row.name: row for row in reversed(rows)}
        merged, latest, faults = dict(stored), {}, []
        wanted = [(f"{name}.weight", change) for name, change in self.changes.items()]
        for name, change in [*wanted, *self.saved.items()]:
            there = next((other for other in spelled(name) if other in ours), name)
            shared = tied and (there not in ours or ours[there].path == ("embedding",))
            if shared and re.search(r"lm_head|embed|wte", name):
                faults.append(
                    f"{name} changes the embedding or the output matrix, which are one in this "
                    f"base: {_MERGE}"
                )
            elif there not in ours or there not in stored:
                faults.append(f"{name} is not a tensor of the base")
            elif isinstance(change, Stored):
                if change.shape != stored[there].shape:
                    faults.append(_misfit(name, change.shape, stored[there].shape))
                merged[there] = change
            else:
                found = stored[there]
                # An embedding [V, E] is the transpose of a linear map of one-hot tokens.
                turned = not ours[there].transpose
                shape = change.shape[::-1] if turned else change.shape
                if shape != found.shape:
                    faults.append(_misfit(name, shape, found.shape))
                parts = {f.name: vars(found)[f.name] for f in dataclasses.fields(Stored)}
                merged[there] = Merged(
                    **parts, change=change, turned=turned, latest=latest, base=found
                )
        if faults:
            raise ValueError(
                f"{self.folder} is not a LoRA for {base}; it says that its base is "
                f"{shown(self.base)}, so pass that, or another LoRA:\n  {listed(faults)}"
            )
        return merged


def _misfit(name: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} has a change of shape {list(shape)}, and the base's is {list(wanted)}"


def open_lora(path: str | os.PathLike[str]) -> Lora:
    """Reads an adapter's configuration, and the headers of its weights.

    Args:
      path: a folder, or `org/name` on the Hub.

    Raises:
      ValueError: it is not a LoRA, uses a variant that cannot be merged here, or has a tensor that
        belongs to no change; the message has the cure.
      OSError: a file is missing.
    """
    folder = find_folder(path)
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder} holds no {' and no '.join(missing)}, which a LoRA folder of PEFT has"
            + "; the pickled adapter_model.bin is not read, because reading it executes what it "
            "contains: save it again with save_pretrained(safe_serialization=True)"
            * any(folder.glob("*.bin"))
        )
    config = read_json(folder / ADAPTER_CONFIG)
    with named(folder / ADAPTER_CONFIG):
        _check(config)
    tensors, faults = open_tensors([folder / ADAPTER_WEIGHTS])
    names = {name: name.removeprefix(_ROOT) for name in tensors}
    by_name = {short: tensors[name] for name, short in names.items()}
    changes: dict[str, Change] = {}
    for first, second in _PARTS:
        for name in [n for n in by_name if n.endswith(first)]:
            module = name.removesuffix(first)
            a, b = by_name.pop(name), by_name.pop(module + second, None)
            if b is None:
                faults.append(f"{module}{second} is missing")
            elif len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
                faults.append(f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit")
            else:
                changes[module] = Change(a, b, _scale(config, module, a.shape[0]))
    faults += [
        f"{name} belongs to no change, and is not among modules_to_save"
        for name in by_name
        if "lora_" in name or not name.endswith(".weight")
    ]
    faults += [
        f"{name} is stored as {tensor.kind}; specjax reads {', '.join(KINDS)}"
        for name, tensor in tensors.items()
        if tensor.kind not in KINDS
    ]
    if not changes and not by_name:
        faults.append("there is no tensor")
    if faults:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS} cannot be merged; {_MERGE}:\n  "
                         f"{listed(faults)}")  # fmt: skip
    return Lora(folder, str(config.get("base_model_name_or_path")), changes, by_name)


def _check(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a configuration that is not a plain LoRA."""
    # Fields that are off may be missing, null, false or empty.
    check({name: value or None for name, value in config.items()}, _KINDS)
    check(config, {"peft_type": _KINDS["peft_type"], "lora_alpha": real()}, optional=False)
    patterns = config.get("alpha_pattern") or {}
    check(patterns, dict.fromkeys(patterns, real()), optional=False)


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        name = pattern.removeprefix("^").removesuffix("$")
        if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
