"""Prefilling: one program reads the prompts, and a second one makes the decoder's state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from specjax._internal import kept_programs
from specjax._internal.cuda_graphs import check_graphs
from specjax._internal.jit_cache import programs, structure_of
from specjax.caches import empty_cache, read_prompt
from specjax.contract import Cache, Model, Proposer
from specjax.decoding.inputs import RowInputs
from specjax.decoding.logprobs import Logprobs
from specjax.parallel import device_bytes, devices_of, require, row_parts, shard_state
from specjax.processors import LogitsProcessor, Processors
from specjax.types import ABSENT, ArrayTree, Block, DecodeState, Params, Stats

Placed = tuple[Mesh | None, bool, bool]
"""The mesh, and whether the parameters of the target and of the proposer are split along it."""


class Parts(Protocol):
    """The fields of a `Decoder` that prefilling needs."""

    @property
    def target(self) -> Model: ...

    @property
    def proposer(self) -> Proposer: ...

    @property
    def capacity(self) -> int: ...

    @property
    def logits_processor(self) -> LogitsProcessor | None: ...

    @property
    def num_logprobs(self) -> int | None: ...


def slots_ahead(proposer: Proposer) -> int:
    """Returns the number of cache slots that a step may write after the committed tokens."""
    return max(proposer.num_nodes, proposer.scratch)


def eos_of_rows(ids: Iterable[Iterable[int]]) -> np.ndarray:
    """Returns the token ids that end each row, as [B, ids] int32 padded with ABSENT.

    The number of ids is rounded up to a multiple of four, so that few shapes are compiled.

    Example:
      >>> specjax.eos_of_rows([[2], [0, 3]])
      array([[ 2, -1, -1, -1],
             [ 0,  3, -1, -1]], dtype=int32)
    """
    rows = [sorted(set(row)) for row in ids]
    width = -(-max(4, *map(len, rows)) // 4) * 4
    return np.array([[*row, *[ABSENT] * (width - len(row))] for row in rows], np.int32)


def start(
    decoder: Parts,
    placed: Placed,
    params: Params,
    inputs: RowInputs,
) -> DecodeState:
    """Runs both programs.

    The first program is the same for every proposer without taps.
    """
    mesh, split_target, _ = placed
    sizes, taps = (decoder.capacity, slots_ahead(decoder.proposer)), decoder.proposer.taps
    target_placed = mesh, split_target
    *states, cache = _read_prompts(
        decoder.target, (sizes, taps), target_placed, params.target, inputs.prompt,
        inputs.prompt_length,
    )  # fmt: skip
    return _begin(decoder, placed, cache, params.proposer, states, inputs)


def check_memory(decoder: Parts, placed: Placed, params: Params, inputs: RowInputs) -> None:
    """Raises ValueError for a state that cannot fit, before anything is allocated.

    The bytes needed are those of the state that `start` would return, and of the logits of one
    step, which is the least scratch memory that a step needs.  The parameters are already
    allocated.  If an array is traced, nothing is checked.

    Raises:
      ValueError: with the bytes that the state takes on a device, the bytes free, and the fix.
    """
    leaves, structure = jax.tree.flatten((params, inputs))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    shapes = tuple((x.shape, x.dtype, _on_a_mesh(x)) for x in leaves)
    rows = len(inputs.prompt)
    what = f"{rows} rows with a capacity of {decoder.capacity} tokens"
    cure = (
        "decode fewer rows at once, pass a smaller max_new_tokens (below generate: capacity), load "
        "the models in bfloat16, or split them over several devices with mesh="
    )
    needed = _needed(decoder, placed, rows, structure, shapes)
    devices = devices_of(params.target)
    check_graphs(devices)
    require(needed, devices, what, cure)


def _on_a_mesh(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh.

    It is None for a host array and for one on a single device: both give the same trace.
    """
    at = getattr(x, "sharding", None)
    return at if isinstance(at, NamedSharding) else None


@functools.lru_cache(maxsize=256)
def _needed(
    decoder: Parts,
    placed: Placed,
    rows: int,
    structure: Hashable,  # a PyTreeDef
    shapes: tuple[tuple[tuple[int, ...], Any, NamedSharding | None], ...],
) -> int:
    """`shapes` has the shape, the dtype and the place of each leaf."""
    made = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in shapes)
    place = kept_programs.place_of("bytes", decoder, placed, rows, structure, made)
    if (kept := kept_programs.read(place)) is not None:
        return int(kept)
    params, inputs = jax.tree.unflatten(structure, made)
    # The call of `start` that follows reuses this trace.
    state = jax.eval_shape(functools.partial(start, decoder, placed), params, inputs)
    mesh, split_target, _ = placed
    logits = rows * decoder.proposer.num_nodes * decoder.target.vocab_size * 4
    needed = device_bytes(state, mesh) + logits // (
        1 if mesh is None else mesh.size if split_target else row_parts(mesh)
    )
    kept_programs.write(place, str(needed).encode())
    return needed


