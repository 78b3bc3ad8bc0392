"""The common functions of inexact rules, which accept drafts by their probability under the target.

These rules use the warped distribution.  So a draft that the settings exclude is never accepted,
and greedy decoding stays greedy: at temperature 0 the target's best token has all the mass.

These rules share their noise with the proposer, and after a rejection the next token is the
target's own draw, as under `match`.  So a better draft model changes the distribution less, and a
perfect one does not change it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax._internal.checks import number, shown
from specjax.contract import Draw
from specjax.tree import Tree
from specjax.types import ABSENT, Proposal, Verdict


def check_fraction(**values: object) -> None:
    """Raises ValueError for NaN or a value outside [0, 1]; of an array it names the first one."""
    for name, value in values.items():
        # A rule is a pytree: JAX builds it again from tracers and from arrays on a device, which
        # the host must not wait for.  `Decoder.prefill` brings the numbers of a rule to the host.
        if not isinstance(value, int | float | np.ndarray | np.generic):
            continue
        for each in np.ravel(value).tolist():
            plain = number(each)
            if plain is None or not 0 <= plain <= 1:
                raise ValueError(f"{name}={shown(each)} is not allowed; it must lie in [0, 1]")


def confidence(proposal: Proposal, probs: Array) -> Array:
    """[N] the target's probability of each draft, from `probs` [N, V]; 0 for absent nodes."""
    drafted = probs[jnp.maximum(proposal.parent, 0), proposal.tokens]
    return jnp.where(proposal.parent == ABSENT, 0, drafted)


def follow(draw: Draw, tree: Tree, logits: Array, kept: Array) -> Verdict:
    """Accepts the longest path whose drafts are all `kept` [N]; then emits the target's own draw.

    Of several longest paths, the one with the lowest node index is accepted.
    """
    kept = kept.at[0].set(True)
    all_kept = (kept | ~tree.ancestors).all(-1)  # on the path to each node
    node = sampling.argmax(jnp.where(all_kept, tree.depth, -1))
    noise = draw.noise(node[None], tree.depth[node][None])[0]
    return Verdict(node, sampling.argmax(logits[node] + noise))
