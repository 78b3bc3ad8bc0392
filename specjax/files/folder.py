"""The files of a model folder: their names, and reading them with clear errors."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterable, Iterator

from specjax._internal.checks import settle, shown
from specjax._internal.fields import Kind, parse_object
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
_GGUF = ".gguf"

OTHER_FORM = "pass another quantisation of the model, or the unquantised checkpoint"
"""What cures packed weights that are not read."""

_LINKED = (".json", ".safetensors", ".jinja", _GGUF)


@contextlib.contextmanager
def named(
    path: pathlib.Path, cure: str = "if you did not change the file, download it again"
) -> Iterator[None]:
    """Adds the name of the file or folder, and a cure, to every ValueError of this block.

    A KeyError becomes a ValueError that names the missing field.
    """
    try:
        yield
    except Indivisible as error:  # the folder is as it should be
        raise Indivisible(f"{path}: {error}") from None
    except (ValueError, KeyError) as error:
        text = f" lacks {error}" if isinstance(error, KeyError) else f": {error}"
        if str(path) not in text and not text.startswith(f": {path.parent}"):
            text = f"{path}{text} ({cure})"
        raise ValueError(text.removeprefix(": ")) from None


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


def refuse_quantised(folder: pathlib.Path, quantisation: object) -> None:
    """Raises ValueError if a configuration describes a quantisation of the weights."""
    if quantisation:
        named = isinstance(quantisation, dict) and quantisation.get("quant_method")
        method = f" of the method {shown(named)}" if named else ""
        raise ValueError(
            f"{folder} is quantised (quantization_config{method}); pass the unquantised checkpoint"
        )


def refuse_pickled(folder: pathlib.Path) -> None:
    """Raises ValueError if a folder without safetensors holds pickled weights."""
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({pickled[0].name}) only, and reading those executes "
            "what they contain; save them again with save_pretrained(safe_serialization=True), or "
            'convert them: python -c "import torch, safetensors.torch as s; '
            f"w = torch.load('{pickled[0]}', weights_only=True); "
            "s.save_file({n: t.clone().contiguous() for n, t in w.items()}, "
            f"'{folder / SINGLE}')\""
        )


def refuse_weights(folder: pathlib.Path, faults: list[str], target: str | None = None) -> None:
    """Raises ValueError with the faults of a folder's tensors, if there are any.

    `target` is the name of the model that they also have to fit.
    """
    if faults:
        models = "" if target is None else f" and the target {target}"
        raise ValueError(
            f"the weights in {folder} do not fit its config.json{models}:\n  {listed(faults)}"
        )


def listed(lines: list[str]) -> str:
    """Returns lines for a message, the first of them if they are many, each cut if it is long."""
    shown = [line if len(line) <= 300 else line[:300] + "..." for line in lines[:_LISTED]]
    return "\n  ".join(shown + [f"and {len(lines) - _LISTED} more"] * (len(lines) > _LISTED))


def read_json(path: pathlib.Path) -> Config:
    """Returns the JSON object in a file, or raises ValueError or OSError with its name."""
    return parse_object(read_bytes(path, most=_MOST_JSON), path)


def read_bytes(path: pathlib.Path, size: int = -1, most: int = _MOST) -> bytes:
    """Returns the bytes of a file, or its first `size` bytes.

    Raises:
      ValueError: it is a pipe or a device, which may never end, or it has more than `most` bytes.
      OSError: it is missing or cannot be read.  All errors name the file and the fix.
    """
    try:
        kind = os.stat(path)
        is_file = stat.S_ISREG(kind.st_mode)
        settle(
            (
                not is_file and not stat.S_ISDIR(kind.st_mode),
                f"{path} is a pipe or a device; a model folder holds plain files: replace it",
            ),
            (
                is_file and (kind.st_size if size < 0 else size) > most,
                f"{path} has {kind.st_size} bytes, and at most {most} are read: it is damaged, or "
                "another kind of file; download it again",
            ),
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
        inside = any(target.is_relative_to(home) for home in homes)
        if not inside or not target.exists():
            where = "leads nowhere" if inside else f"leads to {target}, outside its folder"
            cure = "download the file again, or remove it" if inside else (
                "specjax reads nothing outside. If you trust it, put a copy of that file in the "
                "link's place"
            )  # fmt: skip
            raise ValueError(f"{entry.path} is a link that {where}: {cure}")


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
    refuse_pickled(folder)
    raise FileNotFoundError(
        f"{folder} holds no {SINGLE} and no {INDEX}; if the model is published as "
        "pytorch_model.bin only, download and convert it: docs/models.md has the command"
    )


def file_of(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file that a path names, or that is the model of a folder; None: neither.

    Raises:
      ValueError: a folder holds several, and no other weights.
    """
    if folder.suffix == _GGUF and not folder.is_dir():
        return folder
    if (folder / SINGLE).exists() or (folder / INDEX).exists() or not folder.is_dir():
        return None
    with os.scandir(folder) as entries:
        files = sorted(entry.name for entry in entries if entry.name.endswith(_GGUF))
    if len(files) > 1:
        raise ValueError(
            f"{folder} holds {len(files)} GGUF files ({', '.join(files[:4])}): pass one of them; "
            "parts of one model are joined with llama.cpp's gguf-split --merge"
        )
    return folder / files[0] if files else None


def shard_names(index: pathlib.Path) -> list[str]:
    """Returns the files that an index of shards names."""
    with named(index):
        return sorted(set(_SHARDS.of("weight_map", read_json(index).get("weight_map")).values()))


def _is_map(names: object) -> bool:
    return isinstance(names, dict) and all(map(_is_shard, names.values()))


def _is_shard(name: object) -> bool:
    """Returns whether a name is that of a file, without a folder."""
    return (
        isinstance(name, str)
        and name == pathlib.Path(name).name
        and name.endswith(".safetensors")
        and len(name) < 256
        and name.isprintable()
    )


_SHARDS = Kind("a map from the names of tensors to .safetensors files of this folder", _is_map)
