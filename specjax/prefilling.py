"""From prompts to the first state of a decoder: one program reads, another makes the state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.caches import empty_cache, read_prompt
from specjax.logprobs import Logprobs
from specjax.parallel import spread
from specjax.processors import Processors
from specjax.types import ABSENT, Block, DecodeState, Stats


def eos_of_rows(ids: Iterable[Iterable[int]]) -> np.ndarray:
    """The token ids that end each row, as [B, ids] int32 padded with ABSENT; up to four ids are one shape."""
    rows = [sorted(set(row)) for row in ids]
    width = -(-max(4, *map(len, rows)) // 4) * 4
    return np.array([[*row, *[ABSENT] * (width - len(row))] for row in rows], np.int32)


def start(decoder, placed, params, prompt, prompt_length, *given):
    """Two programs.  The first reads the prompt, and is the same for every proposer without taps."""
    mesh, split_target, _ = placed
    ahead = max(decoder.proposer.num_nodes, decoder.proposer.scratch)
    shape = (decoder.capacity, ahead), decoder.proposer.taps
    read = _read_prompts(
        decoder.target, shape, (mesh, split_target), params.target, prompt, prompt_length
    )
    *seen, cache = read
    return _begin(decoder, placed, cache, params.proposer, seen, prompt, prompt_length, *given)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read_prompts(target, shape, placed, params, prompt, prompt_length):
    """The hidden states [B, P, E] of the prompt, its features, and the cache without its last token.

    The hidden states are returned even where no proposer looks at them.  Otherwise XLA would leave
    out what only they need, and would compile the rest of the last layer to other roundings.
    """
    (sizes, taps), (mesh, split) = shape, placed
    prompt = spread(prompt, mesh, False)
    # Behind the last committed slot there is room to stage a proposal, or the padded prompt.
    cache = spread(empty_cache(target, len(prompt), *sizes), mesh, split)
    hidden, features, cache = read_prompt(target, params, prompt, prompt_length - 1, cache, taps)
    return spread(hidden, mesh, False), spread(features, mesh, False), spread(cache, mesh, split)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _begin(decoder, placed, cache, params, seen, prompt, prompt_length, *given):
    """The state of rows whose prompts the target has read; `params` are the proposer's."""
    (hidden, features), (limit, num_drafts, sampling, key, processors, eos, rule) = seen, given
    rows, width = prompt.shape
    mesh, split_target, split_proposer = placed
    prompt = spread(prompt, mesh, False)
    tokens = jnp.zeros((rows, decoder.capacity + decoder.proposer.max_depth + 1), jnp.int32)
    zero = jnp.zeros(rows, jnp.int32)
    own, size = decoder.logits_processor is not None, decoder.target.vocab_size
    if own or processors is not None:
        processors = (processors or Processors()).begin(prompt, prompt_length, size, own)
    top = decoder.num_logprobs
    state = DecodeState(
        tokens=tokens.at[:, :width].set(prompt),
        length=prompt_length,
        limit=limit,
        num_drafts=num_drafts,
        done=prompt_length >= limit,
        cache=cache,
        proposer=None,
        rule=rule,
        key=key,
        sampling=sampling,
        eos=eos,
        processors=processors,
        logprobs=None if top is None else Logprobs.zeros(rows, tokens.shape[1], top),
        stats=Stats(zero, zero, zero, zero, zero),
    )
    block = Block(prompt, hidden, prompt_length - 1, features)
    begun = decoder.proposer.init(params, block, decoder.capacity)
    return dataclasses.replace(
        spread(state, mesh, split_target), proposer=spread(begun, mesh, split_proposer)
    )
