"""Hugging Face folders in and out: `config.json`, safetensors, `tokenizer.json`, `generation_config.json`.

Nothing from a folder is ever executed: weights are read from safetensors only, and a configuration that asks for its
own code (`auto_map`) is refused.  Everything is checked against the configuration before a tensor is read, and all
that does not fit is named at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
from tqdm import tqdm

from specjax.models import FAMILIES, Family, LinenModel, Transformer, TransformerConfig

_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
_STORED = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its weights and its tokenizer: what `load` returns and `generate` takes."""

    model: LinenModel
    params: Any
    tokenizer: tokenizers.Tokenizer | None
    eos: tuple[int, ...]  # ids that end a text
    name: str  # of its folder, for messages

    @property
    def num_params(self) -> int:
        """Parameters of the model; the copy of a tied embedding counts once."""
        twice = self.params["embedding"].size if self.model.module.separate_head else 0
        return sum(leaf.size for leaf in jax.tree.leaves(self.params)) - twice


def load(path: str | pathlib.Path, dtype: Any = None) -> LanguageModel:
    """Read a folder.

    Args:
      path: a folder with `config.json` and `model.safetensors` (or a sharded index).
      dtype: of the parameters and of the cache; by default float32, which is what a CPU is fast and exact in.

    Raises:
      ValueError: what does not fit, and the cure.
      FileNotFoundError: no such folder, or a file that it lacks.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; pass one that holds config.json and model.safetensors")
    try:
        dtype = jnp.dtype(dtype or "float32")
    except TypeError:
        pass
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} is not supported; pass {', '.join(d.name for d in _DTYPES)}")
    config = _read_json(folder / "config.json")
    family = _family(folder, config)
    try:
        ours = family.read_config(config)
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'} lacks {error}, which a {config['model_type']} model needs"
        ) from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    # On a CPU the copy of a tied embedding pays for itself; elsewhere memory is dearer.
    separate = ours.tied_embeddings and dtype == jnp.float32 and jax.default_backend() == "cpu"
    model = LinenModel(Transformer(ours, separate_head=separate), dtype)
    eos = _eos(folder, config)
    params = _read_weights(folder, family, ours, model, dtype)
    return LanguageModel(model, params, _tokenizer(folder), eos, folder.name)


def save(
    folder: str | pathlib.Path, model: LinenModel, params: Any, *, tokenizer: str | pathlib.Path | None = None,
    eos: tuple[int, ...] = (), dtype: Any = None,
) -> None:  # fmt: skip
    """Write a folder that `load` and transformers read.

    Args:
      folder: made if need be; files of these names in it are replaced.
      model: over a `Transformer`.
      params: its parameters.
      tokenizer: a `tokenizer.json` to copy.
      eos: ids that end a text, for `generation_config.json`; the first is also the one that starts it.
      dtype: to round to; by default what the parameters have.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family = FAMILIES["llama"]
    config = model.module.config
    tensors = {}
    for tensor in family.tensors(config):
        leaf = np.asarray(_at(params, tensor.path))
        leaf = leaf.astype(dtype or leaf.dtype)
        tensors[tensor.name] = np.ascontiguousarray(leaf.T if tensor.transpose else leaf)
    written = next(iter(tensors.values())).dtype.name
    ids = {"bos_token_id": eos[0] if eos else None, "eos_token_id": list(eos) if len(eos) > 1 else (eos or (None,))[0]}
    _write_json(
        folder / "config.json",
        {
            "architectures": [family.architecture],
            **family.write_config(config),
            "dtype": written,
            "torch_dtype": written,
        }
        | ids,
    )
    _write_json(folder / "generation_config.json", ids)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def vocabulary_digest(tokenizer: tokenizers.Tokenizer) -> str:
    """Equal for tokenizers that give the same tokens the same ids."""
    pairs = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; a model folder holds config.json and model.safetensors")
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _family(folder: pathlib.Path, config: dict[str, Any]) -> Family:
    kind = config.get("model_type")
    if "auto_map" in config:
        raise ValueError(
            f"{folder / 'config.json'} asks for its own code (auto_map); specjax never executes code from a folder. "
            "If the weights are those of a plain model_type, remove auto_map from the file"
        )
    if "quantization_config" in config:
        raise ValueError(f"{folder} is quantised (quantization_config); pass the unquantised checkpoint")
    if kind not in FAMILIES:
        raise ValueError(f"{folder}: model_type {kind!r} is not supported; specjax reads {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def _eos(folder: pathlib.Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.exists() else None
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{folder}: eos_token_id is {found!r}; it must be a token id or a list of them")
    return tuple(ids)


def _tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from None


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(n, str) and n == pathlib.Path(n).name for n in names.values()
        ):
            raise ValueError(f"{index}: weight_map must map the names of tensors to files of this folder")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise FileNotFoundError(f"{index} names {', '.join(missing) or 'no file'}: download the missing shards")
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} holds pickled weights (pytorch_model.bin) only, and reading those executes what they contain; "
            "specjax reads safetensors: convert with transformers' save_pretrained(safe_serialization=True)"
        )
    raise FileNotFoundError(f"{folder} holds no model.safetensors and no model.safetensors.index.json")


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _read_weights(
    folder: pathlib.Path, family: Family, config: TransformerConfig, model: LinenModel, dtype: Any
) -> dict[str, Any]:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    wanted = {tensor.name: tensor for tensor in family.tensors(config)}
    handles, faults = {}, []
    for file in _weight_files(folder):
        try:
            handle = safetensors.safe_open(file, "np")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or truncated ({error}); download it again") from None
        for name in handle.keys():
            if name in handles:
                faults.append(f"{name} is in two files")
            handles[name] = handle
    for name, tensor in wanted.items():
        shape = _at(shapes, tensor.path).shape
        shape = shape[::-1] if tensor.transpose else shape
        if name not in handles:
            faults.append(f"{name} is missing (shape {list(shape)})")
        elif (found := tuple(handles[name].get_slice(name).get_shape())) != shape:
            faults.append(f"{name} has shape {list(found)} instead of {list(shape)}")
        elif (kind := handles[name].get_slice(name).get_dtype()) not in _STORED:
            faults.append(f"{name} is stored as {kind}; specjax reads {', '.join(_STORED)}")
    for name in handles:
        tied_copy = config.tied_embeddings and name == "lm_head.weight"
        if name not in wanted and not tied_copy and not name.endswith(family.ignored):
            faults.append(f"{name} is not a tensor of this architecture")
    if faults:
        raise ValueError(f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(faults))
    params: dict[str, Any] = {}
    for name, tensor in tqdm(wanted.items(), desc=f"loading {folder.name}", unit="tensor", disable=None, leave=False):
        array = handles[name].get_tensor(name)
        branch = params
        for part in tensor.path[:-1]:
            branch = branch.setdefault(part, {})
        branch[tensor.path[-1]] = jnp.asarray(array.T if tensor.transpose else array, dtype)
    if model.module.separate_head:
        params["head"] = {"kernel": jnp.asarray(np.asarray(params["embedding"]).T)}
    return params
