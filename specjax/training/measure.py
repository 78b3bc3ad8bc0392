"""What speculation does on prompts, through the decoder that serves: per prompt, and per depth."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.decoding import Decoder
from specjax.measure import interval
from specjax.parallel import mesh_of, row_parts, to_host
from specjax.sampling import Sampling, make_key
from specjax.types import DecodeState, Params

_SMALLEST_WIDTH = 16


@struct.dataclass
class Counts:
    """What happened to each row; D is the proposer's greatest depth."""

    passes: Array  # [B] of the target
    emitted: Array  # [B] new tokens
    tested: Array  # [B, D] guesses of this depth that the target judged, that is, whose parents it had accepted
    accepted: Array  # [B, D] those of them that it accepted


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of prompts, one after the other."""

    counts: Counts  # NumPy arrays, a row for each prompt
    seconds: np.ndarray  # [B], prefill and decoding
    tokens: list[list[int]]  # the new ones


def width_for(prompts: Sequence[Sequence[int]]) -> int:
    """The power of two that holds the longest of them, so that few programs are compiled."""
    return max(_SMALLEST_WIDTH, 1 << (max(map(len, prompts)) - 1).bit_length())


def pad(prompts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, width] and lengths [B]."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def count_steps(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, Counts]:
    """`decoder.run`, and what happened in it."""
    rows, depth = len(state.length), decoder.proposer.max_depth

    def step(carry):
        before, counts = carry
        after, info = decoder.step(params, before)
        place = jnp.arange(depth)
        inside = place < info.count[:, None]  # guesses behind an end or a limit do not count
        asked = jax.vmap(tree.asked)(info.proposal.parent, info.path, info.num_accepted)
        tested = asked[:, :depth] & inside
        accepted = (place < info.num_accepted[:, None]) & inside
        return after, Counts(
            counts.passes + ~before.done,
            counts.emitted + info.count,
            counts.tested + tested,
            counts.accepted + accepted,
        )

    zero, table = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, depth), jnp.int32)
    return jax.lax.while_loop(
        lambda carry: ~carry[0].done.all(), step, (state, Counts(zero, zero, table, table))
    )


def measure(
    decoder: Decoder, params: Params, prompts: Sequence[Sequence[int]], new_tokens: int, *, batch: int,
    settings: dict[str, Any], seed: int,
) -> Measured:  # fmt: skip
    """Continue each prompt by `new_tokens`, `batch` at a time.

    Args:
      batch: on a mesh, rounded up to what divides its rows.
      settings: `temperature`, `top_k` and so on, as `Sampling.create` takes them.
      seed: a prompt's noise depends on it and on the prompt's number.
    """
    width, parts = min(width_for(prompts), decoder.capacity), row_parts(mesh_of(params.target))
    batch = -(-batch // parts) * parts
    keys = jax.vmap(lambda n: jax.random.fold_in(make_key(seed), n))(jnp.arange(len(prompts)))
    counts, seconds, tokens = [], [], []
    for first in range(0, len(prompts), batch):
        # A last batch that is not full goes round, so that it needs no program of its own.
        numbers = np.arange(first, first + batch) % len(prompts)
        padded, lengths = pad([prompts[n] for n in numbers.tolist()], width)
        began = time.perf_counter()
        state = decoder.prefill(
            params, padded, lengths, limit=lengths + np.int32(new_tokens), sampling=Sampling.create(batch, **settings),
            key=keys[numbers],
        )  # fmt: skip
        state, found = jax.block_until_ready(count_steps(decoder, params, state))
        kept = min(batch, len(prompts) - first)
        seconds += [(time.perf_counter() - began) / kept] * kept
        counts.append(jax.tree.map(lambda x, kept=kept: x[:kept], to_host(found)))
        written, ends = to_host((state.tokens, state.length))
        tokens += [written[row, lengths[row] : ends[row]].tolist() for row in range(kept)]
    return Measured(jax.tree.map(lambda *x: np.concatenate(x), *counts), np.array(seconds), tokens)


def measure_tau(
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    settings: dict[str, Any],
) -> dict[str, float]:
    """Tokens per pass of the target on prompts, with its interval: how a job validates."""
    rows = min(len(prompts), 8)
    counts = measure(
        decoder, params, prompts, new_tokens, batch=rows, settings=settings, seed=0
    ).counts
    found = interval(counts.emitted, counts.passes)
    assert found is not None
    return dict(zip(("tau", "tau_low", "tau_high"), found, strict=True))
