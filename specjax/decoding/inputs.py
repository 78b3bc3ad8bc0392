"""`RowInputs`, and checks of a decoder's fields and of the arguments of `prefill` and `insert`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.core import Tracer

from specjax._internal.checks import hashable, shown
from specjax.contract import Model, Proposer, Rule
from specjax.processors import LogitsProcessor, Processors
from specjax.sampling import Sampling


@struct.dataclass
class RowInputs:
    """The inputs of a batch of B rows: their prompts and their settings.

    `Decoder.prefill` describes each field.  `rule` has the numbers of the rule, [B] each, and is
    None if the rule has none.
    """

    prompt: Array | np.ndarray  # [B, P] int32, padded on the right
    prompt_length: Array | np.ndarray  # [B] int32
    limit: Array | np.ndarray  # [B] int32
    num_drafts: Array | np.ndarray  # [B] int32
    sampling: Sampling
    key: Array  # [B] PRNG keys
    processors: Processors | None
    eos: Array | np.ndarray  # [B, ids] int32, padded with ABSENT
    rule: Rule | None = None
    documents: Array | np.ndarray | None = None  # [B, X] int32


def check_fit(target: Model, proposer: Proposer, rule: Rule) -> None:
    """Raises ValueError if a target, a proposer and a rule do not work together."""
    offered = target.num_taps
    if not set(proposer.taps) <= set(range(offered)):
        layers = f"those in [0, {offered - 1}]" if offered else "none"
        raise ValueError(
            f"{type(proposer).__name__} reads the target's layers {proposer.taps}, "
            f"and the target offers {layers}: pass the target that it was made for"
        )
    proposer.check(rule)
    if proposer.is_chain:
        return
    if not target.reads_trees:
        raise ValueError(
            f"{type(proposer).__name__} proposes trees, but the target reads chains only "
            "(reads_trees=False: no tree mask, or a cache that commits no path); "
            "use a proposer of chains, such as DraftModel or NGram"
        )
    if rule.chain_only:
        raise ValueError(
            f"{type(rule).__name__} judges chains only, and "
            f"{type(proposer).__name__} proposes trees: use a rule for trees, such as "
            "Match() or Rejection(), or a proposer of chains"
        )


def check_given(
    model: Model,
    capacity: int,
    prompt: Array | np.ndarray,
    prompt_length: Array | np.ndarray,
    limit: Array | np.ndarray,
    num_drafts: Array | np.ndarray | None,
) -> None:
    """Raises ValueError for arguments of `Decoder.prefill` that do not fit `model` and `capacity`.

    Types and shapes are checked even if an array is traced.  Values are checked only if this
    process holds the whole array.

    Raises:
      ValueError: the message has the argument, its value and the fix.
    """
    arrays = {"prompt": prompt, "prompt_length": prompt_length, "limit": limit}
    if num_drafts is not None:
        arrays["num_drafts"] = num_drafts
    for name, value in arrays.items():
        kind = value.dtype if isinstance(value, jax.Array | np.ndarray) else type(value).__name__
        if isinstance(kind, str) or not jnp.issubdtype(kind, jnp.integer):
            raise ValueError(f"{name} is of the type {kind}; pass an array of int32")
        wanted = ("rows", "tokens") if name == "prompt" else ("rows",)
        if value.ndim != len(wanted) or len(value) != len(prompt) or value.size == 0:
            shape = ", ".join(wanted)
            raise ValueError(
                f"{name} has the shape {value.shape}; pass [{shape}], rows as in prompt"
            )
    width = prompt.shape[1]
    if width > capacity:
        raise ValueError(
            f"prompts padded to {width} tokens do not fit a capacity of {capacity}: "
            "raise the decoder's capacity, or shorten the prompt"
        )
    held = {name: np.asarray(value) for name, value in arrays.items() if _is_held(value)}
    if (lengths := held.get("prompt_length")) is not None:
        if lengths.min() < 1:
            empty = int(lengths.argmin())
            raise ValueError(f"prompt {empty} is empty; a prompt needs at least one token")
        if lengths.max() > width:
            longest = lengths.max()
            raise ValueError(f"prompt_length {longest} is longer than the {width} tokens of prompt")
    if (limits := held.get("limit")) is not None:
        most = limits.max()
        if most > capacity:
            raise ValueError(
                f"limit={most} is beyond the capacity of {capacity}: raise the capacity"
            )
        # The last token of a text is emitted, but the target never reads it.
        if most > model.max_positions + 1:
            raise ValueError(
                f"limit={most} is beyond the {model.max_positions} positions that the target "
                "reads: pass a smaller limit, or a target with more positions"
            )
    if (depths := held.get("num_drafts")) is not None and depths.min() < 0:
        raise ValueError(f"num_drafts={depths.min()}; it must be 0 (plain decoding) or more")
    if lengths is not None and "prompt" in held:
        # Padding may hold any number.
        tokens = np.where(np.arange(width) < lengths[:, None], held["prompt"], 0)
        wrong = (tokens < 0) | (tokens >= model.vocab_size)
        if wrong.any():
            row = int(wrong.any(1).argmax())
            raise ValueError(
                f"prompt {row} holds token ids from {tokens[row].min()} to {tokens[row].max()}; "
                f"the target has the ids 0 to {model.vocab_size - 1}"
            )


def _is_held(value: Array | np.ndarray) -> bool:
    """Returns whether this process can read all of `value`."""
    if isinstance(value, Tracer):
        return False
    return isinstance(value, np.ndarray) or value.is_fully_addressable


def check_slot(slot: int | Array, rows: int, new: int) -> None:
    """Raises ValueError for `new` rows instead of one, or for a concrete slot not in [0, rows)."""
    if new != 1:
        raise ValueError(f"row holds {new} rows, and insert takes one: prefill them one at a time")
    if isinstance(slot, Tracer):
        return
    index = np.asarray(slot)
    if index.ndim or not np.issubdtype(index.dtype, np.integer) or not 0 <= index < rows:
        last = rows - 1
        raise ValueError(f"slot={slot} is none of the {rows} rows; pass an integer, 0 to {last}")


def check_function(function: LogitsProcessor, vocab_size: int, capacity: int) -> None:
    """Traces a user's function without running it.  Raises ValueError unless it maps [V] to [V]."""
    shapes = [((vocab_size,), jnp.float32), ((capacity,), jnp.int32), ((vocab_size,), jnp.int32)]
    wanted = "pass a JAX function (logits [V], text [capacity], counts [V]) -> logits [V]"
    hashable("logits_processor", function)
    try:
        out = jax.eval_shape(function, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    except Exception as error:  # whatever a user's function may raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(
            f"logits_processor={shown(function)} cannot be traced ({reason}); {wanted}"
        ) from error
    shape = out.shape if isinstance(out, jax.ShapeDtypeStruct) else type(out).__name__
    if shape != (vocab_size,):
        raise ValueError(
            f"logits_processor returns {shape} for logits of shape ({vocab_size},), but it must "
            "keep their shape: it is called for one node, and specjax maps it over nodes and rows"
        )
