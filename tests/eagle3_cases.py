"""Decoders with the random EAGLE-3 heads of `eagle3_folders.py`."""

import functools
import warnings

import eagle3_folders
import jax
import numpy as np

import specjax
from specjax import Chain, Decoder, Params, Sampling
from specjax.rules.confidence import follow

ROWS, WIDTH, CAPACITY, DEPTH = 3, 12, 96, 3
LENGTHS = np.array([12, 5, 2], np.int32)


class Most(specjax.contract.Rule):
    """Accepts drafts that are no multiple of three."""

    exact, shared_noise = False, True

    def __call__(self, draw, proposal, tree, logits):
        return follow(draw, tree, logits, proposal.tokens % 3 > 0)


@functools.cache
def target(kind):
    return specjax.load(eagle3_folders.target(kind))


@functools.cache
def drafter(layout, *shape, **numbers):
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*norm_output=true is read as it is served")
        return specjax.load_drafter(eagle3_folders.folder(layout), loaded, *shape, **numbers)


def begun(layout, proposer, rule, prompt, lengths, capacity=CAPACITY, temperature=0.0):
    """A decoder, its parameters and its state after the prompts."""
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    arrays = Params(loaded.params, drafter(layout, Chain, num_drafts=DEPTH).arrays(loaded))
    dec = Decoder(loaded.model, proposer, rule, (), capacity)
    state = dec.prefill(
        arrays,
        prompt,
        lengths,
        limit=np.full(len(prompt), capacity, np.int32),
        sampling=Sampling.create(len(prompt), temperature),
        key=jax.random.split(specjax.make_key(0), len(prompt)),
    )
    return dec, arrays, state


def prompts(seed=0):
    return np.random.default_rng(seed).integers(1, 320, (ROWS, WIDTH)).astype(np.int32)


def texts(state):
    pairs = zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    return [row[:length].tolist() for row, length in pairs]
