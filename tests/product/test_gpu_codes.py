"""The kernels for packed matrices on a GPU, computed on this machine: numbers, bits, and where they
are taken."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed import CONFIGS, held, opened

from specjax import kernels
from specjax.models import cpu_dot_general, dot_general, gpu_dot_general
from specjax.models.feed_forward import Stacks, by_kernel, grouped
from specjax.models.packed import Packed, of_kernel

pytestmark = pytest.mark.xdist_group("gpu codes")  # a share takes all of them, or none

KINDS = (
    "fp8-partial-blocks", "fp8-one-scale", "float-outputs", "int8-groups", "int8-zeros",
    "int4-zeros", "nvfp4", "mxfp4", "awq", "gptq-act-order", "gptq-int8-zeros",
)  # fmt: skip
"""One case of each layout: `test_packed.py` has the numbers of all."""

BY_INPUT = ((1,), (0,)), ((), ())


@functools.cache
def leaf_of(case: str) -> Packed:
    """The matrix of a case as a GPU holds it, beside copies of it: outputs are a multiple of 16."""
    leaf = held(opened(case)[0], "cuda")
    many = leaf.codes.shape[-1]

    def copied(part):
        both = [part, part[..., ::-1]]
        return jnp.concatenate(both * 2, -1) if part.shape[-1] == many else part

    order = leaf.order
    leaf = jax.tree.map(copied, dataclasses.replace(leaf, order=None))
    return dataclasses.replace(leaf, order=order)


def padded(leaf: Packed) -> kernels.GpuCodes:
    """As a kernel reads it; a single group of 40 inputs has codes of 0 behind them."""
    codes, others, widen = of_kernel(dataclasses.replace(leaf, order=None))
    groups, size = codes.shape[-3:-1]
    more = -size % 16 if groups == 1 else 0
    return kernels.GpuCodes(jnp.pad(codes, ((0, 0), (0, more), (0, 0))), others, widen)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in KINDS),
        *((case, "bfloat16") for case in ("fp8-blocks", "nvfp4", "gptq-act-order")),
        ("gptq-act-order", "float16"),
    ],
)
def test_products_are_those_of_the_numbers(case, dtype):
    """Within rounding; and a row has the same bits alone and beside 20 others."""
    leaf = leaf_of(case)
    codes = padded(leaf)
    assert codes.takes(21, dtype)
    wide = np.asarray(dataclasses.replace(leaf, order=None).dense(jnp.float32).astype(dtype))
    x = np.random.default_rng(0).normal(size=(21, len(wide)))
    x = jnp.asarray(x, dtype)
    few = jax.jit(lambda x: kernels.few_rows_of_codes_on_gpu(x, codes, interpret=True))
    made = np.asarray(few(x))
    assert made.shape == (codes.parts(dtype), 21, wide.shape[1])
    wanted = np.asarray(x, np.float64) @ wide.astype(np.float64)
    np.testing.assert_allclose(made.sum(0), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(np.asarray(few(x[20:])), made[:, 20:])


@pytest.mark.parametrize("case", [case for case in CONFIGS if "experts" in case])
def test_products_with_experts(case):
    """A pair is multiplied with its expert, whichever others were chosen."""
    leaf = leaf_of(case)
    codes = of_kernel(dataclasses.replace(leaf, order=None))
    wide = np.asarray(leaf.dense(jnp.float32), np.float64)
    chosen = jnp.asarray([[2, 0], [0, 1], [2, 1]], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, wide.shape[1])), jnp.float32)
    few = jax.jit(lambda x, n: kernels.few_experts_on_gpu(x, n, [codes, codes], interpret=True))
    wanted = np.einsum("pi,pio->po", np.asarray(x, np.float64), wide[chosen.reshape(-1)])
    made = few(x, chosen)
    for each in made:
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(few(x[4:], chosen[2:])[0], made[0][4:])


def matrix(groups: int, size: int, outputs: int, codes: str = "uint4") -> kernels.GpuCodes:
    return kernels.GpuCodes(
        jnp.zeros((groups, size, outputs), codes), (), lambda codes, others: codes
    )


@pytest.mark.parametrize(
    ("shape", "rows", "dtype", "taken"),
    [
        ((16, 128, 2048), 64, "bfloat16", True),
        ((90, 32, 2880), 4, "float32", True),
        ((1, 2048, 512), 1, "float16", True),
        ((16, 128, 2048), 65, "bfloat16", False),
        ((16, 128, 2040), 1, "bfloat16", False),
        ((3, 24, 64), 1, "bfloat16", False),
        ((1, 40, 64), 1, "bfloat16", False),
        ((16, 128, 2048), 1, "float64", False),
    ],
)
def test_what_the_kernel_takes(shape, rows, dtype, taken):
    assert matrix(*shape).takes(rows, dtype) == taken


def test_parts_keep_a_gpu_busy_and_depend_on_the_matrix_alone():
    shapes = (16, 128, 2048), (16, 128, 8192), (64, 128, 2048), (1, 256, 64)
    assert [matrix(*shape).parts("bfloat16") for shape in shapes] == [8, 2, 8, 1]


def found_in(name, form, *arrays):
    traced = jax.jit(form).trace(*arrays)
    return {
        platform: name in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "rocm", "tpu", "cpu")
    }


def test_it_is_in_programs_for_nvidia_gpus():
    """And not in those for other chips, nor in those for several devices; elsewhere the numbers are
    those of XLA, as slopes are everywhere."""
    leaf = leaf_of("gptq-act-order")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, leaf.inputs)), jnp.float32)

    def of(multiply):
        return lambda x, leaf: multiply(x, leaf.unbox(), BY_INPUT)

    only = {"cuda": True, "rocm": False, "tpu": False, "cpu": False}
    assert found_in("few_rows_of_codes", of(gpu_dot_general), x, leaf) == only
    assert not any(found_in("few_rows_of_codes", of(dot_general), x, leaf).values())
    wanted = jax.jit(of(dot_general))(x, leaf)
    for multiply in (gpu_dot_general, cpu_dot_general):
        np.testing.assert_array_equal(jax.jit(of(multiply))(x, leaf), wanted)
    slope, other = (
        jax.grad(lambda x, form=form: of(form)(x, leaf).sum())(x)
        for form in (gpu_dot_general, dot_general)
    )
    np.testing.assert_allclose(slope, other, rtol=1e-6)


def test_parts_add_up_on_other_platforms():
    leaf = leaf_of("gptq-act-order")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, leaf.inputs)), jnp.float32)
    parts = leaf.unbox().product_in_parts(x)
    assert parts.shape == (of_kernel(leaf).parts(x.dtype), 2, 3, leaf.shape[1])
    wanted = dot_general(x, leaf.unbox(), (((2,), (0,)), ((), ())))
    np.testing.assert_array_equal(parts.sum(0), wanted)


@pytest.mark.parametrize("case", ["fp8-experts", "mxfp4-experts"])
def test_packed_experts(case):
    """One kernel reads gate and up; elsewhere, and for slopes, experts are computed as before."""
    wide = leaf_of(case).unbox()
    of = Stacks(wide, wide, wide)
    assert wide.shape[1] != wide.shape[2] or case == "fp8-experts"
    inputs, outputs = wide.shape[1:]
    chosen = jnp.asarray([[2, 0], [0, 1]], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, inputs)), jnp.float32)

    def inner(gate, up):
        return (jax.nn.silu(gate) * up)[:, :inputs]

    assert outputs >= inputs
    stored = of.stored()

    def form(form):
        return lambda x, stacks: form(inner, x, chosen, stacks.unboxed())

    only = {"cuda": True, "rocm": False, "tpu": False, "cpu": False}
    assert found_in("few_experts", form(by_kernel), x, stored) == only
    made, wanted = (jax.jit(form(each))(x, stored) for each in (by_kernel, grouped))
    np.testing.assert_array_equal(made, wanted)
    slopes = [
        jax.jvp(lambda x, each=each: form(each)(x, stored), (x,), (x,))[1]
        for each in (by_kernel, grouped)
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-5)
