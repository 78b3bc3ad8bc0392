"""The formats of Medusa heads that engines read: the file, the tensor names and the configuration.

`HeadTensors` is the common form between two formats, with the tensor names of the authors' code:

    {head}.{block}.linear.weight [E, E]
    {head}.{block}.linear.bias [E]
    {head}.{blocks}.weight [V, E]           in version 1 only

Heads of version 2 share the target's linear map to the vocabulary.  Where a format needs a map for
the heads, a copy of the target's is written.  In every format head k (from 0) drafts the token at t
+ 2 + k from the target's hidden states after its final norm, so no head changes its index.  Tensors
keep their type and their bits.  Settings that only specjax reads have the key "specjax".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax._internal.checks import settle
from specjax.files import SINGLE

Config = Mapping[str, Any]
"""A parsed config.json."""

Counts = tuple[Any, Any, bool]
"""The file's numbers of heads and blocks, unchecked, and whether each head has its own map."""

_SAFE, _PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@dataclasses.dataclass(frozen=True)
class Form:
    """The shape of the heads, as a configuration describes it."""

    num_heads: int
    num_layers: int
    own_heads: bool  # version 1
    base: str = ""  # the target's name
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)  # what only specjax reads


@dataclasses.dataclass(frozen=True)
class HeadTensors:
    """The tensors of the heads, under the names above."""

    form: Form
    tensors: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class HeadFormat:
    """One row of the table `HEAD_FORMATS`.

    Attributes:
      file: name of the file of weights.
      linear: name of the linear map in block l of head h, without ".weight" or ".bias".
      matrix: name of the map to the vocabulary of head h, which follows its n blocks.
      tied: the heads for which a file of version 2 repeats the target's map: none, first or each.
      write: makes the configuration from the form, E and V.
      read: reads the number of heads, of blocks, and whether each head has a map of its own.
      refuse: the reason why readers of this format would misread these heads, or None.
    """

    file: str
    linear: str
    matrix: str
    tied: str
    write: Callable[[Form, int, int], dict[str, object]]
    read: Callable[[Config], Counts]
    refuse: Callable[[HeadTensors], str | None] = lambda heads: None

    def names(self, form: Form) -> dict[str, str]:
        """Maps tensor names in the file to those in the docstring of this module."""
        n, names = form.num_layers, {}
        for h, k, kind in itertools.product(range(form.num_heads), range(n), ("weight", "bias")):
            names[f"{self.linear.format(h=h, l=k)}.{kind}"] = f"{h}.{k}.linear.{kind}"
        count = {"none": 0, "first": 1, "each": form.num_heads}[
            "each" if form.own_heads else self.tied
        ]
        return names | {self.matrix.format(h=h, n=n): f"{h}.{n}.weight" for h in range(count)}


def _write_medusa(form: Form, size: int, vocab: int, **more: object) -> dict[str, object]:
    return {"medusa_num_heads": form.num_heads, "medusa_num_layers": form.num_layers, **more}


def _write_original(form: Form, size: int, vocab: int) -> dict[str, object]:
    return _write_medusa(form, size, vocab, **({} if form.own_heads else {"version": "2"}))


def _write_tgi(form: Form, size: int, vocab: int) -> dict[str, object]:
    # The version is a number here, since LoRAX compares it with numbers.
    return _write_medusa(form, size, vocab, version=1 if form.own_heads else 2)


def _read_medusa(config: Config) -> Counts:
    version = float(config.get("version", 1))
    if version not in (1, 2):
        raise ValueError(f"version is {config['version']!r}; there are 1 and 2")
    return config["medusa_num_heads"], config["medusa_num_layers"], version == 1


def _write_vllm(form: Form, size: int, vocab: int) -> dict[str, object]:
    # vLLM takes any key whose name has "num" and "heads", or "num" and "layers", for these counts.
    counts = {"num_heads": form.num_heads, "num_hidden_layers": form.num_layers}
    kind = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": size,
        "vocab_size": vocab,
    }
    search = {"max_paths": 64, "topk": 10, "truncated_vocab_size": vocab}
    # vLLM drops the biases without medusa_fc_bias.
    flags = {"medusa_fc_bias": True, "original_lm_head": not form.own_heads, "logit_scale": 1.0}
    return {**kind, **counts, **search, **flags}


def _read_vllm(config: Config) -> Counts:
    counts = [
        [config[key] for key in config if "num" in key and word in key]
        for word in ("heads", "layers")
    ]
    scale, has_bias = config.get("logit_scale", 1.0), config.get("medusa_fc_bias") is True
    size = config["vocab_size"] if has_bias else None
    settle(
        (
            not has_bias,
            "medusa_fc_bias is not true, so vLLM drops the biases: set it, if they were trained",
        ),
        (
            has_bias and config.get("truncated_vocab_size", size) != size,
            "truncated_vocab_size is smaller than vocab_size; specjax reads heads of a whole "
            "vocabulary",
        ),
        (scale != 1.0, f"logit_scale is {scale}; specjax reads heads that are not scaled"),
        (
            [len(values) for values in counts] != [1, 1],
            "it must have one key with 'num' and 'heads' in its name, and one with 'num' and "
            "'layers'",
        ),
    )
    return counts[0][0], counts[1][0], not config.get("original_lm_head", False)


def _write_optimizer(form: Form, size: int, vocab: int) -> dict[str, object]:
    counts = {"num_medusa_heads": form.num_heads, "num_medusa_layers": form.num_layers}
    return {"hidden_size": size, "vocab_size": vocab, "medusa": counts}


def _read_optimizer(config: Config) -> Counts:
    return config["medusa"]["num_medusa_heads"], config["medusa"]["num_medusa_layers"], True


def _refuse_original(heads: HeadTensors) -> str | None:
    """Refuses several blocks: the authors' code repeats one per head, so the last would win."""
    for h, k in itertools.product(range(heads.form.num_heads), range(1, heads.form.num_layers)):
        for kind in ("weight", "bias"):
            first, other = (heads.tensors[f"{h}.{block}.linear.{kind}"] for block in (0, k))
            if not np.array_equal(first, other):
                return (
                    f"the blocks of head {h} differ, and this reader has one block per head, "
                    "which it repeats"
                )
    return None


def _refuse_tgi(heads: HeadTensors) -> str | None:
    if heads.form.own_heads or heads.form.num_layers == 1:
        return None
    layers = heads.form.num_layers
    return f"the heads have {layers} blocks each, and this reader takes one in version 2"


_BLOCK, _MATRIX = "{h}.{l}.linear", "{h}.{n}.weight"
HEAD_FORMATS = {
    "specjax": HeadFormat(_SAFE, _BLOCK, _MATRIX, "none", _write_original, _read_medusa),
    "original": HeadFormat(
        _SAFE, _BLOCK, _MATRIX, "none", _write_original, _read_medusa, _refuse_original
    ),
    "vllm": HeadFormat(
        SINGLE, "blocks.{h}.layers.{l}", "lm_heads.{h}.weight", "first", _write_vllm, _read_vllm
    ),
    "tgi": HeadFormat(_SAFE, _BLOCK, _MATRIX, "none", _write_tgi, _read_medusa, _refuse_tgi),
    "tensorrt-llm": HeadFormat(_PICKLE, _BLOCK, _MATRIX, "each", _write_medusa, _read_medusa),
    "model-optimizer": HeadFormat(
        SINGLE,
        f"medusa_heads.{_BLOCK}",
        f"medusa_heads.{_MATRIX}",
        "each",
        _write_optimizer,
        _read_optimizer,
    ),
}
"""The formats by their names on the command line."""
