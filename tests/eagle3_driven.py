"""EAGLE-3 heads driven as a greedy decoder does, over random features, beside a reference.

The reference (`eagle3_reference.Reference`) reads the same files by their published names, and
computes everything again for every token.
"""

from __future__ import annotations

import functools

import eagle3_folders
import eagle3_reference
import jax
import jax.numpy as jnp
import numpy as np
from eagle3_cases import CAPACITY, DEPTH, LENGTHS, ROWS, WIDTH, drafter, prompts, target

from specjax import Chain
from specjax.contract import Context
from specjax.types import Block

STEPS = ((3, 0, 1), (1, 3, 0), (0, 2, 3))
"""How many of its drafts each row accepts in a step."""


class Reference(eagle3_reference.Reference):
    """The reference of a layout, whose features are given."""

    def __init__(self, layout, features):
        head, _, midlayer, kind = eagle3_folders.LAYOUTS[layout]
        super().__init__(head, head.tensors(1, midlayer), kind)
        self.features_of = lambda tokens: np.float64(features[: len(tokens)])


def features(layout, rows=ROWS):
    """[rows, CAPACITY, sum E] of any target."""
    size = eagle3_folders.SIZE * len(eagle3_folders.LAYOUTS[layout][0].taps)
    return np.random.default_rng(7).standard_normal((rows, CAPACITY, size), np.float32)


@functools.cache
def driven(proposer):
    """The functions of a proposer, compiled; they are called as a greedy decoder does."""

    def propose(params, state, pending):
        context = Greedy(pending, None, lambda logits, path: logits, True, False, None)
        return proposer.propose(params, state, context)

    init = jax.jit(lambda params, block: proposer.start(params, block, CAPACITY))
    return init, jax.jit(propose), jax.jit(proposer.observe)


class Greedy(Context):
    """Draws the most likely drafts."""

    def noise(self, node, depth):
        return jnp.zeros((len(self.pending), len(node), 1))


def begun(layout, proposer, texts, given, width=WIDTH):
    """The parameters and the state after texts, each without its last token."""
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    params = drafter(layout, Chain, num_drafts=DEPTH).arrays(loaded)
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = text[:-1]
    count = np.array([len(text) - 1 for text in texts], np.int32)
    block = Block(tokens, given[:, :width], count, given[:, :width])
    return params, driven(proposer)[0](params, block)


def committed(texts, new, given):
    """The block of what the target reads when `new` follows the texts: their last tokens, and all
    new ones but the last."""
    tokens = np.zeros((len(texts), DEPTH + 1), np.int32)
    rows = np.zeros((len(texts), DEPTH + 1, given.shape[-1]), np.float32)
    for row, (text, more) in enumerate(zip(texts, new, strict=True)):
        tokens[row, : len(more)] = [text[-1], *more[:-1]]
        rows[row] = given[row, len(text) - 1 :][: DEPTH + 1]
    count = np.array([len(more) for more in new], np.int32)
    return Block(tokens, rows, count, rows)


def run(layout, texts, given):
    """Texts after `STEPS`, the drafts of each step with the texts before it, and the last state."""
    proposer = drafter(layout, Chain, num_drafts=DEPTH).proposer
    _, propose, observe = driven(proposer)
    params, state = begun(layout, proposer, texts, given)
    seen = []
    for counts in (*STEPS, None):
        pending = np.array([text[-1] for text in texts], np.int32)
        proposal, state = propose(params, state, pending)
        drafts = np.asarray(proposal.tokens)[:, 1:].tolist()
        present = (np.asarray(proposal.parent)[:, 1:] >= 0).tolist()
        seen.append((texts, drafts, present))
        if counts is None:
            return texts, seen
        new = [[*row[:n], 1 + (7 * n + len(text)) % 300]
               for row, n, text in zip(drafts, counts, texts, strict=True)]  # fmt: skip
        state = observe(params, state, committed(texts, new, given))
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
    raise AssertionError


def asked(seed=0):
    return [row[:length].tolist() for row, length in zip(prompts(seed), LENGTHS, strict=True)]


def check(layout):
    """Over several blocks, of which rows accept none, some and all of their drafts."""
    given = features(layout)
    _, seen = run(layout, asked(), given)
    for before, drafts, present in seen:
        assert np.all(present)
        assert drafts == [
            Reference(layout, rows).drafts(text, DEPTH)
            for text, rows in zip(before, given, strict=True)
        ]
