"""Parameters in Orbax folders: saved with their sharding, restored onto any mesh.

They are for models of no Hugging Face family, and for large models on many hosts, because every
host writes and reads its own shards.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from specjax._internal.extras import need
from specjax.models import LinenModel
from specjax.parallel import shardings
from specjax.types import Weights


def save_params(params: object, folder: str | os.PathLike[str]) -> None:
    """Writes parameters into a new folder, atomically.  Raises ValueError if it exists."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder).absolute(), params)


def restore_params(
    folder: str | os.PathLike[str], model: LinenModel, mesh: Mesh | None = None
) -> Weights:
    """Restores the parameters of `model`, in its dtype.

    Args:
      folder: from `save_params`.
      model: gives shapes, dtype and axes.
      mesh: shards the parameters with `sharding.shardings`; None: the default device.  It need not
        be the mesh that they were saved from.

    Raises:
      ValueError: the parameters in the folder are not those of the model.
      FileNotFoundError: there is no such folder.
    """
    import orbax.checkpoint as ocp

    folder = pathlib.Path(folder).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; pass one that specjax.files.orbax.save_params has written"
        )
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if mesh is None:
        here = SingleDeviceSharding(jax.devices()[0])
        placed = jax.tree.map(lambda _: here, shapes)
    else:
        placed = shardings(model, mesh)
    wanted = jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(s.shape, model.dtype, sharding=at), shapes, placed
    )
    with ocp.StandardCheckpointer() as checkpointer:
        stored = stored_shapes(folder)
        needed = {jax.tree_util.keystr(path): leaf.shape for path, leaf in _leaves(wanted)}
        if stored != needed:
            other = sorted(
                name for name in {*stored, *needed} if stored.get(name) != needed.get(name)
            )
            faults = [
                f"{name}: {stored.get(name, 'nothing')} instead of {needed.get(name, 'nothing')}"
                for name in other
            ]
            raise ValueError(
                f"{folder} holds parameters of another model:\n  " + "\n  ".join(faults)
            )
        return checkpointer.restore(folder, wanted)


def is_orbax(folder: pathlib.Path) -> bool:
    """Returns whether Orbax wrote a tree of arrays into this folder."""
    return (folder / "_METADATA").is_file()


def stored_shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array that Orbax wrote into a folder, by its path in the tree.

    Raises:
      ValueError: Orbax cannot read the folder.
    """
    need("orbax", f"reading {folder}", "train")
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(folder.absolute())
    except Exception as error:  # Orbax, tensorstore and the system raise different types
        raise ValueError(f"{folder} cannot be read by Orbax: {error}") from error
    metadata = getattr(metadata, "item_metadata", metadata)  # it depends on Orbax's version
    return {
        jax.tree_util.keystr(path): tuple(leaf.shape)
        for path, leaf in _leaves(dict(metadata or {}))
        if hasattr(leaf, "shape")
    }


def restore_part(folder: pathlib.Path, wanted: Any) -> Any:
    """Returns the arrays of a folder that `wanted` names, a tree of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: Orbax cannot read them.
    """
    import orbax.checkpoint as ocp

    how = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(folder.absolute(), args=how)
    except Exception as error:  # Orbax, tensorstore and the system raise different types
        raise ValueError(f"{folder} cannot be restored by Orbax: {error}") from error


def _leaves(tree: object) -> list[tuple[jax.tree_util.KeyPath, Array]]:
    return jax.tree_util.tree_leaves_with_path(tree)
