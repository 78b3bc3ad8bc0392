"""Floating-point operations of matrix products in a traced function."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from bench.tpu.traffic import NO_DRAFTS
from specjax.types import Arrays


def product_flops(function: Callable[..., Arrays], *arguments: Arrays) -> int:
    """2 m n k summed over the products of `function` on all devices together.

    A loop whose number of turns depends on data counts once, and a branch counts as the largest.
    Passes in the scope `no_drafts` run instead of others, and do not count.

    Args:
      function: traced, not run.
      arguments: arrays or shapes.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of(jaxpr: Jaxpr) -> int:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: JaxprEqn) -> int:
    if NO_DRAFTS in str(equation.source_info.name_stack).split("/"):
        return 0
    name, given = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = given["dimension_numbers"]
        left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
    if name in ("ragged_dot", "ragged_dot_general"):
        left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2 * math.prod(result) * left[-1]
    if name == "cond":
        branches = [_of(branch.jaxpr) for branch in given["branches"]]
        # A choice of the platform keeps the accelerator's form, which is the last.
        return branches[-1] if given.get("branches_platforms") else max(branches)
    times = given["length"] if name == "scan" else 1
    inner = [value for value in given.values() if isinstance(value, ClosedJaxpr | Jaxpr)]
    return times * sum(_of(part.jaxpr if isinstance(part, ClosedJaxpr) else part) for part in inner)
