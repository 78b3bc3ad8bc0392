"""What a folder says about its packed weights, and which of its tensors are packed.

The configuration says which formats a folder has.  Which matrices have one is decided tensor by
tensor, by the names and dtypes in the files: folders leave out layers without saying so.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specjax._internal.checks import shown
from specjax._internal.fields import OBJECT, Kind, count, is_whole, one_of
from specjax.files.folder import CONFIG, OTHER_FORM, named
from specjax.files.headers import Stored
from specjax.files.packed.awq import AWQ
from specjax.files.packed.compressed import INT8, WORDS
from specjax.files.packed.format import Format
from specjax.files.packed.fp4 import EXPERTS, MX, NV, NV_MODELOPT
from specjax.files.packed.fp8 import FP8
from specjax.files.packed.gptq import GPTQ
from specjax.files.packed.matrix import PackedTensor
from specjax.models import Config

_AGAIN = "download the folder again, or make it again"

_BLOCK = Kind(
    "null or a list of two whole numbers of at least 1",
    lambda value: (
        value is None
        or (
            isinstance(value, list)
            and len(value) == 2
            and all(is_whole(n) and n > 0 for n in value)
        )
    ),
)
_GROUP = Kind("-1 or a whole number of at least 1", lambda v: is_whole(v) and (v == -1 or v >= 1))

_UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale",
    ".output_scale", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
"""Ends of the names of tensors by which activations and caches are quantised, which is not done."""

_KNOWN = {
    "fp8": {
        "activation_scheme", "weight_block_size", "scale_fmt", "fmt", "modules_to_not_convert",
        "ignored_layers", "dequantize", "expert_dtype", "modules_to_convert",
    },
    "mxfp4": {"modules_to_not_convert", "dequantize"},
    "awq": {
        "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend",
        "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
        "exllama_config", "format", "desc_act", "sym", "true_sequential", "lm_head", "meta",
        "pack_dtype", "checkpoint_format",
    },
    "gptq": {
        "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "damp_percent",
        "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path",
        "model_file_base_name", "meta", "lm_head", "dynamic", "pack_dtype", "tokenizer", "dataset",
        "exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16", "max_input_length",
        "model_seqlen", "cache_block_outputs", "batch_size", "block_name_to_quantize",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id",
        "backend", "act_group_aware", "mse", "is_marlin_format", "method", "gptaq", "foem",
        "hyb_act",
    },
    "compressed-tensors": {
        "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status",
        "global_compression_ratio", "sparsity_config", "version", "transform_config",
        "moe_sparsity_config", "run_compressed",
    },
    "modelopt": {
        "quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "ignore",
        "config_groups", "kv_cache_scheme", "producer", "quantized_layers", "has_zero_point",
        "pre_quant_scale",
    },
}  # fmt: skip
"""The fields of a configuration, by its method; those that say how numbers are stored are checked,
and the others say how they were found, or what the files say too."""

_METHODS: Mapping[str, tuple[Format, ...]] = {
    "fp8": (FP8,),
    "compressed-tensors": (NV, MX, WORDS, INT8, FP8),
    "modelopt": (NV_MODELOPT, FP8),
    "awq": (AWQ,),
    "gptq": (GPTQ,),
    "mxfp4": (EXPERTS,),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The packed formats of a folder, and the fields of its configuration that they read."""

    method: str
    fields: Config

    def open(self, stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
        """Returns the tensors by the names of a file that is not quantised, and faults.

        Tensors that hold a packed matrix become one `PackedTensor`.  A fault is a line for a tensor
        that does not fit its others, with the cure.
        """
        made, faults, used = dict(stored), [], set()
        packed = 0
        for name, tensor in stored.items():
            if name in used or name.endswith(("_scale", "_scale_inv")):
                continue
            found = [f for f in _METHODS[self.method] if _holds_codes(f, name, tensor)]
            if not found:
                continue
            packed += 1
            start = {format: name.removesuffix(format.codes) for format in found}
            lacking = {f: _missing(f, start[f], stored) for f in found}
            format = next((f for f in found if not lacking[f]), None)
            if format is None:
                faults.append(f"{name} has no {' and no '.join(lacking[found[0]])}: {_AGAIN}")
                continue
            parts = _parts(format, start[format], stored)
            used |= {start[format] + end for end in parts}
            dense = start[format] + format.dense
            if dense != name and dense in stored:
                faults.append(
                    f"{dense} is in the files both packed, as {name}, and plain: {_AGAIN}"
                )
                continue
            try:
                opened = format.open(parts, self.fields)
            except ValueError as error:
                faults.append(f"{name}: {error}: {_AGAIN}")
                continue
            for end in parts:
                made.pop(start[format] + end, None)
            made[dense] = opened
        if not packed and stored:
            faults.append(
                f"{CONFIG} says that the weights are quantised ({self.method}), and no tensor is: "
                "remove its quantization_config if they are not"
            )
        return {n: t for n, t in made.items() if not n.endswith(_UNUSED)}, faults


def without_zero_biases(stored: Mapping[str, Stored], known: set[str]) -> dict[str, Stored]:
    """Returns the tensors without biases of 0 that the model does not have.

    AutoGPTQ wrote one beside each packed matrix.
    """

    def is_zero(name: str, tensor: Stored) -> bool:
        matrix = stored.get(f"{name.removesuffix('bias')}weight")
        return (
            name.endswith(".bias")
            and name not in known
            and isinstance(matrix, PackedTensor)
            and tensor.kind in ("F16", "BF16", "F32")
            and not tensor.map().any()
        )

    return {name: tensor for name, tensor in stored.items() if not is_zero(name, tensor)}


def forms(stored: Mapping[str, Stored]) -> dict[str, int]:
    """Returns the number of packed matrices of each form."""
    made: dict[str, int] = {}
    for tensor in stored.values():
        if isinstance(tensor, PackedTensor):
            made[tensor.form] = made.get(tensor.form, 0) + 1
    return made


def _holds_codes(format: Format, name: str, tensor: Stored) -> bool:
    if tensor.kind not in format.kinds or not name.endswith(format.codes):
        return False
    start = name.removesuffix(format.codes)
    return not format.codes or format.codes.startswith("_") or start.endswith(".")


def _missing(format: Format, start: str, stored: Mapping[str, Stored]) -> list[str]:
    """Returns the names of the tensors that a matrix lacks."""
    return [
        " or ".join(start + end for end in ends)
        for ends in format.needed
        if not any(start + end in stored for end in ends)
    ]


def _parts(format: Format, start: str, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    ends = [format.codes, *(end for some in format.needed for end in some), *format.optional]
    return {end: stored[start + end] for end in ends if start + end in stored}


def scheme_of(fields: Any, folder: pathlib.Path, where: str) -> Scheme:
    """Returns the scheme that the fields of a folder's file `where` describe.

    Raises:
      ValueError: a format, or a field, is not supported; the message has the cure.
    """
    with named(folder / where, OTHER_FORM):
        OBJECT.of("quantization_config", fields)
        fields = dict(fields)
        method = fields.pop("quant_method", None)
        if method is None and "config_groups" in fields:
            method = "compressed-tensors"
        if method is None and "quant_algo" in fields:
            method = "modelopt"
        if not isinstance(method, str) or method not in _METHODS:
            raise ValueError(
                f"{folder} is quantised (quantization_config of the method {shown(method)}), and "
                f"specjax reads {', '.join(_METHODS)}; {OTHER_FORM}"
            )
        unknown = sorted(
            name for name, value in fields.items() if name not in _KNOWN[method] and value
        )
        if unknown:
            raise ValueError(
                f"quantization_config has fields that specjax does not know for {method}: "
                f"{', '.join(map(shown, unknown))}; remove them if they do not say how numbers are "
                "stored"
            )
        return Scheme(method, _READERS.get(method, _plain)(fields))


def _plain(fields: Config) -> Config:
    return {}


def _read_fp8(fields: Config) -> Config:
    block = fields.get("weight_block_size", [128, 128])
    one_of(("e4m3", "float8_e4m3fn", None)).of("fmt", fields.get("fmt"))
    one_of(("float", "ue8m0", None)).of("scale_fmt", fields.get("scale_fmt"))
    one_of(("fp8", None)).of("expert_dtype", fields.get("expert_dtype"))
    return {"weight_block_size": _BLOCK.of("weight_block_size", block)}


def _read_awq(fields: Config) -> Config:
    bits = fields.get("bits", fields.get("w_bit", 4))
    one_of((4,)).of("bits", bits)
    version = fields.get("version", fields.get("format")) or "gemm"
    if str(version).lower() != "gemm":
        raise ValueError(f"version is {shown(version)}; specjax reads the AWQ layout gemm")
    one_of((True,)).read(fields, "zero_point", True)
    group = fields.get("group_size", fields.get("q_group_size", 128))
    return {"group_size": _GROUP.of("group_size", group)}


def _read_gptq(fields: Config) -> Config:
    bits = one_of((4, 8)).of("bits", fields.get("bits"))
    layout = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    one_of(("gptq", "gptq_v2")).of("checkpoint_format", layout)
    one_of(("int32",)).read(fields, "pack_dtype", "int32")
    one_of((False,)).read(fields, "is_marlin_format", False)
    dynamic = OBJECT.of("dynamic", fields.get("dynamic") or {})
    if any(not name.startswith("-") for name in dynamic):
        raise ValueError(
            "dynamic gives some matrices other bits or groups, which specjax does not read"
        )
    group = _GROUP.of("group_size", fields.get("group_size", 128))
    return {"bits": bits, "group_size": group, "checkpoint_format": layout}


_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
_WEIGHTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx",
}  # fmt: skip


def _read_compressed(fields: Config) -> Config:
    format = fields.get("format")
    one_of(_FORMATS).of("format", format)
    sparse = OBJECT.of("sparsity_config", fields.get("sparsity_config") or {})
    one_of(("dense",)).of("sparsity_config: format", sparse.get("format", "dense"))
    transform = OBJECT.of("transform_config", fields.get("transform_config") or {})
    if transform.get("config_groups"):
        raise ValueError(
            "transform_config has rotations of activations, which specjax does not compute"
        )
    blocks = set()
    groups = OBJECT.of("config_groups", fields.get("config_groups") or {})
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        if unknown := sorted({n for n, v in weights.items() if v is not None} - _WEIGHTS):
            raise ValueError(
                f"config_groups: {name}: weights has fields that specjax does not know: "
                f"{', '.join(map(shown, unknown))}"
            )
        count(1, 8).of(f"config_groups: {name}: weights: num_bits", weights.get("num_bits"))
        if weights.get("strategy") == "block":
            block = _BLOCK.of("block_structure", weights.get("block_structure") or [128, 128])
            blocks.add(tuple(block))
    if len(blocks) > 1:
        raise ValueError(f"config_groups has blocks of several sizes: {sorted(blocks)}")
    return {"weight_block_size": list(blocks.pop()) if blocks else None}


_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION", "FP8_PB_WO", "W4A16_NVFP4")


def _read_modelopt(fields: Config) -> Config:
    one_of(_ALGORITHMS).of("quant_algo", fields.get("quant_algo"))
    one_of((False,)).read(fields, "pre_quant_scale", False)
    one_of((False,)).read(fields, "has_zero_point", False)
    blocks = fields.get("quant_algo") == "FP8_PB_WO"
    return {"weight_block_size": [128, 128] if blocks else None}


_READERS: Mapping[str, Callable[[Config], Config]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}
