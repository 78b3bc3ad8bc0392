"""Parameters in Orbax folders: saved as they lie on their devices, restored onto any mesh.

For models that no Hugging Face family describes, and for large ones on many hosts: every host writes and reads its own
part.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from specjax.models import LinenModel
from specjax.parallel import shardings


def save_params(params: Any, folder: str | os.PathLike[str]) -> None:
    """Write parameters into a new folder; it appears when it is whole.  Raises ValueError where it exists."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder).absolute(), params)


def restore_params(
    folder: str | os.PathLike[str], model: LinenModel, mesh: Mesh | None = None
) -> Any:
    """The parameters of `model`, in its dtype.

    Args:
      folder: from `save_params`.
      model: says shapes, dtype and axes.
      mesh: to lie on, as `sharding.shardings` says; None: the default device.  Any mesh will do, whatever they were
        saved from.

    Raises:
      ValueError: the folder holds other parameters than those of the model.
      FileNotFoundError: no such folder.
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
        found = checkpointer.metadata(folder)
        found = getattr(found, "item_metadata", found)
        stored = {
            jax.tree_util.keystr(path): tuple(leaf.shape)
            for path, leaf in _leaves(dict(found or {}))
        }
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


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree)
