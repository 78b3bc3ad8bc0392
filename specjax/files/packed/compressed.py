"""Whole numbers of compressed-tensors: int8 in bytes, and 4 or 8 bits in words of int32.

The codes of an output follow each other along its inputs, lowest bits first; those of the zero
points along the outputs.  A stored code is the number plus half the number of codes.
"""

from __future__ import annotations

import numpy as np

from specjax.files.headers import Stored
from specjax.files.packed.format import (
    FLOATS,
    Format,
    Parts,
    check_shape,
    expanded,
    finite,
    groups_of,
    in_groups,
)
from specjax.files.packed.matrix import (
    Packed,
    PackedTensor,
    Scales,
    codes_of_words,
    packed_tensor,
    raw,
)
from specjax.models import Config

_WORDS, _SHAPE, _SCALE = "weight_packed", "weight_shape", "weight_scale"
_ZERO, _INDEX = "weight_zero_point", "weight_g_idx"


def _scales(scale: Stored, outputs: int, inputs: int) -> tuple[int, int]:
    """Returns the groups of an output, and the inputs of a group."""
    if scale.kind not in FLOATS:
        raise ValueError(f"{_SCALE} is stored as {scale.kind} instead of {' or '.join(FLOATS)}")
    shape = scale.shape or (1,)
    if shape in ((1,), (outputs,)):
        shape = (shape[0], 1)
    if len(shape) != 2 or shape[0] not in (1, outputs) or shape[1] == 0:
        raise ValueError(
            f"{_SCALE} has shape {list(scale.shape)} instead of [{outputs}, groups] or [1]"
        )
    group = groups_of(inputs, shape[1], None, _SCALE)
    if inputs % shape[1]:
        raise ValueError(f"{_SCALE} has {shape[1]} groups, which do not divide {inputs} inputs")
    finite(scale, _SCALE)
    return shape[1], group


def _open_int8(parts: Parts, config: Config) -> PackedTensor:
    codes, scale, zero = parts["weight"], parts[_SCALE], parts.get(_ZERO)
    if len(codes.shape) != 2:
        raise ValueError(f"it has shape {list(codes.shape)}, which is no matrix")
    outputs, inputs = codes.shape
    groups, group = _scales(scale, outputs, inputs)
    if zero is not None and (zero.shape or (1,)) != (scale.shape or (1,)):
        raise ValueError(f"{_ZERO} has shape {list(zero.shape)} instead of {list(scale.shape)}")
    if zero is not None and zero.kind != "I8":
        raise ValueError(f"{_ZERO} is stored as {zero.kind} instead of I8")
    order = in_groups(parts.get(_INDEX), inputs, group)

    def read() -> Packed:
        each = expanded(raw(scale).reshape(-1, groups), outputs)
        zeros = None
        if zero is not None and raw(zero).any():
            zeros = expanded(raw(zero).reshape(-1, groups), outputs).astype(np.int16)
        numbers = raw(codes) if order is None else raw(codes)[:, order]
        return Packed(numbers, Scales(each), group, 8, zeros, order=order)

    named = {"codes": codes, "scale": scale} | ({} if zero is None else {"zero": zero})
    named |= {} if order is None else {"order": parts[_INDEX]}
    return packed_tensor(codes.shape, "compressed-tensors int8", named, read, group)


def _open_words(parts: Parts, config: Config) -> PackedTensor:
    words, scale, zero = parts[_WORDS], parts[_SCALE], parts.get(_ZERO)
    check_shape(parts[_SHAPE], _SHAPE, (2,), ("I64", "I32"))
    outputs, inputs = (int(size) for size in raw(parts[_SHAPE]))
    made = {bits: (outputs, -(-inputs * bits // 32)) for bits in (4, 8)}
    bits = next((bits for bits, shape in made.items() if words.shape == shape), None)
    if bits is None or inputs < 1:
        raise ValueError(
            f"{_WORDS} has shape {list(words.shape)}; {_SHAPE} is {[outputs, inputs]}, for which "
            f"it is {list(made[4])} with 4 bits and {list(made[8])} with 8, and specjax reads these"
        )
    groups, group = _scales(scale, outputs, inputs)
    if zero is not None:
        check_shape(zero, _ZERO, (-(-outputs * bits // 32), groups), ("I32",))
    order = in_groups(parts.get(_INDEX), inputs, group)

    def read() -> Packed:
        codes = codes_of_words(raw(words), bits)[:, :inputs]
        codes = codes if order is None else codes[:, order]
        each = expanded(raw(scale).reshape(-1, groups), outputs)
        if zero is None:
            return Packed(codes, Scales(each), group, bits, None, 2 ** (bits - 1), order)
        # The half that both have been given cancels.
        zeros = codes_of_words(raw(zero).T, bits)[:, :outputs].T.astype(np.int16)
        return Packed(codes, Scales(each), group, bits, zeros, 0, order)

    named = {"codes": words, "scale": scale} | ({} if zero is None else {"zero": zero})
    named |= {} if order is None else {"order": parts[_INDEX]}
    return packed_tensor((outputs, inputs), f"compressed-tensors int{bits}", named, read, group)


INT8 = Format(
    "compressed-tensors int8", "weight", ("I8",), "weight", ((_SCALE,),), (_ZERO, _INDEX),
    _open_int8,
)  # fmt: skip
WORDS = Format(
    "compressed-tensors packed", _WORDS, ("I32",), "weight", ((_SCALE,), (_SHAPE,)),
    (_ZERO, _INDEX), _open_words,
)  # fmt: skip
