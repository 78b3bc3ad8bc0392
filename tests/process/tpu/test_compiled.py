"""Laws of the programs that a TPU would run, compiled by libtpu without a TPU.

In an environment with jax[tpu] and the packages of the tests:

    PYTHONPATH=. python -m pytest --confcutdir tests/process/tpu tests/process/tpu
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import mesh_cases
import pytest
from toys import NOISE_KINDS
from toys import TRANSFORMERS as toys

import specjax
from bench.compiled.chips import chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.hlo import parse
from bench.compiled.programs import Compiled, compile_loop
from bench.compiled.sizes import shapes_of
from bench.compiled.traffic import Traffic, host_transfers, traffic
from bench.tpu.slices import devices_of
from specjax import RULES, Decoder, Params, TransformerConfig
from specjax.caches import choosing, kv
from specjax.methods.eagle3 import network as eagle3
from specjax.models import layers
from specjax.parallel import device_bytes

CONFIG = TransformerConfig(
    vocab_size=16384,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=2048,
    tied_embeddings=False,
)
DRAFT = shapes_of(dataclasses.replace(CONFIG, num_layers=1))
ROWS, CAPACITY = 8, 1024
PROPOSERS = {
    "none": specjax.NoProposer,
    "ngram": lambda: specjax.NGram(4),
    "draft": lambda: specjax.DraftModel(DRAFT.model, CONFIG.vocab_size, 4),
    "tree": lambda: specjax.DraftTree(DRAFT.model, CONFIG.vocab_size, (3, 2, 1)),
}


EACH = pytest.mark.parametrize(
    "proposer", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PROPOSERS]
)
"""In one process each, which compiles it once for all laws."""


@functools.cache
def compiled(proposer: str, chips: int = 1, dtype: str = "bfloat16") -> Compiled:
    target = shapes_of(CONFIG, dtype)
    decoder = Decoder(target.model, PROPOSERS[proposer](), specjax.Match(), (2,), CAPACITY)
    drafts = proposer in ("draft", "tree")
    params = Params(target.params, DRAFT.params if drafts else None)
    return compile_loop(decoder, params, devices_of(chip("v5e"), chips), ROWS)


def leaf_bytes() -> int:
    """The keys of a layer of the cache."""
    return ROWS * CONFIG.num_kv_heads * CAPACITY * CONFIG.head_dim * 2


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(case, rule, marks=() if rule in NOISE_KINDS else pytest.mark.slow)
        for case in toys.CASES
        for rule in RULES
        if toys.judges(rule, case)
    ],
)
def test_every_proposer_and_rule_compiles_and_never_waits_for_the_host(case, rule):
    """The loop is one program, in which nothing is sent to the host or received from it.

    By default each proposer is compiled with a rule for each kind of noise, or with one of them.
    """
    decoder, params = toys.decoder(case, rule), toys.params(case)
    made = compile_loop(decoder, params, devices_of(chip("v5e"), 1), toys.ROWS)
    program = parse(made.text)
    assert host_transfers(program) == []
    assert traffic(program, (toys.VOCAB,)).total > 0


@pytest.mark.parametrize("family", mesh_cases.FAMILIES)
def test_every_kind_of_family_compiles_and_never_waits_for_the_host(family):
    for case in mesh_cases.family_cases(family, ("draft",)).values():
        made = compile_loop(case.decoder, case.params, devices_of(chip("v5e"), 1), mesh_cases.ROWS)
        assert host_transfers(parse(made.text)) == []


@EACH
def test_a_step_copies_no_cache_and_no_weight(proposer):
    """Nothing but new tokens, and the path of a tree, is written to a cache; no weight is.

    XLA brings some layers of a cache to on-chip memory for the attention, stages the new tokens
    there and writes the layer back.  That is counted apart, and is little beside the weights.
    """
    counted = traffic(parse(compiled(proposer).text), (CONFIG.vocab_size,))
    assert counted.copies == []
    token = 2 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * ROWS
    # A draft model stages at most ten nodes and commits them; the target stages and commits, too.
    assert counted.bytes["cache_written"] <= 4 * 10 * token
    assert counted.bytes["cache_copied"] == sum(
        size for path, size in counted.evictions if "cache" in path
    )
    assert counted.bytes["cache_read"] >= 2 * CONFIG.num_layers * leaf_bytes()


@pytest.mark.parametrize(
    ("module", "proposer", "least"), [(kv, "tree", leaf_bytes()), (layers, "ngram", 1)]
)
def test_the_form_for_a_cpu_would_copy(monkeypatch, module, proposer, least):
    """The law above sees its faults: tokens written as integers copy caches, and projections
    without a barrier turn their kernels."""
    with monkeypatch.context() as patched:
        if module is kv:
            patched.setattr(kv, "by_platform", lambda forms, other, *given: forms["cpu"](*given))
        else:
            patched.setattr(layers, "on_tpu", lambda tpu, other, *given: other(*given))
        jax.clear_caches()
        counted = traffic(parse(compiled.__wrapped__(proposer).text), (CONFIG.vocab_size,))
    jax.clear_caches()
    is_weight = module is layers
    copies = [n for path, n in counted.copies if path.startswith("params.") == is_weight]
    assert max(copies, default=0) >= least


def _bytes_of_chosen_chunks() -> tuple[Traffic, float]:
    """Of a step that drafts with chosen chunks, and the bytes of what it chooses in all layers."""
    target = shapes_of(CONFIG)
    proposer = specjax.NearSelf(target.model, 64, selected=2, chunk=16)
    decoder = Decoder(target.model, proposer, specjax.Match(), (2,), 2 * CAPACITY)
    params = Params(target.params, target.params)
    made = compile_loop(decoder, params, devices_of(chip("v5e"), 1), ROWS)
    slots = 4 + 2 * 16 + 64 + 15 + 64 + 1  # with those for drafts
    chosen = 2 * CONFIG.num_layers * leaf_bytes() * slots / CAPACITY
    return traffic(parse(made.text), (CONFIG.vocab_size,)), chosen


def _by_products(buffer, index):
    """The slots, but taken by products with ones and zeros, which read all of them."""
    places = jnp.arange(buffer.shape[2])
    ones = (index[..., None] == places).astype(buffer.dtype)
    return jnp.einsum(
        "bkns,bksd->bknd", jnp.broadcast_to(ones, (*buffer.shape[:2], *ones.shape[2:])), buffer
    )


@pytest.mark.parametrize("planted", [False, True])
def test_chosen_chunks_are_read_without_the_rest_of_the_cache(monkeypatch, planted):
    """A step that drafts reads what it has chosen, and the bounds, and copies no cache."""
    jax.clear_caches()
    if planted:
        monkeypatch.setattr(choosing, "slots_at", _by_products)
    counted, chosen = _bytes_of_chosen_chunks()
    jax.clear_caches()
    read = counted.by_phase["propose"]["cache_read"]
    if planted:
        assert read > 5 * chosen
    else:
        assert counted.copies == []
        assert read < 4 * chosen


def _logits_of_a_head_with_a_reduced_vocabulary() -> float:
    """The traffic of logits in a step, as a multiple of one array [rows, V] of float32."""
    target, rows = shapes_of(CONFIG), 4
    sketch = DRAFTERS["eagle3"](target, DRAFT)
    decoder = Decoder(target.model, sketch.proposer, specjax.Match(), (2,), CAPACITY)
    params = Params(target.params, sketch.params)
    made = compile_loop(decoder, params, devices_of(chip("v5e"), 1), rows)
    counted = traffic(parse(made.text), (CONFIG.vocab_size, 32000))
    return counted.bytes["logits"] / (4 * rows * CONFIG.vocab_size)


@pytest.mark.parametrize("planted", [False, True])
def test_logits_of_a_reduced_vocabulary_are_not_padded(monkeypatch, planted):
    """Few rows stay few: a gather of all rows at once would lay them along 128 lanes."""
    if not planted:
        assert _logits_of_a_head_with_a_reduced_vocabulary() < 100
        return

    def of_all_rows(logits, vocab_size, to_draft=None):
        taken = jnp.take(logits, jnp.maximum(to_draft, 0), axis=-1)
        return jnp.where(to_draft >= 0, taken, -jnp.inf)

    jax.clear_caches()
    monkeypatch.setattr(eagle3, "on_target", of_all_rows)
    assert _logits_of_a_head_with_a_reduced_vocabulary() > 200
    jax.clear_caches()


@EACH
def test_the_state_is_updated_in_place(proposer):
    """Every byte of the state that is donated is written to again."""
    made = compiled(proposer)
    # Padding to tiles makes it larger than the arrays.
    assert made.donated_bytes >= device_bytes(made.state, None)


@EACH
def test_memory_is_predicted(proposer):
    """The parameters and the state, as `specjax` counts them, are what the compiler needs."""
    made = compiled(proposer)
    assert made.predicted_bytes == pytest.approx(made.argument_bytes, rel=0.1)


@pytest.mark.parametrize("proposer", ("none", "draft"))
def test_tensor_parallelism_sums_twice_a_layer(proposer):
    """Two all-reduces a layer and pass, and nothing else that moves a cache or a matrix."""
    made = compiled(proposer, 4)
    counted = traffic(parse(made.text), (CONFIG.vocab_size, CONFIG.vocab_size // 4))
    assert counted.copies == []
    passes = 2 * CONFIG.num_layers
    sums = [size for (kind, size), n in counted.collectives.items() for _ in range(n)
            if kind == "all-reduce" and size >= ROWS * CONFIG.hidden_size * 2]  # fmt: skip
    assert len(sums) <= passes + 4  # and those of the embedding, the logits and the draws
    smallest = min(CONFIG.hidden_size * 256 * 2 // 4, ROWS * CAPACITY * 64 * 2)
    assert max((size for _, size in counted.collectives), default=0) < smallest


def test_few_key_heads_are_copied_and_not_gathered():
    """With 2 key heads on 4 chips each chip holds one head's part of the cache: its bytes over the
    chips, times the copies.  Nothing in the loop moves a cache, in memory or between chips."""
    chips, heads = 4, 2
    target = shapes_of(dataclasses.replace(CONFIG, num_kv_heads=heads))
    decoder = Decoder(target.model, specjax.NGram(4), specjax.Match(), (2,), CAPACITY)
    made = compile_loop(decoder, Params(target.params), devices_of(chip("v5e"), chips), ROWS)
    assert made.state.cache.keys[0].shape[1] == heads
    program = parse(made.text)
    leaves = [
        i.shapes[0]
        for i in program.entry.parameters
        if re.search(r"state\.cache\.(keys|values)\[\d+\]$", i.op_name)
    ]
    assert len(leaves) == 2 * CONFIG.num_layers
    copies = chips // heads
    for leaf, whole in zip(leaves, 2 * made.state.cache.keys, strict=True):
        assert math.prod(leaf.sizes) == math.prod(whole.shape) // chips * copies
    counted = traffic(program, (CONFIG.vocab_size, CONFIG.vocab_size // chips))
    assert counted.copies == []
    part = math.prod(leaves[0].sizes) * 2
    assert counted.collectives and max(size for _, size in counted.collectives) < part


@pytest.mark.parametrize("drafter", ("eagle3", "dspark"))
def test_a_published_drafter_is_split(drafter):
    """Each of 4 chips holds its share of the drafter, and a pass of it sums twice a layer."""
    chips = 4
    target = shapes_of(CONFIG)
    sketch = DRAFTERS[drafter](target, target)
    decoder = Decoder(target.model, sketch.proposer, specjax.Match(), (2,), CAPACITY)
    made = compile_loop(
        decoder, Params(target.params, sketch.params), devices_of(chip("v5e"), chips), 1
    )
    assert made.predicted_bytes == pytest.approx(made.argument_bytes, rel=0.1)
    own = sketch.params.own
    small = [own["correction"]["before"]] if drafter == "dspark" else [own["to_draft"]]
    whole, copied = device_bytes(own, None), device_bytes(small, None)
    held = made.argument_bytes - device_bytes(target.params, None) / chips
    assert held < 1.1 * ((whole - copied) / chips + copied + device_bytes(made.state, None))
    counted = traffic(parse(made.text), (CONFIG.vocab_size, CONFIG.vocab_size // chips))
    assert counted.copies == []
    smallest = CONFIG.hidden_size * 256 * 2 // chips
    assert max(size for _, size in counted.collectives) < smallest


def test_another_dtype_is_not_widened():
    """No matrix in bfloat16 is turned into float32 in memory."""
    program = parse(compiled("draft").text)
    shapes = {
        leaf.shape for leaf in jax.tree.leaves(compiled("draft").params) if len(leaf.shape) == 2
    }
    widened = [
        instruction.name
        for _, instruction in program.executed()
        for shape in instruction.shapes
        if shape.dtype == "f32" and shape.sizes in shapes
    ]
    assert widened == []


def test_int8_is_multiplied_as_int8():
    """No matrix of int8 is widened in memory, and a step reads half the bytes of bfloat16.

    Its logits are moved no more often than those of bfloat16."""
    made = compiled("ngram", 1, "int8")
    counted, wide = (
        traffic(parse(compiled_.text), (CONFIG.vocab_size,))
        for compiled_ in (made, compiled("ngram"))
    )
    assert counted.copies == []
    assert counted.bytes["weights"] < 0.55 * wide.bytes["weights"]
    assert counted.bytes["logits"] < 1.2 * wide.bytes["logits"]


@pytest.mark.parametrize("chips", (1, 4))
def test_int4_stays_packed(chips):
    """A step reads each code and scale once, writes no wide matrix, and a chip holds its share.

    On four chips a chip's share of these few layers fits into its on-chip memory, and stays there
    from step to step.
    """
    made = compiled("none", chips, "int4")
    counted = traffic(parse(made.text), (CONFIG.vocab_size, CONFIG.vocab_size // chips))
    read = {name: part for name, part in made.params.target.items() if name != "embedding"}
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jax.dtypes.itemsize_bits(leaf.dtype) / 8
        for leaf in jax.tree.leaves(read)
    )
    assert counted.copies == []
    assert counted.bytes["weights"] < 1.05 * held
    assert chips > 1 or counted.bytes["weights"] > 0.95 * held
    assert made.predicted_bytes == pytest.approx(made.argument_bytes, rel=0.1)
