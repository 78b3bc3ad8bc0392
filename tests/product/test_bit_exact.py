"""A chain has the bits of plain decoding with passes as wide: its tokens and the target's cache.

Logits of a table model are exact, so only a transformer can break this.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from toys import TRANSFORMERS as toys

from specjax import Decoder, DraftModel, Match, NoProposer, Params
from specjax.proposers import Chain

GAMMA = 3  # num_drafts of "draft 3"


def transposed(params):
    """The parameters in the layout of `Transformer(transposed=True)`."""
    flat = flatten_dict(params)
    kernels = {path: flat.pop(path) for path in list(flat) if path[-1] == "kernel"}
    turned = {(*path[:-1], "weight"): kernel.T for path, kernel in kernels.items()}
    return unflatten_dict({**flat, **turned})


@functools.cache
def state_in(dtype, case):
    """The last state under `match` at temperature 1, with weights and caches in `dtype`, laid
    out as by `load`."""
    if dtype == jnp.float32:
        return toys.decoded(case, "match", 1.0)[1]
    net, proposer = toys.model(dtype=dtype), toys.CASES[case][0]
    net = dataclasses.replace(net, module=net.module.clone(transposed=True))
    if isinstance(proposer, Chain):
        proposer = DraftModel(net, toys.VOCAB, proposer.num_drafts)
    given = jax.tree.map(lambda x: x.astype(dtype), toys.params(case))
    arrays = Params(
        *(transposed(part) if part else part for part in (given.target, given.proposer))
    )
    dec = Decoder(net, proposer, Match(), (toys.EOS,), toys.CAPACITY)
    return jax.device_get(
        dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0)).replace(key=None)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bit_exact_mode(dtype):
    """A chain has the same bits as plain decoding of the same width: its tokens and the target's
    cache."""
    padded, drafted = state_in(dtype, "none padded"), state_in(dtype, "draft 3")
    assert toys.CASES["none padded"][0] == NoProposer(num_nodes=GAMMA + 1)
    assert drafted.stats.accepted.sum() > 10
    assert toys.texts(drafted) == toys.texts(padded)
    for row in range(toys.ROWS):
        pairs = zip(
            toys.committed(drafted.cache, row), toys.committed(padded.cache, row), strict=True
        )
        for actual, wanted in pairs:
            assert actual.dtype == dtype
            assert actual.tobytes() == wanted.tobytes()
