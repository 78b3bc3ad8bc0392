"""Several devices and several processes: sharding of arrays, and checks of free memory."""

from specjax.parallel.memory import check_memory, device_bytes, devices_of, mesh_holding, require
from specjax.parallel.meshes import alike, described, make_mesh, parse_mesh
from specjax.parallel.outcomes import Foresight
from specjax.parallel.overlap import Overlapped, check_meshes, overlapped
from specjax.parallel.overlap_steps import OverlapState
from specjax.parallel.processes import add_process_arguments, join_from, leaving
from specjax.parallel.sharding import (
    RULES,
    TRAINING_RULES,
    Indivisible,
    Rules,
    beside,
    by_row,
    fitted,
    hold,
    is_split,
    lay,
    layout,
    leader,
    mesh_of,
    module_shardings,
    named_shardings,
    put,
    row_parts,
    shardings,
    spread,
    to_host,
)
from specjax.parallel.sides import UnreadCache

__all__ = [
    "RULES",
    "TRAINING_RULES",
    "Foresight",
    "Indivisible",
    "OverlapState",
    "Overlapped",
    "Rules",
    "UnreadCache",
    "add_process_arguments",
    "alike",
    "beside",
    "by_row",
    "check_memory",
    "check_meshes",
    "described",
    "device_bytes",
    "devices_of",
    "fitted",
    "hold",
    "is_split",
    "join_from",
    "lay",
    "layout",
    "leader",
    "leaving",
    "make_mesh",
    "mesh_holding",
    "mesh_of",
    "module_shardings",
    "named_shardings",
    "overlapped",
    "parse_mesh",
    "put",
    "require",
    "row_parts",
    "shardings",
    "spread",
    "to_host",
]
