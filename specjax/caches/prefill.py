"""Reading a prompt in chunks of a fixed size, so that activations do not grow with its length.

    prompt   . . . . . . . . . . . . . . .      15 tokens, chunks of 4
             [read 0 ][read 1 ][read 2 ][3 ]    each stages behind what the row has committed so far

In chunks the tokens of a pass are bounded, and `models.attention` bounds the slots that it looks at at a time: what is
left to grow are the cache and the features that proposers ask for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specjax.contract import Model

CHUNK = 512


def check_given(
    model: Model,
    capacity: int,
    prompt: Any,
    prompt_length: Any,
    limit: Any,
    num_drafts: Any,
) -> None:
    """Refuse what a decoder of `model` and `capacity` cannot decode.

    The others are arguments of `Decoder.prefill`.  Types and shapes are checked of traced arrays
    too, numbers of those that this process holds.

    Raises:
      ValueError: the argument, its value, and the cure.
    """
    given = {"prompt": prompt, "prompt_length": prompt_length, "limit": limit}
    given |= {} if num_drafts is None else {"num_drafts": num_drafts}
    for name, value in given.items():
        found = getattr(value, "dtype", type(value).__name__)
        if not isinstance(value, jax.Array | np.ndarray) or not jnp.issubdtype(found, jnp.integer):
            raise ValueError(f"{name} is of the type {found}; pass an array of int32")
        wanted = ("rows", "tokens") if name == "prompt" else ("rows",)
        if value.ndim != len(wanted) or len(value) != len(prompt) or value.size == 0:
            shape = ", ".join(wanted)
            raise ValueError(f"{name} has the shape {value.shape}; pass [{shape}], rows as in prompt")
    width = prompt.shape[1]
    if width > capacity:
        raise ValueError(
            f"prompts padded to {width} tokens do not fit a capacity of {capacity}: "
            "raise the decoder's capacity, or shorten the prompt"
        )
    held = {name: np.asarray(value) for name, value in given.items() if _is_held(value)}
    if (lengths := held.get("prompt_length")) is not None:
        if lengths.min() < 1:
            empty = int(lengths.argmin())
            raise ValueError(f"prompt {empty} is empty; a prompt needs at least one token")
        if lengths.max() > width:
            longest = lengths.max()
            raise ValueError(f"prompt_length {longest} is longer than the {width} tokens given")
    if (limits := held.get("limit")) is not None:
        most = limits.max()
        if most > capacity:
            raise ValueError(f"limit={most} is beyond the capacity of {capacity}: raise that")
        if most > model.max_positions:
            raise ValueError(
                f"limit={most} is beyond the {model.max_positions} positions that the target "
                "reads: pass a smaller limit, or a target with more positions"
            )
    if (depths := held.get("num_drafts")) is not None and depths.min() < 0:
        raise ValueError(f"num_drafts={depths.min()}; it must be 0 (plain decoding) or more")
    if lengths is not None and "prompt" in held:
        # Padding may be anything.
        tokens = np.where(np.arange(width) < lengths[:, None], held["prompt"], 0)
        wrong = (tokens < 0) | (tokens >= model.vocab_size)
        if wrong.any():
            row = int(wrong.any(1).argmax())
            raise ValueError(
                f"prompt {row} holds token ids from {tokens[row].min()} to {tokens[row].max()}; "
                f"the target has the ids 0 to {model.vocab_size - 1}"
            )


def _is_held(value: Any) -> bool:
    """Can this process read all of it?"""
    if isinstance(value, Tracer):
        return False
    return isinstance(value, np.ndarray) or value.is_fully_addressable


def check_slot(slot: Any, rows: int, new: int) -> None:
    """Refuse to insert `new` rows instead of one, or a concrete slot that is none of the `rows`."""
    if new != 1:
        raise ValueError(f"row holds {new} rows, and insert takes one: prefill them one at a time")
    if isinstance(slot, Tracer):
        return
    found = np.asarray(slot)
    if found.ndim or not np.issubdtype(found.dtype, np.integer) or not 0 <= found < rows:
        last = rows - 1
        raise ValueError(f"slot={slot} is none of the {rows} rows; pass an integer, 0 to {last}")


def empty_cache(model: Model, rows: int, text: int, ahead: int) -> Any:
    """A cache of `model` for texts of up to `text` tokens, with room behind them for the `ahead` that are scratch.

    Where it can be narrowed (`specjax.caches.ring`), a layer with a sliding window keeps that window alone.
    """
    cache = model.init_cache(rows, text + ahead)
    # Not the width of this prompt: rows of any prompt fit each other's batch.
    return cache.narrow(ahead, CHUNK)


def read_prompt(
    model: Model, params: Any, tokens: Array, count: Array, cache: Any, taps: tuple[int, ...] = ()
) -> tuple[Array, Array | None, Any]:
    """Read `tokens` [B, W] from the start of an empty cache, and commit the first `count` [B] of each row.

    Up to `CHUNK` tokens are one pass.  More are a loop of passes of that size, and a shorter one for what is left over.
    A row that has ended stages behind its own length, which is before the chunk, so that it needs no more room.

    Returns:
      The hidden states [B, W, E], the features [B, W, sum E] of the layers in `taps` (None without),
      and the cache.
    """
    named = {"taps": taps} if taps else {}  # a model without taps need not know the word

    def read(cache: Any, start: Array | int, part: Array) -> tuple[Any, tuple[Array, Array | None]]:
        positions = jnp.broadcast_to(start + jnp.arange(part.shape[1]), part.shape)
        out = model.apply(params, part, positions, cache, **named)
        return out.cache.commit(jnp.clip(count - start, 0, part.shape[1])), (out.hidden, out.features)

    rows, width = tokens.shape
    whole = width // CHUNK * CHUNK
    if width <= CHUNK:
        cache, made = read(cache, 0, tokens)
        return *made, cache
    starts = jnp.arange(0, whole, CHUNK)
    parts = tokens[:, :whole].reshape(rows, -1, CHUNK).swapaxes(0, 1)
    cache, made = jax.lax.scan(lambda cache, chunk: read(cache, *chunk), cache, (starts, parts))
    made = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, whole, -1), made)
    if whole < width:
        cache, last = read(cache, whole, tokens[:, whole:])
        made = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), made, last)
    return *made, cache
