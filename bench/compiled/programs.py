"""Programs of the step loop, compiled for chips that are not there.

libtpu and JAX's plugin for CUDA bring the compilers, and describe the chips.  Parameters and
state are shapes alone, so a model of any size takes no memory.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import specjax
from specjax import Decoder, LinenModel, Params, Sampling, Transformer
from specjax._internal.platforms import shapes_for
from specjax.caches import KVCache
from specjax.contract import Proposer
from specjax.decoding import RowInputs, eos_of_rows, start
from specjax.methods import PublishedSource, SharedParams, own_shardings
from specjax.models import Int8, Packed
from specjax.parallel import by_row, device_bytes, is_split, shardings
from specjax.proposers import BestFirst, ChoiceTree, Shape
from specjax.types import Arrays, DecodeState

_PROMPT = 128


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, for each device."""

    text: str
    seconds: float
    argument_bytes: int
    scratch_bytes: int
    donated_bytes: int  # of the arguments; the results are written there
    predicted_bytes: int  # by specjax, of parameters and state
    decoder: Decoder
    params: Params
    state: DecodeState


def compile_loop(
    decoder: Decoder,
    params: Params,
    devices: np.ndarray,
    rows: int,
    split_draft: LinenModel | None = None,
    options: Mapping[str, str] | None = None,
) -> Compiled:
    """Compile `Decoder.run` for `devices`.

    Args:
      decoder: its target is a `LinenModel`.
      params: arrays or shapes, of which only the shapes are used.  The target and a published
        drafter are split over all devices, as `load` and `load_drafter` do; each device holds the
        whole of other proposers.
      devices: of a TPU or a GPU that need not be there.
      rows: of the batch.
      split_draft: the draft model, if it is split over the devices like the target.
      options: of the compiler.
    """
    assert isinstance(decoder.target, LinenModel)
    mesh = None if len(devices) == 1 else _mesh(devices, decoder.target)
    whole: Sharding = (
        SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    )
    target = _shapes(params.target, whole)
    if mesh is not None:
        target = _split(params.target, decoder.target, mesh)
    drafting = _shapes(params.proposer, whole)
    if mesh is not None and split_draft is not None:
        drafting = _split(params.proposer, split_draft, mesh)
    shared = 0
    if isinstance(params.proposer, SharedParams):  # parts of the target are the target's arrays
        own, parts = drafting.own, {name: target[name] for name in drafting.target}
        if mesh is not None:
            own = jax.tree.map(_shape, own, own_shardings(_source(decoder.proposer), own, mesh))
        drafting = SharedParams(own, parts)
        shared = sum(map(_bytes_on_a_device, jax.tree.leaves(drafting.target)))
    elif params.proposer is params.target:  # it drafts for itself
        drafting, shared = target, sum(map(_bytes_on_a_device, jax.tree.leaves(target)))
    params = Params(target, drafting)
    platform = "tpu" if devices[0].platform == "tpu" else "gpu"
    with shapes_for(platform):
        state = _laid(shape_of_state(decoder, params, rows, mesh), mesh, whole)
    began = time.perf_counter()
    with shapes_for(platform):
        lowered = decoder.lower(params, state, platform)
    compiled = lowered.compile({**(options or {})})
    seconds = time.perf_counter() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None  # of an accelerator's program
    held = sum(map(_bytes_on_a_device, jax.tree.leaves(params))) - shared
    return Compiled(
        text,
        seconds,
        memory.argument_size_in_bytes - shared,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        held + device_bytes(state, mesh),
        decoder,
        params,
        state,
    )


def _source(proposer: Proposer) -> PublishedSource:
    assert isinstance(proposer, Shape | ChoiceTree | BestFirst)
    source = proposer.source
    assert isinstance(source, PublishedSource)  # those have `SharedParams`
    return source


def _mesh(devices: np.ndarray, target: LinenModel) -> Mesh:
    """All devices along `model`, or along `kv_copies` those that exceed the target's key heads."""
    assert isinstance(target.module, Transformer)
    model = math.gcd(len(devices), target.module.config.num_kv_heads)
    return Mesh(devices.reshape(1, model, -1), ("data", "model", "kv_copies"))


