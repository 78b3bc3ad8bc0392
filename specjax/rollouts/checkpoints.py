"""`Checkpoint`: the weights of a model at one time, in a model's folder or in one of Orbax."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from specjax._internal.checks import settle
from specjax.files import CONFIG, is_orbax, load, read_outline, restore_part, stored_shapes
from specjax.models import LanguageModel
from specjax.parallel import mesh_of
from specjax.text import vocabulary_digest
from specjax.types import Weights

_STATE, _ITEM = "state", "default"
"""The folders of a run's checkpoints, and of what Orbax wrote in one of them."""

_OWN, _AVERAGED = "params", "ema"
"""The weights in the state of a run, and their moving average, which is preferred."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The place of some weights; nothing is read before `weights`."""

    name: str
    path: pathlib.Path | str
    orbax: bool = False  # weights alone, as Orbax writes them

    def mark(self) -> str:
        """Returns a hash of the names, sizes and times of its files: other weights have another."""
        path = pathlib.Path(self.path)
        found = hashlib.blake2b(digest_size=12)
        found.update(self.name.encode() if not path.exists() else b"")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                facts = file.stat()
                found.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        return found.hexdigest()

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError for weights of another model or another tokenizer than the target's."""
        settle(
            (
                target.keeps_bfloat16,
                f"{target.name} keeps matrices in bfloat16, which would round the weights of "
                f"{self.name}; load it without keep_bfloat16=True",
            )
        )
        if self.orbax:
            self._subtree(target)
            return
        outline = read_outline(self.path)
        config = _config(target)
        if config is not None and outline.config != config:
            fields = [
                field.name
                for field in dataclasses.fields(config)
                if getattr(outline.config, field.name, None) != getattr(config, field.name)
            ]
            raise ValueError(
                f"{self.name} is another model than {target.name}: its {', '.join(fields)} "
                "differ; pass checkpoints of one model"
            )
        words = outline.tokenizer, target.tokenizer
        digests = {vocabulary_digest(each) for each in words if each is not None}
        if len(digests) > 1:
            raise ValueError(
                f"{self.name} has another tokenizer than {target.name}; pass checkpoints whose "
                "tokens have the same ids"
            )

    def weights(self, target: LanguageModel) -> Weights:
        """Reads the weights, laid out as the target's.

        Raises:
          ValueError: they are not weights of the target, or cannot be read.
          OSError: a file is missing.
        """
        if not self.orbax:
            mesh = mesh_of(target.params)
            return load(self.path, target.model.dtype, mesh=mesh).params
        subtree, tied = self._subtree(target)

        def part(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        own = dict(target.params)
        head = own.pop("head") if tied else None
        wanted: Any = jax.tree.map(part, own)
        path = pathlib.Path(self.path)
        if subtree is None:
            made = restore_part(path, wanted)
        else:
            made = restore_part(path, {subtree: wanted})[subtree]
        if head is not None:
            # `load` holds a second copy of a tied embedding on a CPU.
            made["head"] = jax.tree.map(lambda _: made["embedding"].T, head)
        return made

    def _subtree(self, target: LanguageModel) -> tuple[str | None, bool]:
        """Returns where the weights are in the tree, and whether the output matrix is not there."""
        stored = stored_shapes(pathlib.Path(self.path))
        found = (name for name in (_AVERAGED, _OWN) if any(x.startswith(_at(name)) for x in stored))
        subtree = next(found, None)
        before = "" if subtree is None else _at(subtree)
        stored = {x.removeprefix(before): s for x, s in stored.items() if x.startswith(before)}
        leaves = jax.tree_util.tree_leaves_with_path(target.params)
        needed = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
        tied = getattr(_config(target), "tied_embeddings", False)
        lacks_head = tied and not any(name.startswith(_at("head")) for name in stored)
        if lacks_head:
            needed = {x: s for x, s in needed.items() if not x.startswith(_at("head"))}
        if stored != needed:
            other = sorted(x for x in {*stored, *needed} if stored.get(x) != needed.get(x))
            raise ValueError(
                f"{self.name} holds weights of another model than {target.name}: {other[0]} is "
                f"{stored.get(other[0], 'not there')} instead of "
                f"{needed.get(other[0], 'not there')}; pass --target with the folder of its model"
            )
        return subtree, lacks_head and any(x == "head" for x in target.params)


def _config(target: LanguageModel) -> Any:
    """Returns the sizes and switches of a model of this library; None of another one."""
    return getattr(getattr(target.model, "module", None), "config", None)


def _at(name: str) -> str:
    return f"['{name}']"


def find_checkpoints(paths: Sequence[str | os.PathLike[str]]) -> list[Checkpoint]:
    """Returns the checkpoints of some folders, in this order.

    Args:
      paths: of each, the folder of a model, `org/name` on the Hub, a folder that Orbax wrote, or
        the folder of a run, whose kept steps are taken in ascending order.

    Raises:
      ValueError: a folder is none of these, or there is no checkpoint.

    Example:
      >>> from specjax.rollouts import find_checkpoints
      >>> [found.name for found in find_checkpoints([specjax.shipped("tiny/target")])]
      ['target']
    """
    found = [each for path in paths for each in _checkpoints_of(path)]
    if not found:
        raise ValueError("no checkpoint was named; pass at least one folder")
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        found = [dataclasses.replace(each, name=str(each.path)) for each in found]
    return found


def _checkpoints_of(given: str | os.PathLike[str]) -> list[Checkpoint]:
    path = pathlib.Path(given)
    if not path.is_dir():  # a GGUF file, or a name on the Hub
        return [Checkpoint(path.name if path.exists() else str(given), _path(given))]
    if (path / CONFIG).exists() or [*path.glob("*.gguf")]:
        return [Checkpoint(path.name, path)]
    for folder in (path, path / _ITEM):
        if is_orbax(folder):
            return [Checkpoint(path.name, folder, orbax=True)]
    home = path / _STATE if (path / _STATE).is_dir() else path
    steps = sorted(int(each.name) for each in home.iterdir() if each.name.isdigit())
    made = [
        Checkpoint(f"{path.name}/{step}", folder, orbax=True)
        for step in steps
        for folder in (home / str(step), home / str(step) / _ITEM)
        if is_orbax(folder)
    ]
    if made:
        return made
    raise ValueError(
        f"{path} is no checkpoint: pass the folder of a model ({CONFIG} and weights), a folder "
        "that Orbax wrote, or the folder of a run with its steps"
    )


def _path(given: str | os.PathLike[str]) -> pathlib.Path | str:
    """Returns a path, or the name on the Hub as it is."""
    return pathlib.Path(given) if pathlib.Path(given).exists() else str(given)
