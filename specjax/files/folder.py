"""The files of a model folder: their names, and reading them with clear errors."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterable, Iterator

from specjax.models import Config
from specjax.parallel import Indivisible

CONFIG, SINGLE, INDEX, SHARDS = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)


_MOST = 2**27
"""The most bytes of a file that is read at once; the tokenizer of 262 144 tokens has 33 million."""

_MOST_JSON = 2**25
"""The most bytes of a configuration or an index; a model with 10^5 tensors needs 10^7.

Python may need 30 bytes for a byte of it.
"""

_LISTED = 30  # lines of one message
_LINKED = (".json", ".safetensors", ".jinja")


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """Adds the name of the file or folder, and a cure, to every ValueError of this block."""
    try:
        yield
    except Indivisible as error:  # the folder is as it should be
        raise Indivisible(f"{path}: {error}") from None
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(
            f"{path}: {error} (if you did not change the file, download it again)"
        ) from None


@contextlib.contextmanager
def replacing(folder: pathlib.Path, names: Iterable[str]) -> Iterator[pathlib.Path]:
    """Makes a new folder, whose files move into `folder` at the end of the block.

    `folder` is created if needed.  If the block raises, or the process ends in it, the old files
    stay.  They are removed, and the new ones moved, in an order in which a folder with a
    config.json is complete.

    Args:
      folder: to write to.
      names: of old files that are removed, in addition to the weights and config.json; others stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        new = pathlib.Path(made)
        yield new
        files = sorted((file.name for file in new.iterdir()), key=lambda name: name == CONFIG)
        stale = [folder / name for name in (CONFIG, SINGLE, INDEX, *names)]
        for old in [*stale, *folder.glob(SHARDS)]:
            old.unlink(missing_ok=True)  # config.json first, since a folder without it cannot load
        for name in files:
            os.replace(new / name, folder / name)  # config.json last


def refuse_weights(folder: pathlib.Path, faults: list[str]) -> None:
    """Raises ValueError with the faults of a folder's tensors, if there are any."""
    if faults:
        raise ValueError(f"the weights in {folder} do not fit its config.json:\n  {listed(faults)}")


def listed(lines: list[str]) -> str:
    """Returns lines for a message, the first of them if they are many, each cut if it is long."""
    shown = [line if len(line) <= 300 else line[:300] + "..." for line in lines[:_LISTED]]
    return "\n  ".join(shown + [f"and {len(lines) - _LISTED} more"] * (len(lines) > _LISTED))


def parse_json(content: bytes, path: pathlib.Path) -> Config:
    """Returns the JSON object that `content`, a part of the file `path`, holds.

    Raises:
      ValueError: it is another value, or not JSON.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # broken UTF-8 is a ValueError too
        raise ValueError(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; download it again")
    return value


def read_json(path: pathlib.Path) -> Config:
    """Returns the JSON object in a file, or raises ValueError or OSError with its name."""
    return parse_json(read_bytes(path, most=_MOST_JSON), path)


def read_bytes(path: pathlib.Path, size: int = -1, most: int = _MOST) -> bytes:
    """Returns the bytes of a file, or its first `size` bytes.

    Raises:
      ValueError: it is a pipe or a device, which may never end, or it has more than `most` bytes.
      OSError: it is missing or cannot be read.  All errors name the file and the fix.
    """
    try:
        kind = os.stat(path)
        if not stat.S_ISREG(kind.st_mode) and not stat.S_ISDIR(kind.st_mode):
            raise ValueError(
                f"{path} is a pipe or a device; a model folder holds plain files: replace it"
            )
        if (kind.st_size if size < 0 else size) > most and stat.S_ISREG(kind.st_mode):
            raise ValueError(
                f"{path} has {kind.st_size} bytes, and at most {most} are read: it is damaged, or "
                "is no such file; download it again"
            )
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


def check_links(folder: pathlib.Path) -> None:
    """Raises ValueError for links to files outside the folder, which could expose the user's files.

    The Hub's cache keeps a model's files next to its snapshots, in `blobs`; links to there are
    allowed.

    Raises:
      ValueError: there is such a link, or one that leads nowhere.
      OSError: the folder cannot be read.
    """
    home = pathlib.Path(os.path.realpath(folder))
    homes = [home] + [home.parent.parent / "blobs"] * (home.parent.name == "snapshots")
    with os.scandir(folder) as entries:
        links = [e for e in entries if e.is_symlink() and e.name.endswith(_LINKED)]
    for entry in links:
        target = pathlib.Path(os.path.realpath(entry.path))
        if not any(target.is_relative_to(home) for home in homes):
            raise ValueError(
                f"{entry.path} is a link to {target}, which is outside its folder; specjax reads "
                "nothing outside: if you trust it, put a copy of that file in the link's place"
            )
        if not target.exists():
            raise ValueError(
                f"{entry.path} is a link that leads nowhere: download the file again, or remove it"
            )


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files with the weights, or raises ValueError or OSError with what is missing."""
    check_links(folder)
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return [single]
    if index.exists():
        files = [folder / name for name in shard_names(index)]
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise FileNotFoundError(
                f"{index} names {listed(missing) or 'no file'}: download the missing shards"
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
    """Returns the files that an index of shards names."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(map(_is_shard, names.values())):
        raise ValueError(
            f"{index}: weight_map must map the names of tensors to .safetensors files of this "
            "folder; download it again"
        )
    return sorted(set(names.values()))


def _is_shard(name: object) -> bool:
    """Returns whether a name is that of a file, without a folder."""
    return (
        isinstance(name, str)
        and name == pathlib.Path(name).name
        and name.endswith(".safetensors")
        and len(name) < 256
        and name.isprintable()
    )
