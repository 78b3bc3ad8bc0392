"""The layers of a plain transformer in one call, for few tokens on one CPU.

XLA plans some forty operations for a layer, and lets threads meet after each.  For a small model
that takes a third of a step, and most of what it compiles.  `specjax.kernels.whole_layers` has the
layers of a network, if they are of the most common kind: RMS norms before attention and a gated
MLP, both with matrices in float32, bfloat16, int8 or as codes, and one cache in float32, of slots
or pages; or with all of these in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import kernels
from specjax._internal.platforms import on_cpu
from specjax.caches import KVCache, PagedCache
from specjax.models.attention import cpu_attend
from specjax.models.config import TransformerConfig
from specjax.models.int8 import Int8, cpu_int8_dot_general
from specjax.models.packed import Packed, codings
from specjax.models.products import cpu_dot_general

_STORED = {
    ("kernel", "float32"): "float32",
    ("kernel", "bfloat16"): "bfloat16_columns",
    ("weight", "bfloat16"): "bfloat16",
}
"""The names that `kernels.LayersForm` has for matrices that are arrays, by `Dense`'s name of their
layout and their dtype.
"""

_ACTIVATIONS = ("silu", "gelu_tanh")
_MATRICES = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
}


def form_of_layers(
    c: TransformerConfig,
    product: Callable[..., Array],
    attend: Callable[..., Array],
    layers: Sequence[Mapping[str, Any]],
    x: Array,
    cache: object,
    normed: bool = True,
) -> kernels.LayersForm | None:
    """Returns the form in which the kernel of whole layers runs these layers; None: it does not.

    Args:
      c: the configuration of the layers.
      product, attend: as in `Transformer`.
      layers: the parameters of each.
      x: [B, N, E], the stream before them.
      cache: of the layers.
      normed: as in `kernels.LayersForm`.
    """
    if attend is not cpu_attend or product not in (cpu_dot_general, cpu_int8_dot_general):
        return None
    if type(cache) not in (KVCache, PagedCache):
        return None
    assert isinstance(cache, KVCache)
    if cache.sharding is not None or not _plain(c, len(layers)):
        return None
    held = [
        _matrix(layer.get(part, {}).get(name, {}))
        for layer in layers
        for part, names in _MATRICES.items()
        for name in names
    ]
    kinds = {_kind(*matrix) for matrix in held}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    layouts: tuple[kernels.Coding, ...] = ()
    if kind == "codes":
        each = len(kernels.MATRICES)
        packed: list[Any] = [matrix for _, matrix in held]
        of_layers = {_codings_of(packed[i : i + each]) for i in range(0, len(held), each)}
        layouts = of_layers.pop()
        if of_layers or not layouts:
            return None
    leaves = jax.tree.leaves(list(map(dict, layers)), is_leaf=_is_matrix)
    numbers = [leaf for leaf in leaves if not _is_matrix(leaf) and leaf.ndim == 1]
    form = kernels.LayersForm(
        kind, c.head_dim, c.activation, normed, c.qkv_bias, c.qk_norm == "head",
        c.attention_softcap is not None, cache.page if isinstance(cache, PagedCache) else None,
        layouts,
    )  # fmt: skip
    if any(leaf.dtype != form.dtype for leaf in (x, *cache.keys, *cache.values, *numbers)):
        return None
    rows = math.prod(x.shape[:2])
    if x.shape[1] > cache.capacity:
        return None
    sizes = c.hidden_size, c.mlp_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return form if kernels.takes_layers(form, rows, len(layers) * c.hidden_size, *sizes) else None


def _matrix(held: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the name and the value of a linear map's matrix; "" and None if it has none."""
    found = ((name, held[name]) for name in ("kernel", "weight") if name in held)
    return next(found, ("", None))


def _kind(name: str, matrix: object) -> str | None:
    """Returns the name that `kernels.LayersForm` has for a matrix; None: it has none."""
    if isinstance(matrix, Int8 | Packed):
        return ("int8" if isinstance(matrix, Int8) else "codes") if name == "kernel" else None
    if isinstance(matrix, jax.Array) and (name, matrix.dtype.name) in _STORED:
        return _STORED[name, matrix.dtype.name]
    return None


def _is_matrix(leaf: object) -> bool:
    return isinstance(leaf, (Int8, Packed))


def _codings_of(matrices: Sequence[Packed]) -> tuple[kernels.Coding, ...]:
    """Returns the layouts of matrices for the kernel of layers; () if it does not take them."""
    found = []
    for packed in matrices:
        coding = next(codings(packed), None)
        plain = packed.order is packed.whole is None and not packed.in_groups
        # A kernel that does not round activations would need rounded ones.
        if coding is None or not plain or (packed.rounds and not coding.rounded):
            return ()
        found.append(coding)
    return tuple(found)


