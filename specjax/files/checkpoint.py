"""Hugging Face folders in and out: configuration, safetensors, tokenizer, sampling defaults.

Nothing from a folder is ever executed: weights are read from safetensors only, and a configuration that asks for its
own code (`auto_map`) is refused.  Everything is checked against the configuration before a tensor is read, and all
that does not fit is named at once.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import Mesh

from specjax.files.hub import SLOW_TOKENIZER, TOKENIZER, find_folder
from specjax.files.tensors import (
    INDEX,
    SHARDS,
    SINGLE,
    read_bytes,
    read_json,
    read_params,
    write_params,
)
from specjax.models import (
    FAMILIES,
    OFF,
    Family,
    LanguageModel,
    LinenModel,
    Transformer,
    TransformerConfig,
)
from specjax.parallel import RULES, Rules, leader, shardings

_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_FILES = (_CONFIG, _GENERATION, *TOKENIZER)


def load(
    path: str | os.PathLike[str],
    dtype: Any = None,
    *,
    revision: str | None = None,
    mesh: Mesh | None = None,
    rules: Rules = RULES,
) -> LanguageModel:
    """Read a model.

    Args:
      path: a folder with `config.json` and `model.safetensors` (or a sharded index), or `org/name` on the Hugging Face
        Hub, which goes through the Hub's own cache and obeys `HF_HUB_OFFLINE`.  A folder never touches the network.
      dtype: of the parameters and of the KV cache: float32 (the default on a CPU), bfloat16 (the
        default on accelerators) or float16.
      revision: a branch, tag or commit on the Hub.
      mesh: split the parameters over its devices, as `specjax.parallel.sharding` says; each reads its own part.
      rules: how, as `specjax.parallel.sharding.RULES`; {} lays the whole model on every device, which suits a small draft.

    Raises:
      ValueError: what does not fit, and the cure.
      OSError: no such folder or model, or a file that is missing or cannot be read.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    dtype = _check_dtype(dtype or ("float32" if platform == "cpu" else "bfloat16"))
    folder = find_folder(path, revision)
    config, family, ours = read_config(folder)
    files = {name: read_bytes(folder / name) for name in _FILES if (folder / name).exists()}
    generation = read_json(folder / _GENERATION) if _GENERATION in files else {}
    eos, defaults = _eos(folder, generation, config), _defaults(folder, generation)
    tokenizer = _tokenizer(folder, ours.vocab_size)
    # How a CPU multiplies fast: bfloat16 by kernels that stand as in the file, and as a tied embedding does; float32 by
    # turned ones, and there a turned copy of a tied embedding pays for itself.  Elsewhere memory is dearer.
    transposed = platform == "cpu" and dtype == jnp.bfloat16
    separate = platform == "cpu" and ours.tied_embeddings and not transposed
    model = LinenModel(Transformer(ours, separate_head=separate, transposed=transposed), dtype)
    params = read_params(
        folder, family, model, dtype, None if mesh is None else shardings(model, mesh, rules)
    )
    name = folder.name if pathlib.Path(path).is_dir() else str(path)
    return LanguageModel(model, params, tokenizer, eos, name, defaults, files)


def read_config(folder: pathlib.Path) -> tuple[dict[str, Any], Family, TransformerConfig]:
    """A folder's `config.json`, its family, and the configuration that the family reads from it.

    Raises:
      ValueError: what does not fit, and the cure.
    """
    config = read_json(folder / _CONFIG)
    family = _family(folder, config)
    try:
        return config, family, family.read_config(config)
    except KeyError as error:
        kind = config["model_type"]
        raise ValueError(f"{folder / _CONFIG} lacks {error}, which a {kind} model needs") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{folder / _CONFIG}: {error}") from None


def save(model: LanguageModel, folder: str | os.PathLike[str], *, dtype: Any = None) -> None:
    """Write a folder that `load` and transformers read.

    What `load` found beside the weights is written as it came; only what `dataclasses.replace` has changed since (the
    configuration, `eos`, `defaults`) is written anew.  An interrupted save leaves the model that was there, or a folder
    without `config.json`, which nothing loads.  Of several processes the first writes, and all must call.

    Args:
      model: over a `Transformer`.
      folder: made if need be; a model that is in it is replaced, other files stay.
      dtype: of the weights, rounded to nearest; by default what they have.

    Raises:
      ValueError: no `Transformer`, or a dtype that is not supported.
    """
    module = getattr(model.model, "module", None)
    if not isinstance(module, Transformer):
        raise ValueError(
            f"{model.name} is no specjax Transformer; write its parameters with specjax.files.orbax.save_params"
        )
    dtype = dtype and _check_dtype(dtype)
    folder, family = pathlib.Path(folder), FAMILIES[module.config.family]
    files = {name: model.files[name] for name in TOKENIZER if name in model.files}
    if model.tokenizer is not None and "tokenizer.json" not in files:
        files["tokenizer.json"] = model.tokenizer.to_str(pretty=True).encode()
        files.setdefault(
            "tokenizer_config.json", _json({"tokenizer_class": "PreTrainedTokenizerFast"})
        )
    if not leader():
        write_params(folder / SINGLE, family, module.config, model.params, dtype)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        new = pathlib.Path(made)
        written = write_params(new / SINGLE, family, module.config, model.params, dtype)
        files |= _configs(model, family, written.name)
        for name, content in files.items():
            (new / name).write_bytes(content)
        for old in [*(folder / name for name in (*_FILES, SINGLE, INDEX)), *folder.glob(SHARDS)]:
            old.unlink(missing_ok=True)  # config.json first: without it nothing loads
        for name in (SINGLE, *files):
            os.replace(new / name, folder / name)  # and config.json last


