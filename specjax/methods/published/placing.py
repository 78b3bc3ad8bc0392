"""Reads a drafter's own parameters in the dtype of its target, onto the target's mesh."""

from __future__ import annotations

import pathlib
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from specjax._internal.checks import reworded
from specjax.contract import Proposer
from specjax.files import read_rows, refuse_weights, row_faults
from specjax.methods.published.drafter import (
    PublishedDrafter,
    PublishedSource,
    own_shardings,
    sizes_of,
)
from specjax.methods.published.format import Tensors
from specjax.models import LanguageModel, Tensor
from specjax.parallel import Rules, described, mesh_of, replicate


class Table(NamedTuple):
    """The location of a drafter's own parameters in a folder."""

    rows: list[Tensor]
    shapes: dict[tuple[str, ...], tuple[int, ...]]  # of each parameter
    stored: Tensors  # those that are read
    to_draft: np.ndarray | None  # [V], of a reduced vocabulary

    def check(self, folder: pathlib.Path) -> None:
        """Raises ValueError with every tensor that is missing, unknown or of another shape."""
        refuse_weights(folder, row_faults(self.rows, self.shapes, self.stored))


def read_drafter(
    folder: pathlib.Path,
    proposer: Proposer,
    source: PublishedSource,
    table: Table,
    target: LanguageModel,
    rules: Rules,
    shares: tuple[str, ...] = (),
) -> PublishedDrafter:
    """Reads the parameters of a source, in the target's dtype, on each device its own shard.

    Args:
      folder: of the drafter.
      proposer: over the source.
      source: names the axes of its parameters.
      table: where the parameters are.
      target: gives the dtype and the mesh, if it is on one.
      rules: as for `parallel.shardings`.
      shares: of the target's "embedding" and "head", those that the drafter uses.

    Raises:
      ValueError: as `read_rows`, or the mesh does not divide a dimension.
    """
    dtype, mesh, placed = target.params["embedding"].dtype, mesh_of(target.params), None
    rows, shapes, stored, to_draft = table
    if mesh is not None:
        leaves = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes.items()}
        with reworded(f"{folder} on {described(mesh)}: "):
            at = own_shardings(source, unflatten_dict(leaves), mesh, rules)
        placed = cast(dict[tuple[str, ...], NamedSharding], flatten_dict(at))
    own = read_rows(folder, rows, shapes, stored, dtype, placed)
    if to_draft is not None:
        own["to_draft"] = replicate(jnp.asarray(to_draft), mesh)
    return PublishedDrafter(
        proposer=proposer,
        params=own,
        name=folder.name,
        source=source,
        shares=shares,
        sizes=sizes_of(target, folder.name),
        rules=rules,
    )
