"""Makes meshes of devices, parses them from an option, and fits them to a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from specjax._internal import kept_programs
from specjax._internal.platforms import Device

_AXES = ("data", "fsdp", "model", "kv_copies")


def make_mesh(
    data: int = 1,
    model: int | None = None,
    devices: Sequence[Device] | None = None,
    *,
    fsdp: int = 1,
    kv_copies: int = 1,
) -> Mesh:
    """Makes a mesh with axes `data` (rows of a batch) and `model` (shards of a layer).

    It has the axes `fsdp` and `kv_copies` too, if they are not 1.

    Args:
      data: devices along `data`.
      model: devices along `model`; by default all remaining devices.
      devices: by default all devices of all processes.
      fsdp: devices along `fsdp`, for training: rows are split along it as along `data`, and so are
        parameters.
      kv_copies: devices that hold the same key and value heads, while everything else is split over
        `model` times `kv_copies` devices.  A model of 8 key heads on 16 devices: `model=8,
        kv_copies=2`.

    Raises:
      ValueError: the product is not the number of devices.

    Example:
      >>> import jax
      >>> mesh = specjax.make_mesh(data=1, model=1, devices=jax.devices()[:1])
      >>> target = specjax.load(specjax.shipped("tiny/target"), mesh=mesh)
      >>> mesh.axis_names
      ('data', 'model')
    """
    devices = list(jax.devices() if devices is None else devices)
    model = max(len(devices) // (data * fsdp * kv_copies), 1) if model is None else model
    if data * fsdp * model * kv_copies != len(devices):
        asked = f"data={data} times " + f"fsdp={fsdp} times " * (fsdp != 1) + f"model={model}"
        asked += f" times kv_copies={kv_copies}" * (kv_copies != 1)
        count = len({device.process_index for device in devices})
        raise ValueError(
            f"{asked} is not the number of devices, "
            f"{len(devices)}{f' in {count} processes' * (count > 1)}: pass factors of it, or "
            "devices="
        )
    if len(devices) > 1 and devices[0].platform == "cpu":
        kept_programs.stop()
    sizes = {"data": data, "fsdp": fsdp, "model": model, "kv_copies": kv_copies}
    optional = ("fsdp", "kv_copies")
    sizes = {name: size for name, size in sizes.items() if name not in optional or size != 1}
    # Passed explicitly, because the default of axis_types differs between versions of jax.
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes along which XLA splits arrays by itself, as all code here expects.

    In newer versions of jax `jax.make_mesh` makes explicit axes.  Along these every operation would
    have to say how its result is split.

    Example:
      >>> import jax
      >>> explicit = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])
      >>> set(automatic(explicit).axis_types) == {jax.sharding.AxisType.Auto}
      True
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if tuple(mesh.axis_types) == types:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def parse_mesh(text: str) -> dict[str, int]:
    """Parses "data=2,fsdp=2,model=2" into arguments of `make_mesh`, or raises ValueError.

    Example:
      >>> parse_mesh("data=2,model=4")
      {'data': 2, 'model': 4}
    """
    sizes = {name: size for name, _, size in (part.partition("=") for part in text.split(","))}
    if not sizes.keys() <= set(_AXES) or not all(
        size.isdecimal() and int(size) for size in sizes.values()
    ):
        raise ValueError(
            f"{text!r}: it must look like data=2,model=4, numbers of devices along "
            f"{', '.join(_AXES)}"
        )
    return {name: int(size) for name, size in sizes.items()}


def with_kv_copies(mesh: Mesh, num_kv_heads: int) -> Mesh:
    """Returns the same devices for a model with fewer key heads than devices along `model`.

    With 2 key heads, `model=8` becomes `model=2, kv_copies=4`: everything but the key and
    value heads is split over 8 devices as before, and each device holds one key head instead of
    both.

    Args:
      mesh: stays as it is if it has an axis `kv_copies`, if the devices along `model` divide the
        key heads, or if no smaller number of them does.
      num_kv_heads: of the model.
    """
    parts = mesh.shape.get("model", 1)
    heads = math.gcd(parts, num_kv_heads)
    if heads in (1, parts) or "kv_copies" in mesh.shape:
        return mesh
    at = mesh.axis_names.index("model")
    sizes, names, types = list(mesh.devices.shape), list(mesh.axis_names), list(mesh.axis_types)
    sizes[at : at + 1] = heads, parts // heads
    names.insert(at + 1, "kv_copies")
    types.insert(at + 1, types[at])
    return Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=tuple(types))


def alike(one: Mesh, other: Mesh) -> bool:
    """Returns whether two meshes are the same, apart from `kv_copies`."""
    return one == other or (
        _merged(one) == _merged(other)
        and one.devices.flatten().tolist() == other.devices.flatten().tolist()
    )


def _merged(mesh: Mesh) -> dict[str, int]:
    """Returns the sizes, with `kv_copies` as a factor of `model`."""
    sizes = dict(mesh.shape)
    copies = sizes.pop("kv_copies", 1)
    return {**sizes, "model": sizes.get("model", 1) * copies}


def described(mesh: Mesh | None) -> str:
    """Describes a mesh in a message: "the mesh data=2, model=4 of the devices 0 ... 7"."""
    if mesh is None:
        return "no mesh"
    ids = [device.id for device in mesh.devices.flat]
    listed = ", ".join(map(str, ids)) if len(ids) < 5 else f"{ids[0]} ... {ids[-1]}"
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"the mesh {sizes} of the devices {listed}"