def read_tokenizer(path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """A `tokenizer.json`, which gives every text all of its tokens and no others.

    The file may hold a truncation and a padding, left over from how somebody once called the
    tokenizer.  They are switched off, as in transformers, where a call has to ask for them: else a
    prompt would be cut or padded without a word, and continued as another text.

    Raises:
      ValueError: the file is no tokenizer.
      OSError: it is missing or cannot be read.
    """
    text = read_bytes(pathlib.Path(path))
    try:
        found = tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    found.no_truncation()
    found.no_padding()
    return found


def _check_dtype(dtype: Any) -> Any:
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        pass
    if dtype not in _DTYPES:
        raise ValueError(
            f"dtype={dtype} is not supported; pass {', '.join(d.name for d in _DTYPES)}"
        )
    return dtype


def _family(folder: pathlib.Path, config: dict[str, Any]) -> Family:
    kind = config.get("model_type")
    if "auto_map" in config:
        raise ValueError(
            f"{folder / _CONFIG} asks for its own code (auto_map); specjax never executes code from a folder. "
            "If the weights are those of a plain model_type, remove auto_map from the file"
        )
    if "quantization_config" in config:
        raise ValueError(
            f"{folder} is quantised (quantization_config); pass the unquantised checkpoint"
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {kind!r} is not supported; specjax reads {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def _eos(folder: Any, generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(
            f"{folder}: eos_token_id is {found!r}; it must be a token id or a list of them"
        )
    return tuple(ids)


def _defaults(folder: Any, generation: dict[str, Any]) -> dict[str, float]:
    """What the file says, where it asks for sampling at all; the top_k=50 that transformers would add is not."""
    sampled = bool(generation.get("do_sample"))
    names = OFF if sampled else ("repetition_penalty",)  # which greedy text heeds too
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{folder}: {name} in {_GENERATION} is {value!r}; it must be a number")
    return {"temperature": 1.0, **found} if sampled else found


def _tokenizer(folder: pathlib.Path, vocab_size: int) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        old = [name for name in SLOW_TOKENIZER if (folder / name).exists()]
        if old:
            raise ValueError(
                f"{folder} has a tokenizer in an older format ({', '.join(old)}) and no tokenizer.json; write one with "
                f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        return None
    found = read_tokenizer(path)
    # Added tokens may lie beyond the embedding (Gemma 3's token for images does); `generate` refuses their ids.
    greatest = max(found.get_vocab(with_added_tokens=False).values(), default=0)
    if greatest >= vocab_size:
        raise ValueError(
            f"{path} has token ids up to {greatest}, and the embedding only {vocab_size} rows: it is the tokenizer of "
            "another model"
        )
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _configs(model: LanguageModel, family: Family, dtype: str) -> dict[str, bytes]:
    """generation_config.json and config.json, in this order: as they came, but for what has changed since."""
    ours, eos = model.model.module.config, model.eos
    ids = {"eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None}
    came = {
        name: json.loads(model.files[name]) if name in model.files else {}
        for name in (_GENERATION, _CONFIG)
    }
    generation, config = dict(came[_GENERATION]), dict(came[_CONFIG])
    if config.get("model_type") != ours.family or family.read_config(config) != ours:
        # A text starts with what ends one, where no file says otherwise; transformers would add its own paddings.
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
    if "bos_token_id" in ids or _eos(model.name, generation, came[_CONFIG]) != eos:
        config, generation = config | ids, generation | ids
    if _defaults(model.name, generation) != model.defaults:
        generation = {name: value for name, value in generation.items() if name not in OFF}
        generation |= {"do_sample": "temperature" in model.defaults, **model.defaults}
    new = {_GENERATION: generation, _CONFIG: config}
    return {
        name: model.files[name] if new[name] == came[name] else _json(new[name])
        for name in new
        if new[name]
    }
