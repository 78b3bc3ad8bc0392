"""Steps of a small model whose keys and values are in pages, compiled for chips that are not there.

`tests/process/tpu` and `tests/process/gpu` look for pages that such a program gathers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import specjax
from bench.compiled.hlo import parse
from bench.compiled.programs import shape_of_state
from bench.compiled.sizes import shapes_of
from specjax import Decoder, Params, TransformerConfig
from specjax._internal.platforms import shapes_for
from specjax.caches import in_pages, pools_of, with_pages
from specjax.models import Latent

CONFIG = TransformerConfig(
    vocab_size=1024, hidden_size=512, mlp_size=1024, num_layers=2, num_heads=8, num_kv_heads=2,
    head_dim=64, max_positions=2048, tied_embeddings=False,
)  # fmt: skip
ROWS, CAPACITY, POOL = 4, 1024, 41
LATENT = Latent(kv_rank=256, nope_dim=64, rope_dim=64, value_dim=64)


def compiled_with_pages(
    proposer: str,
    devices: np.ndarray,
    page: int,
    dtype: str,
    cache_dtype: str | None = None,
    latent: bool = False,
) -> str:
    """Returns the program of a decoding loop over `POOL` pages.

    Args:
      proposer: "none", or "tree" for a tree of a draft model like the target.
      devices: one, of a TPU or a GPU.
      page: the tokens of a page.
      dtype: of the weights and the pages.
      cache_dtype: of the pages, where it is another.
      latent: with latent attention.
    """
    specjax.clear_programs()  # another kernel leaves the structure as it was
    platform = "tpu" if devices[0].platform == "tpu" else "gpu"
    mixers = (LATENT,) * CONFIG.num_layers if latent else ()
    config = dataclasses.replace(CONFIG, mixers=mixers)
    target = shapes_of(config, dtype, devices)
    model = dataclasses.replace(target.model, cache_dtype=cache_dtype)
    target = dataclasses.replace(target, model=model)
    made: Any = specjax.NoProposer()
    if proposer == "tree":
        made = specjax.DraftTree(target.model, CONFIG.vocab_size, (2, 2))
    decoder = Decoder(target.model, made, specjax.Match(), (2,), CAPACITY)
    params = Params(target.params, target.params if proposer == "tree" else None)

    def paged(state: Any) -> Any:
        pools = pools_of(state, page, POOL)
        slots = max(leaf.shape[2] for leaf in state.cache.keys)
        return with_pages(in_pages(state, page, -(-slots // page)), pools)

    with shapes_for(platform):
        state = jax.eval_shape(paged, shape_of_state(decoder, params, ROWS, None))
    at = SingleDeviceSharding(devices[0])
    params, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), (params, state)
    )
    with shapes_for(platform):
        text = decoder.lower(params, state, platform).compile().as_text()
    assert text is not None
    return text


OF_A_SLOT = CONFIG.num_kv_heads * CONFIG.head_dim
"""The numbers of the keys of a token in one layer."""


def gathered_pages(text: str, page: int, size: int = OF_A_SLOT) -> list[str]:
    """Returns the instructions of a program that read whole pages out of a pool into an array.

    The pool has `size` numbers for a token.
    """
    of_page = page * size
    found = []
    for computation in parse(text).computations.values():
        for one in computation.instructions:
            if one.opcode not in ("gather", "dynamic-slice"):
                continue
            pool = computation.by_name[one.operands[0]].shapes
            sizes = [math.prod(array.sizes) for array in (*pool, *one.shapes)]
            if sizes[0] == POOL * of_page and sizes[1] >= of_page:
                found.append(one.line.strip())
    return found


def copied_pools(text: str, page: int, size: int = OF_A_SLOT) -> list[str]:
    """Returns the instructions of a program that copy a whole pool, of `size` numbers a token."""
    size *= POOL * page
    return [
        one.line.strip()
        for _, one in parse(text).executed()
        if one.opcode in ("copy", "copy-start") and math.prod(one.shapes[0].sizes) == size
    ]
