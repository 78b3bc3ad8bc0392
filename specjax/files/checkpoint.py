"""Reads and writes Hugging Face folders: configuration, weights, tokenizer, sampling defaults.

Code from a folder is never executed, and weights are read from safetensors only.  Everything is
checked against the configuration before a tensor is read, and one error lists everything that does
not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax._internal.checks import chosen, flag, items, shown, whole
from specjax._internal.fields import FLAG, check, count, list_of, real
from specjax._internal.platforms import Device, default_devices, widens_bfloat16
from specjax.caches import CACHE_DTYPES
from specjax.files import packed as packed_files
from specjax.files.config import read_config, text_config
from specjax.files.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    file_of,
    named,
    read_bytes,
    read_json,
    replacing,
    weight_files,
)
from specjax.files.headers import headers_once, open_tensors
from specjax.files.hub import TOKENIZER, find_folder
from specjax.files.packed import described, quantisation_of, read_scheme, unquantised
from specjax.files.tensors import check_written, read_params, write_params
from specjax.files.tokenizer import find_tokenizer, tokenizer_inside
from specjax.models import (
    FAMILIES,
    OFF,
    PRECISIONS,
    Config,
    Family,
    LanguageModel,
    LinenModel,
    Transformer,
    TransformerConfig,
    attend_on,
    dot_general_on,
    holds_packed,
    mtp_layout,
    reads_bfloat16,
)
from specjax.parallel import RULES, Rules, fitted, leader, shardings
from specjax.types import Weights

if TYPE_CHECKING:
    from specjax.files.lora import Lora

_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
_INT4 = "int4"
_GENERATION = "generation_config.json"
_TOKENS = list_of(count(0, 2**31 - 1), "the ids of tokens")
_RANGES = {
    "temperature": real(least=0.0),
    "top_k": count(0, 2**31 - 1),
    "top_p": real(above=0.0, most=1.0),
    "min_p": real(least=0.0, most=1.0),
    "repetition_penalty": real(above=0.0),
}
"""The sampling defaults that `generate` accepts."""

_PACKED = re.compile(r"\.(qweight|weight_packed)$")

_FILES = (CONFIG, _GENERATION, *TOKENIZER)


@headers_once()
def load(
    path: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    cache_dtype: str | None = None,
    precision: str | None = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    rules: Rules = RULES,
    lora: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    dequantise: bool = False,
    activations: str | None = None,
    own_kernels: bool = True,
    keep_bfloat16: bool = False,
) -> LanguageModel:
    """Reads a model.

    Args:
      path: a folder with `config.json` and `model.safetensors` (or an index of shards); or a GGUF
        file, or a folder of one, whose own tokenizer is read if no `tokenizer.json` lies beside it;
        or `org/name` on the Hugging Face Hub, which is downloaded into the Hub's cache unless
        `HF_HUB_OFFLINE` is set.  Loading a folder never uses the network.
      dtype: of the parameters and of the KV cache: float32 (the default on a CPU), bfloat16 (the
        default on other devices) or float16.  With "int4" the matrices of linear maps are rounded
        to 4 bits in groups of 128 inputs (64 or 32 if these do not divide), and the rest has the
        default dtype.
      cache_dtype: "int8" or "float8" keeps keys and values in 8 bits, rounded token by token.  The
        model is another one then: its texts, with drafts or without, in `generate` and in an
        engine, are those of the rounded cache.
      precision: of products of float32 matrices: "default", "high" or "highest".  JAX's own default
        is "default", which is bfloat16 on a TPU and TensorFloat-32 on many GPUs, so that float32
        weights do not suffice for float32 logits there.
      revision: a branch, tag or commit on the Hub.
      mesh: split the parameters over its devices; each device reads its own shard.  For a model
        with fewer key heads than devices along `model`, it gets an axis `kv_copies` (see
        `make_mesh`).
      rules: the split of the parameters, like `specjax.parallel.sharding.RULES`; {} replicates the
        model on every device, as for a small draft model.
      lora: the folder of a LoRA in PEFT's format, or `org/name`, which is merged into the weights.
        A tokenizer in it replaces the model's.
      layers: read only these layers, in this order; the model then has no others.
      dequantise: hold the packed matrices of a quantised folder (FP8, AWQ, GPTQ, ...) as plain
        numbers in `dtype`.  By default their codes stay packed on the device, and a product widens
        them as it reads them.
      activations: "int8": on a CPU, round the activations that packed matrices multiply to 8 bits,
        with a step for each group of inputs, and hold the output matrix in int8, as
        `specjax.quantise` does, to save time.  This is a different model, with texts of its own,
        and its name says so.  By default activations stay in `dtype`.
      own_kernels: False: compute with XLA's products, attention and filters alone, to find out
        whether a kernel of specjax (on one CPU or one NVIDIA GPU) is at fault.
      keep_bfloat16: on a CPU of at most 8 processors with AVX2, hold the matrices of linear maps
        in bfloat16 if the file does, and compute in float32 as without it: a pass reads half the
        bytes, and has the same bits.  It is for decoding, not for training, and for models whose
        layers are one operation of ours (docs/models.md names them); elsewhere, and in another
        dtype, it changes nothing.

    Raises:
      ValueError: with every mismatch, and the fix.
      OSError: there is no such folder or model, or a file is missing or cannot be read.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"), dtype="bfloat16")
      >>> target.model.vocab_size
      512
    """
    device = next(iter(default_devices())) if mesh is None else mesh.devices.flat[0]
    platform = device.platform
    in_int4 = isinstance(dtype, str) and dtype == _INT4
    if in_int4 and dequantise:
        raise ValueError(
            'dtype="int4" holds matrices packed and dequantise=True does not; leave one of them out'
        )
    chosen("activations", activations, (None, "int8"))
    if activations is not None and (platform != "cpu" or dequantise):
        found = "dequantise=True leaves none packed" if dequantise else f"this is a {platform}"
        raise ValueError(
            'activations="int8" rounds what packed matrices multiply on a CPU, and '
            f"{found}; leave it out"
        )
    dtype = None if in_int4 else dtype
    dtype = check_dtype(_usual_dtype(device) if dtype is None else dtype)
    chosen("cache_dtype", cache_dtype, (None, *CACHE_DTYPES))
    chosen("precision", precision, (None, *PRECISIONS))
    flag("own_kernels", own_kernels)
    flag("keep_bfloat16", keep_bfloat16)
    folder = find_folder(path, revision)
    adapter = None
    if lora is not None:
        from specjax.files.lora import open_lora

        adapter = open_lora(lora)
    with named(folder):
        outline = _outline(path, folder, adapter)
    unpacked = (
        f'activations="int8" rounds what packed matrices multiply, and {outline.name} has none; '
        'pass dtype="int4" too, or leave it out'
    )
    plain = outline.scheme is None and file_of(folder) is None
    if activations is not None and plain and not in_int4:
        raise ValueError(unpacked)
    config = ours = outline.config
    if layers is not None:
        layers = check_layers(layers, config.num_layers)
        ours = config.keep(layers)
    # A CPU multiplies bfloat16 fastest with kernels [out, in], the layout of the file and of a tied
    # embedding, and float32 with kernels [in, out].  In float32 on a CPU a transposed copy of a
    # tied embedding pays for its memory; on other devices it does not.
    transposed = platform == "cpu" and dtype == jnp.bfloat16
    separate = platform == "cpu" and ours.tied_embeddings and not transposed
    alone = own_kernels and (mesh is None or mesh.size == 1)
    network = Transformer(
        ours,
        dot_general=dot_general_on(device if alone else None),
        attend=attend_on(device if alone else None),
        separate_head=separate,
        transposed=transposed,
    )
    model = LinenModel(network, dtype, precision, cache_dtype)
    mesh = None if mesh is None else fitted(mesh, model, rules)
    narrow = keep_bfloat16 and alone and platform == "cpu" and dtype == jnp.float32
    with named(folder):
        params = read_params(
            folder,
            outline.family,
            model,
            dtype,
            None if mesh is None else functools.partial(shardings, model, mesh, rules),
            config=config,
            layers=layers,
            lora=adapter,
            scheme=outline.scheme,
            dequantise=dequantise,
            in_int4=in_int4,
            keep_bfloat16=narrow and adapter is None and reads_bfloat16(ours),
        )
    loaded = outline.with_weights(model, params)
    if activations is not None:
        if not holds_packed(params):  # a GGUF file of plain numbers
            raise ValueError(unpacked)
        from specjax.models import round_activations

        loaded = round_activations(loaded)
    # A model with only some of the layers has other hidden states than those that MTP reads.
    return loaded if layers is None else dataclasses.replace(loaded, mtp=0)


@dataclasses.dataclass(frozen=True)
class Outline:
    """A model's folder without its weights; the fields are those of `LanguageModel`."""

    config: TransformerConfig
    family: Family  # as it reads this folder
    tokenizer: tokenizers.Tokenizer | None
    eos: tuple[int, ...]
    name: str
    defaults: Mapping[str, float]
    files: Mapping[str, bytes]
    mtp: int
    folder: pathlib.Path
    scheme: packed_files.Scheme | None = None  # what the folder says about packed weights

    def with_weights(self, model: LinenModel, params: Weights) -> LanguageModel:
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("config", "family", "scheme")
        }
        return LanguageModel(model, params, **shared)


