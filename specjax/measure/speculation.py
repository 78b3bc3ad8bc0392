"""Measures speculation on prompts with the real decoder: counts per prompt and per depth."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.decoding import Decoder
from specjax.parallel import mesh_of, row_parts, to_host
from specjax.sampling import Sampling, make_key
from specjax.types import DecodeState, Params

_SMALLEST_WIDTH = 16


@struct.dataclass
class Counts:
    """Counts per row; D is the proposer's greatest depth."""

    passes: Array  # [B] passes of the target
    emitted: Array  # [B] new tokens
    tested: Array  # [B, D] verified drafts of each depth: those whose parents were accepted
    accepted: Array  # [B, D] accepted drafts of each depth


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of `measure`, in the order of the prompts."""

    counts: Counts  # NumPy arrays, a row for each prompt
    seconds: np.ndarray  # [B] time of prefill and decoding, an equal part of its batch's
    batch: np.ndarray  # [B] the number of its batch, whose prompts were timed together
    tokens: list[list[int]]  # the new tokens


def width_for(prompts: Sequence[Sequence[int]]) -> int:
    """Returns the length of the longest prompt, rounded up to a power of two."""
    return max(_SMALLEST_WIDTH, 1 << (max(map(len, prompts)) - 1).bit_length())


def pad(prompts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids [B, width], padded on the right, and lengths [B]."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def count_steps(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, Counts]:
    """Runs `decoder.run`, and counts drafts and tokens."""
    rows, depth = len(state.length), decoder.proposer.max_depth

    def step(carry: tuple[DecodeState, Counts]) -> tuple[DecodeState, Counts]:
        before, counts = carry
        after, info = decoder.step(params, before)
        index = jnp.arange(depth)
        inside = index < info.count[:, None]  # drafts after an EOS or a limit do not count
        asked = jax.vmap(tree.asked)(info.proposal.parent, info.path, info.num_accepted)
        tested = asked[:, :depth] & inside
        accepted = (index < info.num_accepted[:, None]) & inside
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
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    batch: int,
    settings: Mapping[str, float],
    seed: int,
) -> Measured:
    """Continues each prompt by `new_tokens`, with `batch` prompts at a time.

    Args:
      decoder, params: the decoder and its arrays.
      prompts: token ids.
      new_tokens: the most new tokens per prompt.
      batch: rows of a batch; on a mesh, rounded up to a multiple of the parts of its rows.
      settings: `temperature`, `top_k` and so on, as `Sampling.create` takes them.
      seed: seed of the sampling; a prompt's noise depends on it and on the prompt's number.
    """
    width, parts = min(width_for(prompts), decoder.capacity), row_parts(mesh_of(params.target))
    batch = -(-batch // parts) * parts
    keys = jax.vmap(lambda n: jax.random.fold_in(make_key(seed), n))(jnp.arange(len(prompts)))
    counts, seconds, tokens = [], [], []
    for first in range(0, len(prompts), batch):
        # A last batch that is not full is filled with the first prompts, to avoid a compilation.
        numbers = np.arange(first, first + batch) % len(prompts)
        padded, lengths = pad([prompts[n] for n in numbers.tolist()], width)
        began = time.perf_counter()
        state = decoder.prefill(
            params,
            padded,
            lengths,
            limit=lengths + np.int32(new_tokens),
            sampling=Sampling.create(batch, **settings),
            key=keys[numbers],
        )
        state, batch_counts = jax.block_until_ready(count_steps(decoder, params, state))
        rows = min(batch, len(prompts) - first)
        seconds += [(time.perf_counter() - began) / rows] * rows
        counts.append(jax.tree.map(lambda x, rows=rows: x[:rows], to_host(batch_counts)))
        written, ends = to_host((state.tokens, state.length))
        tokens += [written[row, lengths[row] : ends[row]].tolist() for row in range(rows)]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *counts)
    return Measured(joined, np.array(seconds), np.arange(len(prompts)) // batch, tokens)
