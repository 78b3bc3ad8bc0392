"""Logits processors and a tree below three texts.

`fixtures/transformers.npz` has the logits of every node as transformers processes them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import trees

from specjax import tree

SETTINGS = {
    "repetition": {"repetition_penalty": 1.7},
    "encouraged repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -0.4, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 2.5, 7: -4.0, 1: -np.inf}},
    "words": {"bad_words": [[2], [1, 3], [4, 4, 5], [5, 1, 2, 3, 4, 0]]},
    "least": {"min_new_tokens": 6},
    "all": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {2: 1.5, 6: -1.0},
        "bad_words": [[0], [3, 4], [1, 2, 3]],
        "min_new_tokens": 5,
    },
}
FEW = 8  # tokens of a small vocabulary, so that texts repeat themselves
PARENT = np.array([[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2, 0, 4, 0], [-1, 0, -1, 1, 0, 4, 4]])
PROMPT_LENGTH, LENGTH = np.array([4, 2, 6]), np.array([4, 5, 12])
THEIRS = tuple(name for name in SETTINGS if name not in ("presence", "frequency", "negative"))
"""The settings of which transformers has a processor."""


@functools.cache
def nodes():
    """A state of three rows in the middle of their texts, a tree below each, logits, and each
    node's text."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, FEW, (3, 20), dtype=np.int32)
    drafted = rng.integers(0, FEW, PARENT.shape, dtype=np.int32)
    drafted[:, 0] = tokens[np.arange(3), LENGTH - 1]
    logits = rng.normal(size=(*PARENT.shape, FEW)).astype(np.float32) * 3
    texts = [
        [
            tokens[row, : LENGTH[row]].tolist()
            + [int(drafted[row, m]) for m in trees.ancestors(PARENT[row], n)[1:]]
            for n in range(PARENT.shape[1])
        ]
        for row in range(3)
    ]
    path = jax.vmap(lambda t, p: tree.path_tokens(t, p, 3))(
        jnp.asarray(drafted), jnp.asarray(PARENT)
    )
    return tokens, logits, path, texts