@headers_once()
def read_outline(path: str | os.PathLike[str]) -> Outline:
    """Reads everything that `load` reads of a folder before the weights.

    Raises:
      ValueError, OSError: as `load`.
    """
    folder = find_folder(path)
    with named(folder):
        return _outline(path, folder, None)


def _outline(path: str | os.PathLike[str], folder: pathlib.Path, lora: Lora | None) -> Outline:
    config, family, ours = read_config(folder)
    home = folder if folder.is_dir() else folder.parent  # a tokenizer lies beside a GGUF file
    words = home
    if lora is not None and (lora.folder / "tokenizer.json").exists():
        words = lora.folder
    places = {CONFIG: home, _GENERATION: home, **dict.fromkeys(TOKENIZER, words)}
    files = {
        name: read_bytes(place / name) for name, place in places.items() if (place / name).exists()
    }
    file = file_of(folder)
    own = {}
    if file is not None and "tokenizer.json" not in files:
        from specjax.files import gguf

        own = gguf.tokenizer_in(file)
    files = {**own, **files}
    # The flag of a tied matrix may differ, and a GGUF file has fields of its own.
    if file is not None or json.loads(files[CONFIG]) != config:
        files[CONFIG] = _json(config)
    generation = read_json(home / _GENERATION) if _GENERATION in files else {}
    eos, defaults = _eos(folder, generation, text_config(config)), _defaults(folder, generation)
    if file is not None and own:
        tokenizer = tokenizer_inside(file, own["tokenizer.json"], ours.vocab_size)
    else:
        tokenizer = find_tokenizer(words, ours.vocab_size)
    name = folder.name if pathlib.Path(path).exists() else str(path)
    name = name if lora is None else f"{name} with {lora.folder.name}"
    mtp, scheme = _count_mtp(folder, ours.num_layers), read_scheme(folder, config)
    fields, where = described(folder, config)
    if scheme is not None and where != CONFIG:  # `save` writes one file
        files[CONFIG] = _json({**config, "quantization_config": fields})
    return Outline(ours, family, tokenizer, eos, name, defaults, files, mtp, folder, scheme)


