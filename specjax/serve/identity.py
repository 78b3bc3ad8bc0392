"""What a text depends on, as short names: the model, the request, and the tokens that were written.

Two servers with one `model_hash` give one text for one request.  So a client can go on reading from
another server, and either of them finds out where the two differ.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models import LanguageModel
from specjax.parallel import devices_of, to_host
from specjax.serve.batch import Row

_HEX = 16
"""Digits of a hash (16, which are 64 bits): chance makes two equal once in 1e19 times."""

_BLOCK = 2**22
"""Numbers that the host converts at once."""


def model_hash(target: LanguageModel) -> str:
    """Returns a hash of a model: its weights, its configuration and its tokenizer.

    It reads each weight once, where that is: on a CPU with NumPy, elsewhere with a small program
    for each shape.  The result does not depend on the platform, on a mesh, or on whether `load`
    turned a kernel round.

    Of a model over several processes all of them must call this.

    Example:
      >>> from specjax.serve.identity import model_hash
      >>> len(model_hash(specjax.load(specjax.shipped("tiny/target"))))
      16
    """
    on_host = all(device.platform == "cpu" for device in devices_of(target.params))
    wide = getattr(target.model, "dtype", None) == jnp.float32
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        turned = names[-1] == "weight" and leaf.ndim > 1
        if leaf.dtype == jnp.bfloat16 and wide:  # `load` kept it so, and computes in float32
            leaf = leaf.astype(jnp.float32)
        if turned:
            names[-1] = "kernel"
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            sums = _on_host(to_host(leaf), turned)
        else:
            sums = _on_host(leaf, turned) if on_host else np.asarray(_on_device(leaf, turned))
        shape = list(leaf.shape)
        shape[-2:] = shape[-2:][::-1] if turned else shape[-2:]
        parts.append(f"{names} {leaf.dtype.name} {shape} {sums.tolist()}")
    config = target.files.get("config.json", b"")
    if not config:  # a model of one's own; the addresses of its functions differ each time
        config = re.sub(r" at 0x[0-9a-f]+", "", repr(target.model)).encode()
    rounded = getattr(target.model, "cache_dtype", None)
    config += b"" if rounded is None else f" cache {rounded}".encode()
    words = b"" if target.tokenizer is None else target.tokenizer.to_str().encode()
    return _hashed([*(part.encode() for part in sorted(parts)), config, words])


def request_hash(rows: Iterable[Row], *more: object) -> str:
    """Returns a hash of all numbers that the texts of `rows` depend on, and of `more`."""
    parts = [repr(more).encode()]
    for row in rows:
        numbers = row.limit, row.seed
        leaves = jax.tree.leaves((row.tokens, row.sampling, row.processors, row.eos))
        parts.append(repr(numbers).encode())
        parts += [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]
    return _hashed(parts)


def tokens_hash(tokens: Sequence[int]) -> str:
    """Returns a hash of the first tokens of a text."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:_HEX]


def _hashed(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()[:_HEX]


def _factors(size: int, salt: int) -> np.ndarray:
    """Returns odd numbers [size] uint32 that look random.

    A sum of numbers times odd factors, modulo 2^32, changes if one number changes.
    """
    x = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(
        salt * 0x85EBCA6B % 2**32
    )
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x | np.uint32(1)


def _on_host(leaf: Array | np.ndarray, turned: bool) -> np.ndarray:
    """Returns two sums over the bits of an array: of each number times a factor for each axis."""
    x = np.asarray(leaf)
    x = x.astype(np.int8) if x.dtype.name in ("int4", "uint4", "float4_e2m1fn") else x
    if x.dtype.itemsize == 8:
        x = np.stack([x.view(np.uint64) & 0xFFFFFFFF, x.view(np.uint64) >> 32], -1)
    else:
        x = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    x = x.reshape(1) if x.ndim == 0 else np.swapaxes(x, -1, -2) if turned else x
    sums = []
    for salt in (1, 2):
        *rest, size = x.shape
        stack = x.reshape(-1, rest[-1] if rest else 1, size)
        made = _products(stack, _factors(size, salt)).reshape(rest)
        for axis in range(len(rest), 0, -1):
            factors = _factors(rest[axis - 1], salt + 2 * axis)
            made = (made * factors).sum(-1, dtype=np.uint32)
        sums.append(made)
    return np.array(sums, np.uint32)


def _products(stack: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Returns stack [N, A, B] times factors [B] modulo 2^32, converting a block at a time."""
    step = max(1, _BLOCK // max(1, stack.shape[-1]))
    made = np.empty(stack.shape[:-1], np.uint32)
    for matrix, row in zip(stack, made, strict=True):
        for start in range(0, len(matrix), step):
            block = matrix[start : start + step].astype(np.uint32)
            row[start : start + step] = (block * factors).sum(-1, dtype=np.uint32)
    return made


@functools.partial(jax.jit, static_argnums=1)
def _on_device(leaf: Array, turned: bool) -> Array:
    """Computes what `_on_host` does, where the array is."""
    if leaf.dtype.name in ("int4", "uint4", "float4_e2m1fn"):
        leaf = leaf.astype(jnp.int8)
    size = leaf.dtype.itemsize
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
    x = leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, kind)
    x = x.reshape(1) if x.ndim == 0 else jnp.swapaxes(x, -1, -2) if turned else x
    sums = []
    for salt in (1, 2):
        made = x.astype(jnp.uint32)
        for axis in range(x.ndim, 0, -1):
            factors = _factors(made.shape[-1], salt + (2 * axis if axis < x.ndim else 0))
            made = (made * factors).sum(-1, dtype=jnp.uint32)
        sums.append(made)
    return jnp.stack(sums)