@programs(static=3, shape=lambda params, prompt, length: prompt.shape)
def _read_prompts(
    target: Model,
    shape: tuple[tuple[int, int], tuple[int, ...]],
    placed: tuple[Mesh | None, bool],
    params: ArrayTree,
    prompt: Array | np.ndarray,
    prompt_length: Array | np.ndarray,
) -> tuple[Array, Array | None, Cache]:
    """Reads the prompts without their last tokens.

    Args:
      shape: ((capacity, slots for staged tokens), taps).
      placed: the mesh, and whether the parameters are split along it.

    Returns:
      The last hidden states [B, P, E], those after the layers in `taps` [B, P, sum E] or None, and
      the cache.  The last hidden states are returned even if no proposer reads them.  Otherwise XLA
      would leave out operations that only they need, and the rest of the last layer would round
      differently.
    """
    (sizes, taps), (mesh, split) = shape, placed
    prompt = shard_state(jnp.asarray(prompt), mesh, False)
    count = jnp.asarray(prompt_length) - 1
    # The slots after the committed ones are for a staged proposal, or for the padded prompt.
    cache = shard_state(empty_cache(target, len(prompt), *sizes), mesh, split)
    hidden, features, cache = read_prompt(target, params, prompt, count, cache, taps)
    return (
        shard_state(hidden, mesh, False),
        shard_state(features, mesh, False),
        shard_state(cache, mesh, split),
    )


def begin(decoder: Parts, cache: Cache, proposer: ArrayTree, inputs: RowInputs) -> DecodeState:
    """Returns the state of rows whose prompts have been read elsewhere, on one device.

    Args:
      decoder: reads no prompt.
      cache: of the target, with the prompts but their last tokens committed.
      proposer: the state of the proposer after these prompts.
      inputs: of the rows.
    """
    return dataclasses.replace(_of_rows(decoder, None, cache, inputs), proposer=proposer)


def _kind(cache: object, params: object, states: object, inputs: RowInputs) -> tuple[object, ...]:
    looked_up = None if inputs.documents is None else inputs.documents.shape
    processors = structure_of(inputs.processors)
    return inputs.prompt.shape, inputs.eos.shape, processors, looked_up


@programs(static=2, shape=_kind, donate=(2,))
def _begin(
    decoder: Parts,
    placed: Placed,
    cache: Cache,
    params: ArrayTree,
    states: list[Array | None],
    inputs: RowInputs,
) -> DecodeState:
    """Returns the state of rows whose prompts the target has read.

    `params` are the proposer's.  `states` are the hidden states that `_read_prompts` returns.
    """
    hidden, features = states
    assert hidden is not None
    mesh, split_target, split_proposer = placed
    state = _of_rows(decoder, mesh, cache, inputs)
    documents = None
    if inputs.documents is not None:
        documents = shard_state(jnp.asarray(inputs.documents), mesh, False)
    prompt = shard_state(jnp.asarray(inputs.prompt), mesh, False)
    count = jnp.asarray(inputs.prompt_length) - 1
    block = Block(prompt, hidden, count, features, documents, cache=state.cache)
    begun = decoder.proposer.start(params, block, decoder.capacity)
    state, begun = shard_state(state, mesh, split_target), shard_state(begun, mesh, split_proposer)
    return dataclasses.replace(state, proposer=begun)


def _of_rows(decoder: Parts, mesh: Mesh | None, cache: Cache, inputs: RowInputs) -> DecodeState:
    """Returns the state of rows, without that of the proposer."""
    rows, width = inputs.prompt.shape
    prompt, prompt_length, limit, num_drafts, eos = map(
        jnp.asarray,
        (inputs.prompt, inputs.prompt_length, inputs.limit, inputs.num_drafts, inputs.eos),
    )
    prompt = shard_state(prompt, mesh, False)
    processors = inputs.processors
    tokens = jnp.zeros((rows, decoder.capacity + decoder.proposer.max_depth + 1), jnp.int32)
    zero = jnp.zeros(rows, jnp.int32)
    counted, size = decoder.logits_processor is not None, decoder.target.vocab_size
    if counted or processors is not None:
        processors = processors or Processors()
        processors = processors.begin(prompt, prompt_length, size, counted, eos)
    top = decoder.num_logprobs
    return DecodeState(
        tokens=tokens.at[:, :width].set(prompt),
        length=prompt_length,
        limit=limit,
        num_drafts=num_drafts,
        done=prompt_length >= limit,
        cache=cache,
        proposer=None,
        rule=inputs.rule,
        key=inputs.key,
        sampling=inputs.sampling,
        eos=eos,
        processors=processors,
        logprobs=None if top is None else Logprobs.zeros(rows, tokens.shape[1], top),
        stats=Stats(zero, zero, zero, zero, zero, zero),
    )
