"""Packed weights: numbers equal those of each format's package, and products those of the numbers.

tests/fixtures/make_packed.py made the fixtures.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax.files import open_tensors
from specjax.files.packed import Scheme, read_scheme
from specjax.files.packed.leaves import read_leaf, stays_packed
from specjax.files.packed.matrix import raw
from specjax.models import Tensor, cpu_dot_general, dot_general
from specjax.models.products import stacked_product

pytestmark = pytest.mark.xdist_group("packed")  # a share takes all of them, or none

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
CONFIGS = json.loads((FIXTURES / "packed.json").read_text())
STORED, _ = open_tensors([FIXTURES / "packed.safetensors"])


def opened(case):
    """The matrix of a case, and what its package says that it is."""
    found = {name.split("/")[1]: t for name, t in STORED.items() if name.startswith(f"{case}/")}
    expected = raw(found.pop("expected"))
    scheme = read_scheme(FIXTURES, {"quantization_config": CONFIGS[case]})
    assert isinstance(scheme, Scheme)
    stored, faults = scheme.open(
        {("m" if end.startswith("_") else "m.") + end: tensor for end, tensor in found.items()}
    )
    assert not faults
    ((_, matrix),) = stored.items()
    return matrix, expected


def held(matrix, platform="cpu", turned=True):
    """The matrix as a parameter of a model, or a stack of matrices."""
    shape = matrix.shape
    if matrix.turned != turned:
        shape = (*shape[:-2], *shape[:-3:-1])
    path = ("layer_0", "mlp", "up", "kernel") if len(shape) == 2 else ("layer_0", "mlp", "up")
    row = Tensor("m", path, transpose=matrix.turned != turned)
    stored = {"m": matrix}
    assert stays_packed(path, [row], shape, stored)
    leaf, spoilt = read_leaf([row], shape, stored, None, platform, lambda row, leaf: matrix.shape)
    assert not spoilt
    assert leaf.shape == shape
    return leaf


def close(y, expected):
    assert np.abs(np.asarray(y) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("case", CONFIGS)
def test_numbers_are_those_of_the_formats_package(case):
    """A matrix in float32, rounded to the package's dtype, has the package's numbers."""
    matrix, expected = opened(case)
    assert matrix.shape == expected.shape
    wide = np.asarray(matrix.map())
    assert np.ptp(wide) > 0.05
    np.testing.assert_array_equal(wide.astype(expected.dtype), expected)


@pytest.mark.parametrize("case", CONFIGS)
def test_numbers_on_a_device_are_those_of_the_file(case):
    """In the forms for a CPU and for accelerators, the codes stand for the same numbers."""
    matrix, _ = opened(case)
    wide = np.asarray(matrix.map())
    for platform in ("cpu", "tpu"):
        leaf = held(matrix, platform)
        made = np.asarray(jax.jit(lambda leaf: leaf.dense(jnp.float32))(leaf))
        most = 2e-7 if case == "nvfp4" else 0  # which divides, and the device multiplies
        expected = wide if matrix.turned else wide.swapaxes(-1, -2)
        np.testing.assert_allclose(made, expected, rtol=most, atol=0)


@pytest.mark.parametrize("case", [case for case in CONFIGS if "experts" not in case])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_numbers(case, dtype):
    """Within rounding, and a tile that begins early writes the same numbers again."""
    matrix, _ = opened(case)
    rng = np.random.default_rng(0)
    inputs = matrix.shape[1]
    wide = jnp.asarray(np.asarray(matrix.map()).T, dtype)
    x = jnp.asarray(rng.normal(size=(2, 3, inputs)), dtype)
    dimensions = ((2,), (0,)), ((), ())
    expected = dot_general(x, wide, dimensions).astype(jnp.float32)
    scale = float(jnp.abs(expected).max())
    for multiply, platform in (
        (cpu_dot_general, "cpu"),
        (dot_general, "cpu"),
        (dot_general, "tpu"),
    ):
        kernel = held(matrix, platform).unbox()
        y = jax.jit(lambda x, box: multiply(x, box.unbox(), dimensions))(x, kernel.stored)  # noqa: B023
        assert y.dtype == x.dtype
        error = np.abs(np.asarray(y.astype(jnp.float32) - expected)).max() / scale
        assert error < (1e-6 if dtype == "float32" else 8e-3)


@pytest.mark.parametrize("case", [case for case in CONFIGS if "experts" in case])
def test_products_with_a_stack(case):
    """A product takes one matrix of a stack."""
    matrix, _ = opened(case)
    wide = np.asarray(matrix.map())
    wide = wide if matrix.turned else wide.swapaxes(-1, -2)
    x = np.random.default_rng(0).normal(size=(5, wide.shape[1])).astype(np.float32)
    for alone in (True, False):
        for platform in ("cpu", "tpu"):
            stack = held(matrix, platform)
            for number in range(len(wide)):
                y = jax.jit(
                    lambda x, box, n: stacked_product(x, box.unbox(), n, alone)  # noqa: B023
                )(x, stack, jnp.int32(number))
                close(y, x @ wide[number])


def test_few_rows_are_those_of_many():
    """More outputs than a tile has, whatever the rows: a row depends on no other row."""
    matrix, _ = opened("int4-groups")
    leaf = held(matrix)
    codes, scales = (jnp.tile(part, (7, 1)) for part in (leaf.codes, leaf.scales))
    many = leaf.replace(codes=codes, scales=scales)
    x = np.random.default_rng(0).normal(size=(70, 96)).astype(np.float32)
    dimensions = ((1,), (0,)), ((), ())
    wide = np.asarray(many.dense(jnp.float32))
    for rows in (1, 2, 70):
        y = jax.jit(lambda x: cpu_dot_general(x, many.unbox(), dimensions))(x[:rows])
        close(y, x[:rows] @ wide)
    assert wide.shape == (96, 280)


def test_codes_are_read_as_they_are():
    """A byte of pairs holds inputs 2i and 2i + 1; act-order moves activations, and not codes."""
    matrix, _ = opened("gptq-act-order")
    leaf = held(matrix)
    assert leaf.pairs and leaf.order is not None and leaf.codes.dtype == jnp.uint8
    assert leaf.codes.shape == (40, 48)
    assert leaf.scales.dtype == jnp.float16
    grouped = held(matrix, "tpu")
    assert (grouped.codes.dtype, grouped.codes.shape) == (jnp.uint4, (3, 32, 40))
    assert grouped.scales.shape == (3, 40)
    assert held(opened("fp8-partial-blocks")[0], "tpu").codes.shape == (3, 32, 40)
    assert held(opened("fp8-blocks")[0]).codes.dtype == ml_dtypes.float8_e4m3fn
    assert held(opened("gptq-symmetric")[0]).zeros is None
    assert held(opened("mxfp4")[0]).scales.dtype == jnp.uint8


PUBLISHED = [
    {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
     "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
     "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"]},
    {"config_groups": {"group_0": {
        "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
        "output_activations": None, "targets": ["Linear"], "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
            "num_bits": 8, "observer": "minmax", "observer_kwargs": {}, "strategy": "channel",
            "symmetric": True, "type": "float"}}},
     "format": "float-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head"],
     "kv_cache_scheme": None, "quant_method": "compressed-tensors", "sparsity_config": {},
     "quantization_status": "compressed", "transform_config": {}, "version": "0.12.3"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
     "modules_to_not_convert": None},
    {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
     "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
     "group_size": 128, "max_input_length": None, "model_seqlen": None, "pad_token_id": None,
     "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
     "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
     "use_cuda_fp16": False, "use_exllama": True},
    {"bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "group_size": 32,
     "lm_head": False, "meta": {"quantizer": ["gptqmodel:1.4.0"], "mse": 0.0}, "sym": True,
     "pack_dtype": "int32", "quant_method": "gptq"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    {"config_groups": {"group_0": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["Linear"]}},
     "ignore": ["lm_head"], "quant_algo": "NVFP4", "quant_method": "modelopt",
     "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
     "producer": {"name": "modelopt", "version": "0.33.0"}},
]  # fmt: skip


@pytest.mark.parametrize("settings", PUBLISHED)
def test_fields_that_publishers_write_are_known(settings):
    """Also those that say how the numbers were found."""
    scheme = read_scheme(FIXTURES, {"quantization_config": settings})
    assert scheme is not None and scheme.method == settings["quant_method"]
