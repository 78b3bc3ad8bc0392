"""Floating-point operations of matrix products in a traced function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from bench.compiled.traffic import BLOCKS, FEWER_DRAFTS
from specjax.types import Arrays


def product_flops(
    function: Callable[..., Arrays], *arguments: Arrays, blocks: int = 1
) -> Counter[str]:
    """2 m n k summed over the products of `function` on all devices together, by kind.

    The kinds are "int8", for products of two int8 arrays, and "float" for all others.

    A loop whose number of turns depends on data counts once, and a branch counts as the largest.
    Passes in the scope `fewer_drafts` run instead of others, and do not count.

    Args:
      function: traced, not run.
      arguments: arrays or shapes.
      blocks: turns of a loop in the scope `blocks`.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr, blocks)


def _of(jaxpr: Jaxpr, blocks: int) -> Counter[str]:
    total = Counter[str]()
    for equation in jaxpr.eqns:
        total += _of_equation(equation, blocks)
    return total


def _of_equation(equation: JaxprEqn, blocks: int) -> Counter[str]:
    scopes = str(equation.source_info.name_stack).split("/")
    if FEWER_DRAFTS in scopes:
        return Counter()
    name, given = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        left, right = (_aval(value) for value in equation.invars[:2])
        contracted = (len(left.shape) - 1,)
        if name == "dot_general":
            (contracted, _), _ = given["dimension_numbers"]
        number = 2 * math.prod(_aval(equation.outvars[0]).shape)
        number *= math.prod(left.shape[axis] for axis in contracted)
        return Counter({"int8" if left.dtype == right.dtype == jnp.int8 else "float": number})
    if name == "cond":
        branches = [_of(branch.jaxpr, blocks) for branch in given["branches"]]
        platforms = given.get("branches_platforms")
        if platforms is None:
            return max(branches, key=Counter.total)
        tpu = [at for at, names in enumerate(platforms) if names and "tpu" in names]
        return branches[tpu[0] if tpu else -1]  # the last is that of all other platforms
    times = given["length"] if name == "scan" else 1
    if name == "while" and scopes[-1] == BLOCKS:
        times = blocks
    total = Counter[str]()
    for value in given.values():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            inner = _of(value.jaxpr if isinstance(value, ClosedJaxpr) else value, blocks)
            total += Counter({kind: times * number for kind, number in inner.items()})
    return total


def _aval(value: Var | Literal) -> ShapedArray:
    assert isinstance(value.aval, ShapedArray)  # an operand or result of a product
    return value.aval
