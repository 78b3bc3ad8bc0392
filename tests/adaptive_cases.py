"""An `Adaptive` proposer of a lookup and a draft, its parameters, and rates for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from toys import TABLES as toys

from specjax import NGram, Params
from specjax.proposers import MEASURED, PAUSE, Adaptive, AdaptiveParams
from specjax.proposers.adaptive.rates import Rates

WIDTHS = (1, 2, 4)
LOOKUP, DRAFT = NGram(3, min_ngram=1), toys.CASES["draft 3"]
PROPOSER = Adaptive(LOOKUP, DRAFT[0], WIDTHS)


def arrays(seconds=(1.0,) * 5, forced=MEASURED, prior=(0.5, 0.4)):
    own = AdaptiveParams(
        None, DRAFT[1], jnp.array(seconds, jnp.float32), jnp.array(forced, jnp.int32),
        jnp.array(prior, jnp.float32), jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip
    return Params(toys.weights(), own)


@functools.partial(jax.jit, static_argnums=1)
def _judged(counts, depth, together):
    start = Rates.start(len(counts), depth, jnp.float32(0.5))
    counted = dataclasses.replace(
        start,
        recent=jnp.broadcast_to(counts[:, None], start.recent.shape),
        by_depth=jnp.broadcast_to(counts[:, None], start.by_depth.shape),
    )
    nothing = jnp.zeros(len(counts), jnp.int32)
    return counted.after(nothing, nothing, jnp.float32(0.5), together)


def judged(accepted, of=99.0, depth=3, together=False):
    """Rates of rows with so many accepted drafts, by every window and at each depth."""
    counts = np.array([[of, each] for each in np.asarray(accepted)], np.float32)
    return jax.device_get(_judged(counts, depth, np.array(together)))
