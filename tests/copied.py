"""Which buffers of a cache a compiled step copies."""

from __future__ import annotations

import re

import jax.numpy as jnp
from toys import Toys

from specjax.decoding.decoder import _run
from specjax.parallel.sharding import layout


def check_copies(toys: Toys, case: str) -> None:
    """No buffer of keys or values, also of the draft, is copied to change a slot."""
    dec, arrays = toys.decoder(case, "match"), toys.params(case)
    state = toys.prefill(dec, arrays, rows=[0])
    program = _run.lower(dec, layout(state), arrays, state, jnp.int32(9)).compile().as_text()
    caches = [
        cache
        for cache in (state.cache, getattr(state.proposer, "cache", None))
        if cache is not None
    ]
    shapes = {",".join(map(str, leaf.shape)) for cache in caches for leaf in cache.keys}
    assert all(f"f32[{shape}]" in program for shape in shapes)
    for shape in shapes:
        assert re.findall(rf"= f32\[{shape}\]\S* copy\(", program) == []
