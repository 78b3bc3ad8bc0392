"""Medusa heads as engines read them: for each its file, its names of the tensors and its configuration.

Between two formats stand `Heads`, whose tensors have the names of the authors' code:

    {head}.{block}.linear.weight [E, E]   {head}.{block}.linear.bias [E]   and version 1: {head}.{blocks}.weight [V, E]

Version 2 has no linear map of its own; a reader that wants one gets the target's.  In every format head k (from 0)
guesses the token at t + 2 + k from the target's features after its final norm, so that none is moved.  Numbers are
carried bit for bit in the type that they are stored in.  What only specjax reads stands under "specjax".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.files import SINGLE

_SAFE, _PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@dataclasses.dataclass(frozen=True)
class Form:
    """What a configuration says of the heads."""

    num_heads: int
    num_layers: int
    own_heads: bool  # version 1
    base: str = ""  # the target's name
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)  # what only specjax reads


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads as they are stored, under the names above."""

    form: Form
    tensors: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
      file: the weights.
      linear: name of the linear map in block l of head h; ".weight" and ".bias" come behind.
      matrix: name of the map to the vocabulary, of head h behind its n blocks.
      tied: for how many heads a file of version 2 repeats the target's map: none, the first, or each.
      write: from the form, E and V to the configuration.
      read: from the configuration to heads, layers and whether each head has a map of its own.
      refuse: what the reader would take wrongly, or None.
    """

    file: str
    linear: str
    matrix: str
    tied: str
    write: Callable[[Form, int, int], dict[str, Any]]
    read: Callable[[dict[str, Any]], tuple[Any, Any, bool]]
    refuse: Callable[[Heads], str | None] = lambda heads: None

    def names(self, form: Form) -> dict[str, str]:
        """Name in the file -> name above."""
        n, found = form.num_layers, {}
        for h, k, kind in itertools.product(range(form.num_heads), range(n), ("weight", "bias")):
            found[f"{self.linear.format(h=h, l=k)}.{kind}"] = f"{h}.{k}.linear.{kind}"
        count = {"none": 0, "first": 1, "each": form.num_heads}[
            "each" if form.own_heads else self.tied
        ]
        return found | {self.matrix.format(h=h, n=n): f"{h}.{n}.weight" for h in range(count)}


def _write_medusa(form: Form, size: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"medusa_num_heads": form.num_heads, "medusa_num_layers": form.num_layers, **more}


def _write_original(form: Form, size: int, vocab: int) -> dict[str, Any]:
    return _write_medusa(form, size, vocab, **({} if form.own_heads else {"version": "2"}))


def _write_tgi(form: Form, size: int, vocab: int) -> dict[str, Any]:
    return _write_medusa(
        form, size, vocab, version=1 if form.own_heads else 2
    )  # LoRAX compares numbers


def _read_medusa(config: dict[str, Any]) -> tuple[Any, Any, bool]:
    version = float(config.get("version", 1))
    if version not in (1, 2):
        raise ValueError(f"version is {config['version']!r}; there are 1 and 2")
    return config["medusa_num_heads"], config["medusa_num_layers"], version == 1


def _write_vllm(form: Form, size: int, vocab: int) -> dict[str, Any]:
    # vLLM takes any key with "num" and "heads", or "num" and "layers", in its name for one of these two.
    counts = {"num_heads": form.num_heads, "num_hidden_layers": form.num_layers}
    kind = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": size,
        "vocab_size": vocab,
    }
    search = {"max_paths": 64, "topk": 10, "truncated_vocab_size": vocab}
    # Without medusa_fc_bias the biases would be dropped.
    return {**kind, **counts, **search, "medusa_fc_bias": True, "original_lm_head": not form.own_heads,
            "logit_scale": 1.0}  # fmt: skip


def _read_vllm(config: dict[str, Any]) -> tuple[Any, Any, bool]:
    if config.get("medusa_fc_bias") is not True:
        raise ValueError(
            "medusa_fc_bias is not true, with which vLLM drops the biases: set it, if they were trained"
        )
    if config.get("truncated_vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise ValueError(
            "truncated_vocab_size is smaller than vocab_size; specjax reads heads of a whole vocabulary"
        )
    if config.get("logit_scale", 1.0) != 1.0:
        raise ValueError(
            f"logit_scale is {config['logit_scale']}; specjax reads heads that are not scaled"
        )
    counts = [
        [config[key] for key in config if "num" in key and word in key]
        for word in ("heads", "layers")
    ]
    if [len(found) for found in counts] != [1, 1]:
        raise ValueError(
            "it must have one key with 'num' and 'heads' in its name, and one with 'num' and 'layers'"
        )
    return counts[0][0], counts[1][0], not config.get("original_lm_head", False)


def _write_optimizer(form: Form, size: int, vocab: int) -> dict[str, Any]:
    counts = {"num_medusa_heads": form.num_heads, "num_medusa_layers": form.num_layers}
    return {"hidden_size": size, "vocab_size": vocab, "medusa": counts}


def _read_optimizer(config: dict[str, Any]) -> tuple[Any, Any, bool]:
    return config["medusa"]["num_medusa_heads"], config["medusa"]["num_medusa_layers"], True


def _refuse_original(heads: Heads) -> str | None:
    """The authors' code makes one block and repeats it; of several the last one read would be all of them."""
    for h, k in itertools.product(range(heads.form.num_heads), range(1, heads.form.num_layers)):
        for kind in ("weight", "bias"):
            first, other = (heads.tensors[f"{h}.{block}.linear.{kind}"] for block in (0, k))
            if not np.array_equal(first, other):
                return f"the blocks of head {h} differ, and this reader has one block a head, which it repeats"
    return None


def _refuse_tgi(heads: Heads) -> str | None:
    if heads.form.own_heads or heads.form.num_layers == 1:
        return None
    return f"the heads have {heads.form.num_layers} blocks each, and this reader takes one in version 2"


_BLOCK, _MATRIX = "{h}.{l}.linear", "{h}.{n}.weight"
FORMATS = {
    "specjax": Format(_SAFE, _BLOCK, _MATRIX, "none", _write_original, _read_medusa),
    "original": Format(_SAFE, _BLOCK, _MATRIX, "none", _write_original, _read_medusa, _refuse_original),
    "vllm": Format(
        SINGLE, "blocks.{h}.layers.{l}", "lm_heads.{h}.weight", "first", _write_vllm, _read_vllm
    ),
    "tgi": Format(_SAFE, _BLOCK, _MATRIX, "none", _write_tgi, _read_medusa, _refuse_tgi),
    "tensorrt-llm": Format(_PICKLE, _BLOCK, _MATRIX, "each", _write_medusa, _read_medusa),
    "model-optimizer": Format(
        SINGLE, f"medusa_heads.{_BLOCK}", f"medusa_heads.{_MATRIX}", "each", _write_optimizer, _read_optimizer
    ),
}  # fmt: skip