def _count_mtp(folder: pathlib.Path, layers: int) -> int:
    """Returns the number of MTP layers beside the `layers` layers of a folder's model."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return 0
    names = open_tensors(weight_files(folder))[0]
    # The matrix may be packed, in tensors of other names.
    found = mtp_layout((_PACKED.sub(".weight", name) for name in names), layers)
    return 0 if found is None else found[1]


def check_layers(layers: object, most: int) -> Sequence[int]:
    """Returns the layers that `load` is asked for; each must exist, and only once."""
    wanted = f"a list of layers, each once, in [0, {most - 1}]"
    asked = items(layers)
    if not asked or len(set(map(str, asked))) < len(asked):
        raise ValueError(f"layers={shown(layers)}; it must be {wanted}")
    return [whole("layers", layer, 0, most - 1, wanted) for layer in asked]


def save(
    model: LanguageModel, folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None
) -> None:
    """Writes a folder that `load` and transformers read.

    The other files that `load` found are written unchanged, except for fields that
    `dataclasses.replace` has changed since (the configuration, `eos`, `defaults`).  An interrupted
    save leaves the old model, or a folder without `config.json`, which cannot be loaded.  Of
    several processes only the first writes, but all must call.

    The `cache_dtype` and `activations` of a model are not in its folder: pass them to `load` again.

    Packed whole numbers (int8, int4, AWQ, GPTQ) are written as compressed-tensors' pack-quantized,
    with the same numbers.  FP8 and FP4 are written as they were read, but for the scales of
    activations, which `load` does not read.

    Args:
      model: its model is a `Transformer`.
      folder: created if needed; a model in it is replaced, other files stay.
      dtype: of the weights that are not packed, rounded to nearest; by default the dtype that they
        have.

    Raises:
      ValueError: the model is not a `Transformer`, the dtype is not supported, matrices are in int8
        (`quantise`), or the weights are packed whole numbers in fused tensors of experts, or with a
        least number for each group (GGUF's Q4_K): load it with `dequantise=True`.

    Example:
      >>> model = specjax.load(specjax.shipped("tiny/target"), layers=[0])
      >>> specjax.save(model, "one-layer")
      >>> specjax.load("one-layer").model.vocab_size
      512
    """
    module = model.model.module if isinstance(model.model, LinenModel) else None
    if not isinstance(module, Transformer):
        raise ValueError(
            f"{model.name} is not a specjax Transformer; write its parameters with "
            "specjax.files.orbax.save_params"
        )
    if module.head_tokens is not None:
        raise ValueError(
            f"{model.name} has a part of its output matrix, which no published layout has: save "
            "the model that was trimmed, and trim it again after it is loaded"
        )
    dtype = None if dtype is None else check_dtype(dtype)
    folder, family = pathlib.Path(folder), FAMILIES[module.config.family]
    check_written(family, module.config, model.params)
    described_as = quantisation_of(json.loads(model.files.get(CONFIG, b"{}")))
    files = {name: model.files[name] for name in TOKENIZER if name in model.files}
    if model.tokenizer is not None and "tokenizer.json" not in files:
        files["tokenizer.json"] = model.tokenizer.to_str(pretty=True).encode()
        files.setdefault(
            "tokenizer_config.json", _json({"tokenizer_class": "PreTrainedTokenizerFast"})
        )
    if not leader():
        write_params(folder / SINGLE, family, module.config, model.params, dtype, described_as)
        return
    with replacing(folder, _FILES) as new:
        written, packed = write_params(
            new / SINGLE, family, module.config, model.params, dtype, described_as
        )
        files |= _configs(model, family, written.name, packed)
        for name, content in files.items():
            (new / name).write_bytes(content)


def _usual_dtype(device: Device) -> str:
    """Returns the dtype of weights on a device, and warns where it is slow."""
    if device.platform == "cpu":
        return "float32"
    if widens_bfloat16(device):
        warnings.warn(
            "this GPU has no products of bfloat16, so XLA converts all weights in every step: "
            'pass dtype="float16" if the numbers of the model stay below 65504',
            stacklevel=3,
        )
    return "bfloat16"


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of weights.  Raises ValueError for one that is not supported."""
    try:
        known = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        known = None
    if known is None or known not in _DTYPES:
        raise ValueError(
            f"dtype={shown(dtype)} is not supported; pass {', '.join(d.name for d in _DTYPES)}"
        )
    return cast(np.dtype, known)


def _eos(folder: str | pathlib.Path, generation: Config, config: Config) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    _TOKENS.of(f"{folder}: eos_token_id in {CONFIG} or {_GENERATION}", ids)
    return tuple(ids)


def _defaults(folder: str | pathlib.Path, generation: Config) -> dict[str, float]:
    """Returns the sampling settings in generation_config.json, if its `do_sample` is true.

    transformers would add top_k=50 to them; specjax does not.
    """
    sampled = bool(generation.get("do_sample"))
    names = OFF if sampled else ("repetition_penalty",)  # it applies to greedy decoding too
    settings = {name: generation[name] for name in names if generation.get(name) is not None}
    with named(pathlib.Path(folder) / _GENERATION):
        check(generation, {"do_sample": FLAG} | {name: _RANGES[name] for name in names})
    return {"temperature": 1.0, **settings} if sampled else settings


def _json(value: Config) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _configs(
    model: LanguageModel, family: Family, dtype: str, packed: Config | None
) -> dict[str, bytes]:
    """Returns the contents of generation_config.json and config.json, in this order.

    They are the contents that `load` read, with the fields that have changed since; `packed` is the
    configuration of packed matrices.
    """
    ours, eos = model.model.module.config, model.eos
    ids = {"eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None}
    loaded = {
        name: json.loads(model.files[name]) if name in model.files else {}
        for name in (_GENERATION, CONFIG)
    }
    before = unquantised(text_config(loaded[CONFIG]))
    generation, config = dict(loaded[_GENERATION]), dict(before)
    # A folder of several models becomes one of its text model.
    kind = loaded[CONFIG].get("model_type")
    if kind != ours.family or family.read_config(config) != ours:
        # By default BOS is the EOS token.  Padding is written too, because transformers
        # would otherwise add its own.
        ids["bos_token_id"] = config.get("bos_token_id", eos[0] if eos else None)
        padding = {"pad_token_id": config.get("pad_token_id")}
        config = {
            "architectures": [family.architecture],
            **family.write_config(ours),
            **ids,
            **padding,
            "dtype": dtype,
        }
        config["torch_dtype"] = dtype  # its older name
    config |= {name: dtype for name in ("dtype", "torch_dtype") if name in config} or {
        "dtype": dtype
    }
    if "bos_token_id" in ids or _eos(model.name, generation, before) != eos:
        config, generation = config | ids, generation | ids
    if packed is not None:
        config["quantization_config"] = packed
    if _defaults(model.name, generation) != model.defaults:
        generation = {name: value for name, value in generation.items() if name not in OFF}
        generation |= {"do_sample": "temperature" in model.defaults, **model.defaults}
    new = {_GENERATION: generation, CONFIG: config}
    return {
        name: model.files[name] if new[name] == loaded[name] else _json(new[name])
        for name in new
        if new[name]
    }
