"""Runs the decoder layers of a network for few tokens in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.processors import processors
from specjax.kernels import available
from specjax.kernels.grouped import most_rows_of_codes
from specjax.kernels.layer_forms import LayersForm
from specjax.kernels.narrow import FEW_PROCESSORS, most_rows
from specjax.kernels.queries import LARGEST

_EACH = 16
"""The columns of matrices are a multiple of it, since parts begin at multiples."""

_PROMPT = 512
"""The most rows on a few processors with vectors of 512 bits, where a prompt of the shipped target
takes three quarters of the time that XLA takes, and one of 110M parameters about as long.  It was
measured on two: XLA's products may spread over many better than five phases that wait for one
another.
"""

_STREAMS, _SHORT = 2**24, 128
"""The most numbers of the streams that a prompt leaves behind its layers: 64 MB; and the most
rows of a pass that leaves more.
"""


def takes_layers(form: LayersForm, rows: int, streams: int, *columns: int) -> bool:
    """Returns whether `whole_layers` runs layers of this form.

    Args:
      rows: of the pass, B N.
      streams: the numbers of a row in the streams behind all layers, L E.
      columns: the sizes of all rows and columns of the matrices.
    """
    codes = [most_rows_of_codes(coding) for coding in form.codings]
    most = min(codes) if codes else most_rows(form.weight)
    wide = available.lanes() >= 16 and processors() <= FEW_PROCESSORS
    if rows * streams > _STREAMS:
        if not codes:
            most = min(most, _SHORT)
    elif wide and form.weight != "bfloat16":
        most = _PROMPT
    return (
        0 < rows <= most
        and 0 < form.dim <= LARGEST
        and all(size > 0 and size % _EACH == 0 for size in columns)
        and available.made("layers", form.weight, form) is not None
    )


def whole_layers(
    form: LayersForm,
    x: Array,
    read: Array,
    rotations: tuple[Array, Array],
    visible: Array,
    starts: Array,
    layers: Sequence[Mapping[str, Array]],
    heads: int,
    numbers: tuple[float, float, float, float],
    counts: Array | None = None,
    table: Array | None = None,
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """Runs layers in a program for one CPU.

    Args:
      form: of all layers.
      x: [B, N, E] float32, the stream before the first layer.
      read: x if the layers are `normed`, else [B, N, F], from which queries are made.
      rotations: cosines and sines [B, N, 1, R / 2] float32.
      visible: [B or 1, N, S] bool, the slots that a token attends to.
      starts: [B] int32, the slot of the first token.
      layers: by `form.names`, the parameters of each layer, and its keys and values [B, K, S, D].
      heads: H.
      numbers: the scale of scores, their softcap (or any number), eps, and what is added to the
        weights of norms.
      counts: [B] int32, from 1 to N: of one row the tokens that are computed, and the results of
        the others are arbitrary numbers; None: all.  Of several rows all are computed.
      table: [B, T] int32, the pages of each row, if keys and values are pages [P, K, page, D]; what
        belongs to a page 0, or behind the table, is not written.

    Returns:
      The stream [B, N, E] after each layer, and keys and values with the tokens staged.
    """
    target = available.made("layers", form.weight, form)
    if target is None:
        raise ValueError(f"no kernel of layers in {form.weight} on this CPU; ask `takes_layers`")
    batch, width, embed = x.shape
    first = layers[0]
    key_heads = first["keys"].shape[1]
    gate = first["gate"]
    inner = gate.shape[1 if form.by_columns else 0]
    shapes = (
        (len(layers), batch, width, embed),
        (batch, width, heads, form.dim),
        *[(batch, width, key_heads, form.dim)] * 2,
        (batch, width, heads, form.dim),
        (batch, width, embed),
        *[(batch, width, inner)] * 2,
    )
    given: list[Array] = [
        x, read, *rotations, visible, jnp.asarray(numbers, jnp.float32), starts.astype(jnp.int32),
        jnp.full(batch, width, jnp.int32) if counts is None else counts.astype(jnp.int32),
        *([] if table is None else [table.astype(jnp.int32)]),
    ]  # fmt: skip
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    aliases = {}
    for layer in layers:
        for name in form.names:
            if name in ("keys", "values"):
                aliases[len(given)] = len(results)
                results.append(jax.ShapeDtypeStruct(layer[name].shape, layer[name].dtype))
            given.append(layer[name])
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases, vmap_method="sequential")
    made = call(*given)
    caches = made[len(shapes) :]
    streams = [made[0][i] for i in range(len(layers))]
    return streams, list(zip(caches[::2], caches[1::2], strict=True))
