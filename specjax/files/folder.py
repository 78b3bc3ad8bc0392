"""The files of a model folder: their names, and reading them with clear errors."""

from __future__ import annotations

import json
import pathlib

from specjax.models import Config

SINGLE, INDEX, SHARDS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)


def read_json(path: pathlib.Path) -> Config:
    """The JSON object in a file.  Raises ValueError or OSError with the name of the file."""
    try:
        value = json.loads(read_bytes(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_bytes(path: pathlib.Path, size: int = -1) -> bytes:
    """A file, or its first `size` bytes.  Raises OSError with the name of the file and the fix."""
    try:
        with open(path, "rb") as stream:
            return stream.read(size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing; a model folder holds config.json and {SINGLE}"
        ) from None
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror}): it must be a file that you may read"
        ) from None


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the weights.  Raises ValueError or OSError that says what is missing."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return [single]
    if index.exists():
        files = [folder / name for name in shard_names(index)]
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise FileNotFoundError(
                f"{index} names {', '.join(missing) or 'no file'}: download the missing shards"
            )
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} holds pickled weights (pytorch_model.bin) only, and reading those executes "
            "what they contain; specjax reads safetensors: convert with transformers' "
            "save_pretrained(safe_serialization=True)"
        )
    raise FileNotFoundError(f"{folder} holds no {SINGLE} and no {INDEX}")


def shard_names(index: pathlib.Path) -> list[str]:
    """The files that an index of shards names."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(n, str) and n == pathlib.Path(n).name for n in names.values()
    ):
        raise ValueError(
            f"{index}: weight_map must map the names of tensors to files of this folder"
        )
    return sorted(set(names.values()))