def _split(params: Arrays, model: LinenModel, mesh: Mesh) -> Arrays:
    """Shapes of parameters that are split over a mesh, in int8 and packed too.

    Raises:
      ValueError: a group of inputs of a packed matrix would lie on two devices, or is not in order.
    """

    def split(leaf: Arrays, at: NamedSharding) -> Arrays:
        if isinstance(leaf, Packed):
            return _split_packed(leaf, at)
        if not isinstance(leaf, Int8):
            return _shape(leaf, at)
        (inner, outer) = (*at.spec, None, None)[:2]  # of the kernel [in, out]
        values = _shape(leaf.values, NamedSharding(mesh, PartitionSpec(outer, inner)))
        scale = _shape(leaf.scale, NamedSharding(mesh, PartitionSpec(outer)))
        return dataclasses.replace(leaf, values=values, scale=scale)

    at = shardings(model, mesh)
    return jax.tree.map(split, params, at, is_leaf=lambda leaf: isinstance(leaf, Int8 | Packed))


def _split_packed(leaf: Packed, at: NamedSharding) -> Packed:
    """Shapes of a packed matrix, whose codes are [..., groups, inputs of a group, out]."""
    turned, axes = leaf.turned, [*at.spec, *[None] * (leaf.ndim - len(at.spec))]
    mine = at.shard_shape(leaf.shape)[-2 if turned else -1]
    if mine < leaf.inputs and (leaf.order is not None or mine % min(leaf.group, leaf.inputs)):
        ordered = ", in an order of their own" * (leaf.order is not None)
        raise ValueError(
            f"a packed matrix cannot be split over so many chips: a group has {leaf.group} inputs, "
            f"and a chip would hold {mine}{ordered}"
        )
    *stack, inner, outer = axes if turned else [*axes[:-2], axes[-1], axes[-2]]
    many = leaf.scales.shape[-2] > 1
    codes = (inner, None, outer) if many else (None, inner, outer)

    def put(part: Any, *axes: str | None) -> Any:
        at_axes = NamedSharding(at.mesh, PartitionSpec(*axes))
        return None if part is None else _shape(part, at_axes)

    beside = *stack, inner if many else None, outer
    return dataclasses.replace(
        leaf,
        codes=put(leaf.codes, *stack, *codes),
        scales=put(leaf.scales, *beside),
        zeros=put(leaf.zeros, *beside),
        whole=put(leaf.whole, *stack, None, outer),
        order=put(leaf.order),
    )


def _shapes(arrays: Arrays, at: Sharding) -> Arrays:
    return jax.tree.map(lambda x: _shape(x, at), arrays)


def _shape(x: Arrays, at: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)


def shape_of_state(decoder: Decoder, params: Params, rows: int, mesh: Mesh | None) -> DecodeState:
    """What `prefill` returns."""

    placed = mesh, is_split(params.target), is_split(params.proposer)

    def begin(params: Params, prompt: Arrays, length: Arrays, key: Arrays) -> DecodeState:
        limit = jnp.full(rows, decoder.capacity)
        lookahead = jnp.full(rows, decoder.proposer.max_depth, jnp.int32)
        sampling = Sampling.create(rows, temperature=0.7)
        ends = eos_of_rows([decoder.eos] * rows)
        inputs = RowInputs(prompt, length, limit, lookahead, sampling, key, None, ends)
        return start(decoder, placed, params, inputs)

    prompt = jax.ShapeDtypeStruct((rows, min(_PROMPT, decoder.capacity)), jnp.int32)
    length = jax.ShapeDtypeStruct((rows,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.split(specjax.make_key(0), rows))
    return jax.eval_shape(begin, params, prompt, length, key)


def _laid(state: DecodeState, mesh: Mesh | None, whole: Sharding) -> DecodeState:
    """The state with the shardings that `prefill` gives it."""

    def at(leaf: Arrays) -> Arrays:
        rows = whole if mesh is None else by_row(mesh)
        if not isinstance(leaf, KVCache):
            return _shape(leaf, rows)
        heads = leaf.sharding or rows
        keys, values, length = (
            _shapes(part, at)
            for part, at in ((leaf.keys, heads), (leaf.values, heads), (leaf.length, rows))
        )
        return dataclasses.replace(leaf, keys=keys, values=values, length=length)

    return jax.tree.map(at, state, is_leaf=lambda x: isinstance(x, KVCache))


def _bytes_on_a_device(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape)) * jax.dtypes.itemsize_bits(leaf.dtype) // 8  # int4 has half a byte
