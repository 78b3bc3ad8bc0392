"""Several devices and several processes: sharding of arrays, and checks of free memory."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.parallel.memory import device_bytes, devices_of, fits, mesh_holding, require
    from specjax.parallel.meshes import alike, described, make_mesh, parse_mesh
    from specjax.parallel.processes import join_from, leaving, links
    from specjax.parallel.sharding import (
        RULES,
        TRAINING_RULES,
        Indivisible,
        Rules,
        Shardings,
        Specs,
        by_row,
        constrain_like,
        fitted,
        is_split,
        layout,
        leader,
        mesh_of,
        module_shardings,
        named_shardings,
        put,
        replicate,
        row_parts,
        shard_pages,
        shard_params,
        shard_state,
        shardings,
        to_host,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "RULES",
    "TRAINING_RULES",
    "Indivisible",
    "Rules",
    "Shardings",
    "Specs",
    "alike",
    "by_row",
    "constrain_like",
    "described",
    "device_bytes",
    "devices_of",
    "fits",
    "fitted",
    "is_split",
    "join_from",
    "layout",
    "leader",
    "leaving",
    "links",
    "make_mesh",
    "mesh_holding",
    "mesh_of",
    "module_shardings",
    "named_shardings",
    "parse_mesh",
    "put",
    "replicate",
    "require",
    "row_parts",
    "shard_pages",
    "shard_params",
    "shard_state",
    "shardings",
    "to_host",
]