def reads_bfloat16(c: TransformerConfig) -> bool:
    """Returns whether layers that compute in float32 read matrices in bfloat16 with the kernel."""
    return kernels.widens_columns() and _plain(c, c.num_layers)


def _plain(c: TransformerConfig, count: int) -> bool:
    """Returns whether all layers are of the kind that the kernel has."""
    rope = c.rope_of(0)
    each = all(
        c.norm_order_of(i) == "pre"
        and c.branch_of(i) == "both"
        and c.mixer_of(i) is None
        and not c.is_sparse(i)
        and c.owner_of(i) == i
        and c.rope_of(i) == rope
        and c.window_of(i) is None
        and c.mlp_size_of(i) == c.mlp_size
        for i in range(count)
    )
    return (
        each
        and rope is not None
        and rope.turned(c.head_dim) > 0
        and not rope.growth
        and not c.interleaved
        and c.norm == "rms"
        and (c.qk_norm is None or (c.qk_norm == "head" and not c.qk_norm_last))
        and c.gated
        and c.activation in _ACTIVATIONS
        and c.gate_limit is None
        and c.branch_scale == c.gate_scale == c.down_scale == 1.0
        and not (
            c.out_bias or c.output_gate or c.mlp_bias or c.value_norm or c.sinks
            or c.per_layer_size or c.layer_scale
        )
    )  # fmt: skip


def run_whole_layers(
    form: kernels.LayersForm,
    c: TransformerConfig,
    layers: Sequence[Mapping[str, Any]],
    x: Array,
    positions: Array,
    cache: KVCache,
    mask: Array | None,
    read: Array | None = None,
) -> tuple[list[Array], KVCache]:
    """Runs layers of a form, as `transformer.run_layers` does, in a program for a CPU.

    Args:
      form: as `form_of_layers` returned it for the arguments that have the same names.
      positions, mask: as in `contract.Model.apply`.
      read: [B, N, F], what attention reads, if the form is not `normed`.
    """
    rope = c.rope_of(0)
    assert rope is not None
    # Layers one by one take positions [1, N] of all rows, and the kernel reads those of each row.
    positions = jnp.broadcast_to(positions, x.shape[:2])
    cosines, sines = rope.rotations(positions, c.head_dim, held=True)[:2]
    visible = cache.layer(0).visible(positions, mask)
    scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
    numbers = scale, c.attention_softcap or 0.0, c.norm_eps, c.norm_offset
    counts = None  # of tokens before the padding, as `contract.Model.apply` says
    if len(x) == 1 and x.shape[1] > kernels.MOST_TOKENS and mask is None:
        counts = 1 + (jnp.diff(positions) > 0).sum(1, dtype=jnp.int32)
    given = [
        {**_arguments(layer), "keys": keys, "values": values}
        for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True)
    ]
    wide = x.astype(jnp.float32)
    streams, written = kernels.whole_layers(
        form, wide, wide if read is None else read.astype(jnp.float32), (cosines, sines), visible,
        cache.length, given, c.num_heads, numbers, counts,
        cache.table if isinstance(cache, PagedCache) else None,
    )  # fmt: skip
    keys, values = zip(*written, strict=True)
    if counts is not None:
        computed = (jnp.arange(x.shape[1]) < counts[:, None])[..., None]
        streams = [jnp.where(computed, stream, 0.0) for stream in streams]
    streams = [x, *(stream.astype(x.dtype) for stream in streams)]
    return streams, dataclasses.replace(cache, keys=keys, values=values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def together_or_apart(
    together: Callable[..., Any], apart: Callable[..., Any], *operands: Any
) -> Any:
    """Runs `together` in a program for a CPU and `apart` elsewhere; derivatives are of `apart`."""
    return on_cpu(together, apart, *operands)


@together_or_apart.defjvp
def _(
    together: Callable[..., Any], apart: Callable[..., Any], primals: Any, tangents: Any
) -> tuple[Any, Any]:
    del together
    return jax.jvp(apart, primals, tangents)


def _arguments(layer: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the parameters of a layer by the names of `kernels.LayersForm`."""
    found: dict[str, Any] = {}
    for part, names in _MATRICES.items():
        for name in names:
            _, matrix = _matrix(layer[part][name])
            if isinstance(matrix, Int8):
                found[name], found[f"{name}_scale"] = matrix.values, matrix.scale
            elif isinstance(matrix, Packed):
                held = {"": matrix.codes, "_scale": matrix.scales, "_zero": matrix.zeros}
                found |= {name + part: each for part, each in held.items() if each is not None}
            else:
                found[name] = matrix
            if "bias" in layer[part][name]:
                found[f"{name}_bias"] = layer[part][name]["bias"]
    for name in ("q_norm", "k_norm"):
        if name in layer["attention"]:
            found[name] = layer["attention"][name]["weight"]
    for name in ("attention_norm", "mlp_norm"):
        if name in layer:
            found[name] = layer[name]["weight"]
    return found
