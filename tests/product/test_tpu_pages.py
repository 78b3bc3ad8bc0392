"""The kernels for pages on a TPU, in Pallas's interpreter, beside the plain path.

`tests/process/tpu/test_pages.py` compiles them for a TPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.caches import CACHE_DTYPES, Pages, pages, stored
from specjax.models import attend

pytestmark = pytest.mark.xdist_group("tpu pages")  # a share takes all of them, or none

COUNT = 20
"""Pages of a pool."""


def drawn(rows: int, width: int, heads: int, groups: int, dim: int, page: int, many: int, dtype):
    """Queries, keys, values, a table, and a mask such as that of a tree behind a text."""
    random = np.random.default_rng(width)
    shapes = (rows, width, heads * groups, dim), *2 * [(COUNT, heads, page, dim)]
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    table = random.permutation(np.arange(1, COUNT))[: rows * many].reshape(rows, many)
    visible = random.random((rows, width, many * page)) < 0.5
    visible[:, :, page * (many - 1) :] = False
    visible[:, :, page + 3] = True
    visible[0, :, :page] = False  # a window: the first page is behind it
    return *arrays, jnp.asarray(table, jnp.int32), jnp.asarray(visible)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "softcap", "sunk"),
    [((2, 5, 2, 4, 64, 16, 6), None, False), ((3, 9, 1, 4, 128, 64, 4), 5.0, True)],
)
def test_attention_is_that_of_the_plain_path(sizes, softcap, sunk, dtype):
    query, keys, values, table, visible = drawn(*sizes, dtype)  # pyright: ignore
    sinks = jnp.linspace(-1, 1, query.shape[2]) if sunk else None
    assert kernels.takes_pages_on_tpu(query, keys, values)
    scale = query.shape[3] ** -0.5
    rest = table, visible, scale, softcap, sinks, True
    made = kernels.few_queries_of_pages_on_tpu(query, keys, values, *rest)
    held = Pages(keys, table), Pages(values, table)
    plain = attend(query, *held, visible, scale, softcap, sinks)
    most = 1e-6 if dtype == "float32" else 0.01
    np.testing.assert_allclose(made.astype(float), plain.astype(float), atol=most)
    # The bits of a query depend neither on other queries nor on where its pages lie.
    alone = kernels.few_queries_of_pages_on_tpu(
        query[:, 1:2], keys, values, table, visible[:, 1:2], *rest[2:]
    )
    np.testing.assert_array_equal(alone, made[:, 1:2])
    order = np.random.default_rng(0).permutation(COUNT)
    moved = kernels.few_queries_of_pages_on_tpu(
        query, keys[order], values[order], jnp.asarray(np.argsort(order), jnp.int32)[table],
        *rest[1:],
    )  # fmt: skip
    np.testing.assert_array_equal(moved, made)


@pytest.mark.parametrize("kind", [None, *CACHE_DTYPES])
@pytest.mark.parametrize("latent", [False, True])
def test_pages_of_8_bits_and_of_latent_vectors_are_those_of_the_plain_path(latent, kind):
    """Latent vectors are the values and a part of the keys, and are read once for both."""
    query, keys, values, table, visible = drawn(2, 3, 1, 6, 32, 16, 4, "float32")
    if kind is not None:
        keys, values = (stored(x, CACHE_DTYPES[kind]) for x in (keys, values))
    turned = jnp.flip(query, 2)
    queries, pools = (query, turned) if latent else query, (values, keys) if latent else keys
    given = None if latent else values
    assert kernels.takes_pages_on_tpu(queries, pools, given)
    for width in (1, 3):
        some = jax.tree.map(lambda x, width=width: x[:, :width], queries)
        rest = table, visible[:, :width], 0.2
        made = kernels.few_queries_of_pages_on_tpu(some, pools, given, *rest, interpret=True)
        held = jax.tree.map(lambda x: Pages(x, table), pools)
        mine = held[0] if latent else Pages(values, table)
        plain = attend(some, held, mine, visible[:, :width], 0.2)
        assert made.dtype == plain.dtype == query.dtype
        np.testing.assert_allclose(made, plain, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *CACHE_DTYPES])
@pytest.mark.parametrize(("width", "page"), [(1, 32), (5, 16), (40, 32)])
def test_tokens_are_written_into_their_pages(width, page, dtype):
    """Also where a row has no page, and behind the end of its table; the page 0 stays."""
    random, rows, many = np.random.default_rng(width), 3, 3
    kind = jnp.dtype(CACHE_DTYPES.get(dtype, dtype))
    pool = stored(jnp.asarray(random.normal(size=(COUNT, 2, page, 64))), kind)
    pool = jnp.where(jnp.arange(COUNT)[:, None, None, None] == 0, jnp.zeros((), kind), pool)
    new = stored(jnp.asarray(random.normal(size=(rows, 2, width, 64))), kind)
    table = random.permutation(np.arange(1, COUNT))[: rows * many].reshape(rows, many)
    table[0, 1:] = 0
    start = jnp.asarray([page - 1, page * many - 2, page], jnp.int32)
    given = pool, new, jnp.asarray(table, jnp.int32), start
    assert kernels.writes_pages_on_tpu(pool, new)
    made = kernels.write_pages_on_tpu(*given, interpret=True)
    assert made.dtype == kind
    np.testing.assert_array_equal(made.astype(float), pages._scatter(*given).astype(float))


def test_what_the_kernels_do_not_take():
    """Keys and values of two dtypes, 16-bit integers, and more queries than fit a chip's memory."""
    query, keys, values, *_ = drawn(1, 2, 1, 2, 16, 16, 2, "float32")
    assert not kernels.takes_pages_on_tpu(query, keys, values.astype(jnp.int8))
    wide = jnp.zeros((1, 8192, 2, 16))
    assert not kernels.takes_pages_on_tpu(wide, keys, values)
    assert not kernels.takes_pages_on_tpu((query, query), keys, values)
    assert not kernels.writes_pages_on_tpu(keys.astype(jnp.int16), keys[:1].astype(jnp.int16))
    # Pages of many heads, and long chunks of a prompt: compiled for a v5e they do not fit.
    many, few = (jax.ShapeDtypeStruct((4, heads, 128, 128), "float32") for heads in (64, 8))
    for pool, taken in ((many, False), (few, True)):
        query = jax.ShapeDtypeStruct((1, 4, pool.shape[1], 128), "float32")
        assert kernels.takes_pages_on_tpu(query, pool, pool) == taken  # pyright: ignore
    new = jax.ShapeDtypeStruct((1, 32, 1024, 128), "float32")
    wide = jax.ShapeDtypeStruct((4, 32, 64, 128), "float32")
    assert not kernels.writes_pages_on_tpu(wide, new)  # pyright: ignore
