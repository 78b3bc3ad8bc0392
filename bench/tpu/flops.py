"""Floating-point operations of matrix products in a traced function."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from bench.tpu.traffic import BLOCKS, NO_DRAFTS
from specjax.types import Arrays


def product_flops(function: Callable[..., Arrays], *arguments: Arrays, blocks: int = 1) -> int:
    """2 m n k summed over the products of `function` on all devices together.

    A loop whose number of turns depends on data counts once, and a branch counts as the largest.
    Passes in the scope `no_drafts` run instead of others, and do not count.

    Args:
      function: traced, not run.
      arguments: arrays or shapes.
      blocks: turns of a loop in the scope `blocks`.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr, blocks)


def _of(jaxpr: Jaxpr, blocks: int) -> int:
    return sum(_of_equation(equation, blocks) for equation in jaxpr.eqns)


def _of_equation(equation: JaxprEqn, blocks: int) -> int:
    scopes = str(equation.source_info.name_stack).split("/")
    if NO_DRAFTS in scopes:
        return 0
    name, given = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = given["dimension_numbers"]
        left, result = _sizes(equation.invars[0]), _sizes(equation.outvars[0])
        return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
    if name in ("ragged_dot", "ragged_dot_general"):
        left, result = _sizes(equation.invars[0]), _sizes(equation.outvars[0])
        return 2 * math.prod(result) * left[-1]
    if name == "cond":
        branches = [_of(branch.jaxpr, blocks) for branch in given["branches"]]
        platforms = given.get("branches_platforms")
        if platforms is None:
            return max(branches)
        tpu = [at for at, names in enumerate(platforms) if names and "tpu" in names]
        return branches[tpu[0] if tpu else -1]  # the last is that of all other platforms
    times = given["length"] if name == "scan" else 1
    if name == "while" and scopes[-1] == BLOCKS:
        times = blocks
    inner = [value for value in given.values() if isinstance(value, ClosedJaxpr | Jaxpr)]
    return times * sum(
        _of(part.jaxpr if isinstance(part, ClosedJaxpr) else part, blocks) for part in inner
    )


def _sizes(value: Var | Literal) -> tuple[int, ...]:
    assert isinstance(value.aval, ShapedArray)  # an operand or result of a product
    return value.aval.shape
