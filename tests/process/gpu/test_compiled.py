"""Laws of the programs that an NVIDIA GPU would run, compiled without a GPU.

In an environment with the packages of `.ci/gpu.txt`:

    PYTHONPATH=. python -m pytest --confcutdir tests/process/gpu tests/process/gpu
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import pytest
from _pytest.mark import ParameterSet

import specjax
from bench.compiled.cells import measure
from bench.compiled.chips import chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.sizes import config_of, shapes_of
from bench.gpu.described import devices_of
from bench.gpu.programs import WHOLE_LOOP, GpuProgram, compile_for_gpu
from specjax import Decoder, Params, TransformerConfig, sampling
from specjax.caches import kv
from specjax.methods import near_self
from specjax.models import attention, layers, products, transformer

CONFIG = TransformerConfig(
    vocab_size=32768,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=2048,
    tied_embeddings=False,
)
CAPACITY = 1024

MOST = {
    ("none", 1): (1, 54),
    ("none", 8): (1, 51),
    ("draft", 1): (1, 188),
    ("draft", 8): (1, 185),
    ("ngram", 1): (1, 63),
    ("ngram", 8): (1, 62),
    ("tree", 1): (1, 190),
    ("tree", 8): (1, 192),
    ("eagle3", 1): (1, 219),
    ("eagle3", 8): (1, 212),
    ("dflash", 1): (1, 198),
    ("dflash", 8): (1, 214),
    ("mtp-1", 1): (1, 95),
    ("mtp-1", 8): (1, 96),
    ("self-of-16-chunks", 1): (1, 242),
    ("self-of-16-chunks", 8): (1, 237),
}
"""(drafter, rows) -> the most waits of the host and launches of a step, with all filters on."""

QUICK = [("none", 1), ("none", 8)]
"""The cases that run by default; the others are slow."""


def cases(*quick: tuple[object, ...], every: Iterable[tuple[object, ...]]) -> list[ParameterSet]:
    """A drafter in one process, which compiles it once for all laws."""
    return [
        pytest.param(
            *case,
            marks=(pytest.mark.xdist_group(str(case[0])), *[pytest.mark.slow][: case not in quick]),
        )
        for case in every
    ]


EACH = pytest.mark.parametrize(("drafter", "rows"), cases(*QUICK, every=MOST))


@functools.cache
def compiled(
    drafter: str, rows: int, chips: int = 1, layers: int = 2, whole_loop: bool = False
) -> GpuProgram:
    devices = devices_of(chip("h100"), chips)
    target, draft = (
        shapes_of(dataclasses.replace(CONFIG, num_layers=n), devices=devices) for n in (layers, 1)
    )
    sketch = DRAFTERS[drafter](target, draft)
    # Twice as long a text, of which a target that drafts for itself chooses a part.
    capacity = CAPACITY * (2 if drafter.startswith("self") else 1)
    decoder = Decoder(target.model, sketch.proposer, specjax.Match(), (2,), capacity)
    params = Params(target.params, sketch.params)
    options = WHOLE_LOOP if whole_loop else None
    return compile_for_gpu(decoder, params, devices, rows, None, options)


@EACH
def test_the_host_waits_for_no_part_of_a_step(drafter, rows):
    """It waits once before a step."""
    waits, launches = MOST[drafter, rows]
    step = compiled(drafter, rows).step
    assert step.waits[1] <= waits
    assert step.launches[1] <= launches


@EACH
def test_a_step_copies_no_cache_and_writes_no_terms(drafter, rows):
    """Tokens are written in place, no array is copied to be padded, and products are added where
    they are multiplied."""
    step = compiled(drafter, rows).step
    assert step.cache_copies == 0
    assert step.padded == []
    assert step.terms_written == []


def test_the_whole_loop_is_a_graph_with_the_flag():
    step = compiled("none", 1, whole_loop=True).step
    assert step.whole_loop and step.waits == (0, 0)


@pytest.mark.parametrize("rows", [1, 8])
def test_launches_of_a_layer(rows):
    one, two = (compiled("none", rows, layers=layers).step.launches[0] for layers in (1, 2))
    assert two - one <= 9


def test_four_gpus_gather_no_table():
    made = compiled("none", 1, 4)
    assert made.step.tables_gathered == []
    assert made.scratch_bytes < 16e6  # the embedding is 134 MB


@pytest.mark.parametrize("size", ["qwen3.5-35b-a3b", "gpt-oss-20b"])
def test_a_plain_step_reads_few_experts(size):
    """It reads the chosen experts, and copies no matrix: all experts would be 8 to 32 times as many
    bytes, and a copy of the matrices that read one input three times theirs."""
    devices, config = devices_of(chip("h100"), 1), config_of(size).truncated(4)
    target = shapes_of(config, devices=devices)
    decoder = Decoder(target.model, specjax.NoProposer(), specjax.Match(), (2,), CAPACITY)
    made = compile_for_gpu(decoder, Params(target.params, ()), devices, 1)
    found = measure(made, config.vocab_size, 1, 80e9, CAPACITY)
    assert made.step.terms_written == []
    assert found["target_bytes"] < 1.03 * found["active_bytes"]
    assert sum(found["bytes_per_step"].values()) < 1.2 * found["active_bytes"]


PACKED = [
    ("none", "int4", 1),
    ("none", "gptq-act-order", 8),
    ("none", "nvfp4", 1),
    ("none", "fp8", 1),
    ("tree", "awq", 1),
    ("draft", "mxfp4", 1),
]
"""A drafter, a format, and rows."""


def bytes_of_packed(drafter, dtype, rows, product=None):
    """What a step reads and writes, and the bytes of a wide matrix, of which a layer has three."""
    devices = devices_of(chip("h100"), 1)
    target = shapes_of(CONFIG, dtype, devices)
    model = target.model
    if product is not None:
        model = dataclasses.replace(model, module=model.module.clone(dot_general=product))
    draft = shapes_of(dataclasses.replace(CONFIG, num_layers=1), devices=devices)
    sketch = DRAFTERS[drafter](target, draft)
    decoder = Decoder(model, sketch.proposer, specjax.Match(), (2,), CAPACITY)
    made = compile_for_gpu(decoder, Params(target.params, sketch.params), devices, rows)
    assert made.step.waits[1] <= 1
    found = measure(made, CONFIG.vocab_size, rows, 80e9, CAPACITY)
    return found, CONFIG.hidden_size * CONFIG.mlp_size * 2


@pytest.mark.parametrize(("drafter", "dtype", "rows"), cases(PACKED[0], every=PACKED))
def test_a_step_reads_packed_weights_where_they_lie(drafter, dtype, rows):
    """It writes no wide matrix."""
    found, wide = bytes_of_packed(drafter, dtype, rows)
    assert found["target_bytes"] < 1.001 * found["active_bytes"]
    assert found["bytes_per_step"]["other"] < 2 * wide


@pytest.mark.slow
def test_wide_matrices_are_found():
    """XLA writes them, and reads them."""
    found, wide = bytes_of_packed("none", "int4", 1, products.dot_general)
    assert found["bytes_per_step"]["other"] > 6 * wide


def test_a_step_reads_few_packed_experts():
    devices, config = devices_of(chip("h100"), 1), config_of("gpt-oss-20b").truncated(2)
    target = shapes_of(config, "mxfp4", devices)
    decoder = Decoder(target.model, specjax.NoProposer(), specjax.Match(), (2,), CAPACITY)
    made = compile_for_gpu(decoder, Params(target.params, ()), devices, 1)
    found = measure(made, config.vocab_size, 1, 80e9, CAPACITY)
    assert found["target_bytes"] < 1.03 * found["active_bytes"]
    assert sum(found["bytes_per_step"].values()) < 1.1 * found["active_bytes"]
    assert made.step.waits[1] <= 1


def changed(monkeypatch, choices, rows):
    """The step of a program where choices fall as on other platforms."""
    jax.clear_caches()
    with monkeypatch.context() as patched:
        for module, name in choices:
            patched.setattr(module, name, lambda choice, other, *operands: other(*operands))
        step = compiled.__wrapped__("none", rows).step
    jax.clear_caches()
    return step


def test_terms_in_memory_are_seen(monkeypatch):
    """A token alone and a product of one row, as other platforms have them, write the terms."""
    monkeypatch.setattr(transformer, "platform_of_shapes", lambda: "cpu")
    assert sum(changed(monkeypatch, [(products, "by_platform")], 1).terms_written) > 10e6


def test_a_loop_in_the_filters_is_seen(monkeypatch):
    """The host waits for its branches, which no graph holds."""
    step = changed(monkeypatch, [(sampling, "on_gpu"), (sampling, "on_cuda")], 1)
    assert step.waits[1] > MOST["none", 1][0] and step.launches[1] > MOST["none", 1][1]


@pytest.mark.slow
def test_a_loop_over_bounds_of_chunks_and_a_token_alone_are_seen(monkeypatch):
    """The host waits for the loop, and products of one row write their terms."""
    jax.clear_caches()
    with monkeypatch.context() as patched:
        looped = near_self.summarised
        patched.setattr(near_self, "summarised", lambda *given, once=False: looped(*given))
        patched.setattr(transformer, "_ONE_ROW", (kv.KVCache,))
        step = compiled.__wrapped__("self-of-16-chunks", 1).step
    jax.clear_caches()
    assert step.waits[1] > MOST["self-of-16-chunks", 1][0]
    assert sum(step.terms_written) + sum(step.copied) > 10e6


@pytest.mark.slow
def test_writes_of_single_rows_are_seen(monkeypatch):
    step = changed(monkeypatch, [(kv, "by_platform"), (attention, "on_cuda")], 8)
    assert step.launches[1] > MOST["none", 8][1] + 20


@pytest.mark.slow
def test_attention_of_several_kernels_is_seen(monkeypatch):
    step = changed(monkeypatch, [(attention, "on_cuda")], 1)
    assert step.launches[1] > MOST["none", 1][1]


@pytest.mark.slow
def test_sums_apart_from_norms_are_seen(monkeypatch):
    step = changed(monkeypatch, [(layers, "on_cuda")], 1)
    assert step.launches[1] > MOST["none", 1][1]
