"""Counting the bytes of a compiled program: on programs written by hand, and on one of a CPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from toys import TRANSFORMERS as toys

from bench.compiled.best import best, tokens_per_second
from bench.compiled.chips import CHIPS, Chip, chip
from bench.compiled.extrapolated import extrapolated
from bench.compiled.families import NAMES
from bench.compiled.flops import product_flops
from bench.compiled.hlo import parse
from bench.compiled.roofline import least_seconds, table, tokens_per_step
from bench.compiled.sizes import config_of, shapes_of
from bench.compiled.traffic import host_transfers, traffic
from bench.tpu import command
from bench.tpu.measured import beside
from bench.tpu.published import TOKENS, compare
from bench.tpu.slices import devices_of, slice_of
from specjax.models import is_packed

HEADER = "HloModule jit__run, is_scheduled=true\n"
BODY = """
%update (cache.0: bf16[2,4,256,64], new.0: bf16[2,4,1,64], at.0: s32[]) -> bf16[2,4,256,64] {
  %cache.0 = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %new.0 = bf16[2,4,1,64]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %at.0 = s32[]{:T(128)} parameter(2)
  ROOT %dus.0 = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} dynamic-update-slice(%cache.0, %new.0, %at.0, %at.0, %at.0, %at.0)
}

%nothing (x.0: f32[2,1000]) -> f32[2,1000] {
  ROOT %x.0 = f32[2,1000]{1,0:T(8,128)} parameter(0)
}

%sorted (x.1: f32[2,1000]) -> f32[2,1000] {
  %x.1 = f32[2,1000]{1,0:T(8,128)} parameter(0)
  ROOT %sort.0 = f32[2,1000]{1,0:T(8,128)} sort(%x.1), dimensions={1}, to_apply=%nothing
}

%body (carry.0: (bf16[512,1024], bf16[2,4,256,64], f32[2,1000], s32[])) -> (bf16[512,1024], bf16[2,4,256,64], f32[2,1000], s32[]) {
  %carry.0 = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %kernel = bf16[512,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%carry.0), index=0
  %cache = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%carry.0), index=1
  %logits = f32[2,1000]{1,0:T(8,128)} get-tuple-element(%carry.0), index=2
  %number = s32[]{:T(128)} get-tuple-element(%carry.0), index=3
  %half.0 = ((bf16[512,1024]{1,0:T(8,128)(2,1)}), bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%kernel), slice={[0:256], [0:1024]}
  %half.1 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} slice-done(%half.0)
  %other.0 = ((bf16[512,1024]{1,0:T(8,128)(2,1)}), bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%kernel), slice={[256:512], [0:1024]}
  %other.1 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} slice-done(%other.0)
  %joined = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%half.1, %other.1), custom_call_target="ConcatBitcast"
  %new = bf16[2,4,1,64]{3,2,1,0:T(8,128)(2,1)S(1)} custom-call(%joined), custom_call_target="Product", metadata={op_name="jit(_run)/while/body/verify/Transformer/dot_general"}
  %staged = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} fusion(%cache, %new, %number), kind=kLoop, calls=%update, metadata={op_name="jit(_run)/while/body/verify/Transformer/dynamic_update_slice"}
EXTRA
  %all = f32[2,1000]{1,0:T(8,128)S(1)} all-reduce(%logits), to_apply=%nothing, metadata={op_name="jit(_run)/while/body/verify/Transformer/o"}
  %chosen = f32[2,1000]{1,0:T(8,128)} conditional(%number, %logits, %logits), branch_computations={%nothing, %sorted}, metadata={op_name="jit(_run)/while/body/verify/SCOPE/cond"}
  ROOT %out = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%kernel, %staged, %chosen, %number)
}

%done (carry.1: (bf16[512,1024], bf16[2,4,256,64], f32[2,1000], s32[])) -> pred[] {
  %carry.1 = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  ROOT %yes = pred[]{:T(512)} constant(true)
}

ENTRY %main (p.0: bf16[512,1024], p.1: bf16[2,4,256,64], p.2: f32[2,1000], p.3: s32[]) -> bf16[2,4,256,64] {
  %p.0 = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params.target[\\'head\\'][\\'kernel\\']"}
  %p.1 = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="state.cache.keys[0]"}
  %p.2 = f32[2,1000]{1,0:T(8,128)} parameter(2), metadata={op_name="state.tokens"}
  %p.3 = s32[]{:T(128)} parameter(3), metadata={op_name="max_steps"}
  %first = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%p.0, %p.1, %p.2, %p.3)
  %loop = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) while(%first), condition=%done, body=%body
  ROOT %last = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
KERNEL, LOGITS = 512 * 1024 * 2, 8 * 1024 * 4  # two rows are padded to 8, 1000 words to 1024
CACHE_LAYOUT = "bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}"
CACHE, TOKEN = 2 * 4 * 256 * 128 * 2, 2 * 4 * 64 * 2  # heads of 64 are padded to 128


def program(extra="", scope="filters"):
    return parse(HEADER + BODY.replace("EXTRA\n", extra).replace("SCOPE", scope))


def test_bytes_by_kind():
    """A kernel in two slices is read once, an update in place writes its token, and a branch of
    the filters that does nothing costs nothing."""
    counted = traffic(program(), (1000,))
    number = 4  # the slot of the update
    wanted = {"weights": KERNEL, "cache_written": TOKEN, "collectives": LOGITS, "other": number}
    assert counted.bytes == wanted
    assert counted.collectives == {("all-reduce", LOGITS): 1}
    assert counted.copies == counted.evictions == []
    assert counted.by_phase["verify"]["cache_written"] == TOKEN


def test_the_dearest_branch_counts_outside_of_filters():
    counted = traffic(program(scope="choice"), (1000,))
    assert counted.bytes["logits"] == 2 * LOGITS


def test_a_copy_of_a_cache_is_seen():
    layout = "bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}"
    copied = traffic(program(f"  %copied = {layout} copy(%cache)\n"), (1000,))
    assert copied.copies == [("state.cache.keys[0]", CACHE)]
    assert copied.bytes["cache_copied"] == copied.bytes["cache_read"] == CACHE
    chip = layout.replace("(2,1)}", "(2,1)S(1)}")
    evicted = traffic(
        program(
            f"  %c.0 = ({chip}, {layout}, u32[]{{:S(2)}}) copy-start(%cache)\n"
            f"  %c.1 = {chip} copy-done(%c.0)\n"
            f"  %c.2 = ({layout}, {chip}, u32[]{{:S(2)}}) copy-start(%c.1)\n"
            f"  %c.3 = {layout} copy-done(%c.2)\n"
        ),
        (1000,),
    )
    assert evicted.copies == [] and evicted.evictions == [("state.cache.keys[0]", CACHE)]
    assert evicted.bytes["cache_copied"] == evicted.bytes["cache_read"] == CACHE


def test_a_copy_in_a_cheaper_branch_is_seen():
    """Its bytes do not count, since another branch is dearer, but the copy is named."""
    layout = "bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}"
    shape = layout.split("{")[0]
    branches = "".join(
        f"%{name} (c.{name}: {shape}) -> {shape} {{\n  %c.{name} = {layout} parameter(0)\n"
        + "".join(
            f"  {'ROOT ' if i == copies - 1 else ''}%c.{name}.{i} = {layout} copy(%c.{name})\n"
            for i in range(copies)
        )
        + "}\n\n"
        for name, copies in (("once", 1), ("twice", 2))
    )
    choice = (
        f"  %choice = {layout} conditional(%number, %cache, %cache), "
        "branch_computations={%once, %twice}\n"
    )
    text = (branches + BODY.lstrip()).replace("EXTRA\n", choice)
    counted = traffic(parse(HEADER + text.replace("SCOPE", "filters")), (1000,))
    assert counted.copies == 3 * [("state.cache.keys[0]", CACHE)]
    assert counted.bytes["cache_copied"] == 2 * CACHE


def test_a_widened_weight_is_seen():
    wide = "f32[512,1024]{1,0:T(8,128)}"
    counted = traffic(program(f"  %wide = {wide} convert(%kernel)\n"), (1000,))
    assert counted.copies == [("params.target['head']['kernel']", 2 * KERNEL)]
    assert counted.bytes["weights"] == 4 * KERNEL


def test_a_weight_that_was_laid_anew_is_a_weight():
    """A v7x calls its sparse cores for it, without waiting."""
    kernel, laid = "bf16[512,1024]{1,0:T(8,128)(2,1)}", "bf16[512,1024]{1,0:T(16,128)(2,1)}"
    counted = traffic(
        program(
            f"  %laid.0 = (({kernel}, token[]), {laid}) call-start(%kernel), to_apply=%nothing\n"
            f"  %laid.1 = {laid} call-done(%laid.0)\n"
            "  %read = bf16[2,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%laid.1), "
            'custom_call_target="P"\n'
        ),
        (1000,),
    )
    assert counted.bytes["weights"] > 2 * KERNEL


@pytest.mark.parametrize(
    ("scope", "turns", "blocks"), [("fewer_drafts", 0, 1), ("blocks", 5, 5), ("other", 1, 5)]
)
def test_loops_count_by_their_scope(scope, turns, blocks):
    """The pass of rows without drafts runs instead of another, and blocks as often as is said."""
    inner = (
        "  %inner = (bf16[512,1024]{1,0:T(8,128)(2,1)}, bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)}, "
        "f32[2,1000]{1,0:T(8,128)}, s32[]{:T(128)}) while(%carry.0), condition=%done, "
        f'body=%turn, metadata={{op_name="jit(_run)/while/body/verify/{scope}/while"}}\n'
    )
    turn = BODY[BODY.index("%body (") : BODY.index("%done (")].replace("%body (", "%turn (")
    copy = "  %copied = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)} copy(%cache)\n"
    text = BODY.replace("%body (", turn.replace("EXTRA\n", copy) + "%body (")
    parsed = parse(HEADER + text.replace("EXTRA\n", inner).replace("SCOPE", "filters"))
    counted = traffic(parsed, (1000,), blocks)
    assert counted.bytes["weights"] == (1 + turns) * KERNEL
    assert counted.copies == [("state.cache.keys[0]", CACHE)]  # even of a loop that is not counted


def test_a_state_that_is_read_and_written_counts_apart():
    text = HEADER + BODY.replace("EXTRA\n", "").replace("SCOPE", "filters")
    text = text.replace("state.cache.keys[0]", "state.cache.states[0].state")
    counted = traffic(parse(text), (1000,))
    assert counted.bytes["states"] == TOKEN and counted.bytes["cache_written"] == 0
    copy = f"  %copied = {CACHE_LAYOUT} copy(%cache)\n"
    copied = traffic(parse(text.replace("  %staged", copy + "  %staged", 1)), (1000,))
    assert copied.bytes["states"] == TOKEN + 2 * CACHE


@pytest.mark.parametrize(("pairs", "read"), [(3, 3), (40, 4)])
def test_a_kernel_of_experts_reads_as_many_as_its_pairs_choose(pairs, read):
    """A stack of 4 experts [128, 256]: at most one expert for each pair, and none twice."""
    stack = "bf16[4,128,256]{2,1,0:T(8,128)(2,1)}"
    made = "bf16[40,256]{1,0:T(8,128)(2,1)S(1)}"
    extra = (
        f"  %stack = {stack} bitcast(%kernel)\n"
        f'  %experts = {made} custom-call(%stack), custom_call_target="tpu_custom_call", '
        'frontend_attributes={ragged_dot_tiling="8,128,256"}, '
        f'metadata={{op_name="jit(_run)/while/body/verify/mlp/pairs_{pairs}/ragged_dot_general"}}\n'
    )
    counted = traffic(program(extra), (1000,))
    size = KERNEL + read * 128 * 256 * 2
    assert counted.bytes["weights"] == size and counted.weights == {"target": size}


def test_figures_of_all_layers_follow_from_two_numbers_of_them():
    def cell(weights):
        names = ("target_bytes", "active_bytes", "flops", "int8_operations", "argument_bytes",
                 "scratch_bytes", "predicted_bytes")  # fmt: skip
        return {
            **dict.fromkeys(names, weights), "bytes_per_step": {"weights": weights, "other": 7},
            "compile_seconds": 1.0, "copies": [],
        }  # fmt: skip

    made = extrapolated(cell(12), cell(22), (2, 4), 10, memory=100)
    assert made["bytes_per_step"] == {"weights": 52, "other": 7} and made["flops"] == 52
    assert not made["fits"] and made["missing_bytes"] == 4
    assert made["compiled_layers"] == [2, 4] and made["compile_seconds"] == 2.0


def test_published_targets_have_their_sizes():
    """Parameters by the names of the models, those of one token included."""
    billions = {"qwen3.5-4b": 4.2, "qwen3.5-35b-a3b": 34.7, "gpt-oss-20b": 20.9,
                "glm-4.7-flash": 29.9}  # fmt: skip
    assert set(NAMES) == set(billions)
    for name, wanted in billions.items():
        shapes = shapes_of(config_of(name))
        found = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params)) / 1e9
        assert found == pytest.approx(wanted, rel=0.01), (name, found)
        assert shapes_of(config_of(name, 1024)).model.vocab_size == 1024


def test_shapes_in_int4_are_those_of_the_plain_matrices():
    """Codes have four bits, in groups of 128 inputs; experts are stacks of them."""
    for name in ("1b", "qwen3.5-35b-a3b"):
        config = config_of(name)
        plain, packed = (
            flatten_dict(shapes_of(config, dtype).params, is_leaf=lambda _, leaf: is_packed(leaf))
            for dtype in ("bfloat16", "int4")
        )
        rounded = [path for path, leaf in packed.items() if is_packed(leaf)]
        assert len(rounded) >= 7 * config.num_layers and not any("head" in p for p in rounded)
        for path, leaf in packed.items():
            assert leaf.shape == plain[path].shape, path
        for leaf in (packed[path] for path in rounded):
            assert leaf.codes.dtype == jnp.uint4 and leaf.group == 128 == leaf.codes.shape[-2]
            assert leaf.codes.size == leaf.size and leaf.scales.size == leaf.size // 128


def test_host_transfers_are_named():
    out = "  %sent = token[] outfeed(%logits), metadata={}\n"
    assert host_transfers(program(out)) == ["sent"] and host_transfers(program()) == []


def test_a_program_of_a_cpu_reads_its_weights():
    """The same counting holds for what XLA prints for another platform."""
    decoder, params = toys.decoder("none", "match"), toys.params("none")
    state = toys.prefill(decoder, params)
    text = decoder.lower(params, state).compile().as_text()
    counted = traffic(parse(text), (toys.VOCAB,))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params.target))
    embedding = params.target["embedding"].nbytes  # of which rows alone are read
    assert counted.bytes["weights"] >= size - embedding
    assert counted.bytes["cache_read"] > 0 and host_transfers(parse(text)) == []


def test_products_are_counted():
    def function(x, y):
        return jax.lax.scan(lambda c, _: (c @ y, None), x, length=3)[0]

    x = np.zeros((4, 8), np.float32)
    assert product_flops(function, x, np.zeros((8, 8), np.float32)) == {"float": 3 * 2 * 4 * 8 * 8}
    small, matrix = np.zeros((4, 8), np.int8), np.zeros((8, 8), np.int8)
    assert product_flops(lambda x, y: x @ y, small, matrix) == {"int8": 2 * 4 * 8 * 8}


def test_the_least_time_of_a_step():
    """Bytes over bandwidth, or operations over their peak, and the sums of a mesh on top."""
    moved = {"weights": 819_000_000, "cache_read": 0, "collectives": 2_000_000}
    cell = {"bytes_per_step": moved, "flops": 10**9, "int8_operations": 0, "chips": 1,
            "collectives": []}  # fmt: skip
    assert least_seconds(cell, CHIPS["v5e"]) == pytest.approx(1e-3)
    busy = {**cell, "flops": 197 * 10**10}
    assert least_seconds(busy, CHIPS["v5e"]) == pytest.approx(10e-3)
    fast = {**cell, "int8_operations": 394 * 10**10}
    assert least_seconds(fast, CHIPS["v5e"]) == pytest.approx(10e-3, rel=1e-3)
    mesh = {**cell, "chips": 2, "collectives": [{"kind": "all-reduce", "bytes": 10**6, "count": 2}]}
    sums = 2_000_000 / 200e9 + 2 * 2 * 1e-6
    assert least_seconds(mesh, CHIPS["v5e"]) == pytest.approx(1e-3 + sums)


def test_expected_tokens_of_a_step():
    assert tokens_per_step(0, 0.8) == 1 and tokens_per_step(4, 1.0) == 5
    assert tokens_per_step(4, 0.8) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_only_chains_show_a_speed_up():
    """A tree has no formula, and without a cell of no drafts there is nothing to compare with."""
    moved = {"weights": 10**9, "collectives": 0}
    common = {"bytes_per_step": moved, "flops": 0, "int8_operations": 0, "collectives": [],
              "size": "1b", "dtype": "bfloat16", "chips": 1,
              "batch": 1, "capacity": 8, "filled": 8}  # fmt: skip
    cells = [
        {**common, "drafter": name, "lookahead": lookahead}
        for name, lookahead in (("none", 0), ("draft", 4), ("tree", None))
    ]
    gains = [
        line.split("|")[-2].strip() for line in table(cells, [CHIPS["v5e"]], (1.0,)).split("\n")
    ]
    assert gains[2:] == ["", "5.00", ""]
    alone = table(cells[1:], [CHIPS["v5e"]], (1.0,))
    assert "5.00" not in alone


def test_the_best_case_fits_and_has_an_expected_rate():
    """A mesh that lacks memory is left out, and so is a drafter without an acceptance rate."""

    def cell(drafter, chips, size, lookahead=4):
        return {
            "size": "8b", "dtype": "bfloat16", "drafter": drafter, "chips": chips, "batch": 2,
            "capacity": 8, "filled": 8, "lookahead": lookahead, "flops": 0, "int8_operations": 0,
            "bytes_per_step": {"weights": size, "collectives": 0}, "collectives": [],
            "argument_bytes": size, "scratch_bytes": 0,
        }  # fmt: skip

    v5e = CHIPS["v5e"]
    cells = [
        cell("none", 1, 17 * 10**9, 0), cell("none", 2, 819 * 10**7, 0),
        cell("none", 4, 819 * 10**7, 0),
        cell("draft", 2, 1638 * 10**7), cell("ngram", 2, 819 * 10**7), cell("tree", 2, 10, None),
    ]  # fmt: skip
    assert tokens_per_second(cells[0], v5e, {}) is None
    assert tokens_per_second(cells[3], v5e, {"draft": 1.0}) is None  # more than 16 GB
    assert tokens_per_second(cells[4], v5e, {}) is None
    assert tokens_per_second(cells[5], v5e, {"tree": 1.0}) is None
    assert tokens_per_second(cells[4], v5e, {"ngram": 1.0}) == pytest.approx(500)
    row = best(cells, [v5e], {"ngram": 1.0}).split("\n")[-1].split("|")[6:-1]
    assert [entry.strip() for entry in row] == [
        "ngram, 2 chips", "500", "5.00", "ngram, 2 chips", "500", "5.00",
    ]  # fmt: skip
    assert "fits on none" in best(cells[:1], [v5e], {})


def test_cells_are_read_again(tmp_path, capsys, monkeypatch):
    """Tables of cells that were written before, without a compiler."""
    path = tmp_path / "cells.json"
    path.write_text(json.dumps([]))
    command.main(["--read", str(path)])
    assert "tokens/s of a row" in capsys.readouterr().out


def test_published_cases_are_compared_without_a_fit():
    """Tokens a step over the longer step, beside what was published; missing cases are left out."""
    common = {"dtype": "bfloat16", "size": "8b", "chip": "v5p", "chips": 1, "batch": 1, "flops": 0,
              "int8_operations": 0, "collectives": []}  # fmt: skip
    plain = {**common, "drafter": "none", "bytes_per_step": {"weights": 10**9, "collectives": 0}}
    slow = {
        **common,
        "drafter": "dflash",
        "bytes_per_step": {"weights": 2 * 10**9, "collectives": 0},
    }
    assert compare([plain]) is None
    row = compare([plain, slow]).split("\n")[-1].split("|")
    tokens = sum(TOKENS["dflash"]) / 9
    assert [entry.strip() for entry in row[5:10]] == [
        f"{tokens:.2f}", "2.00", f"{tokens / 2:.2f}", "3.13", f"{tokens / 2 / 3.13 - 1:+.0%}",
    ]  # fmt: skip


def test_cells_are_measured_beside_their_prediction():
    """Tiny cells run here with random weights; shared parts of the target are used once."""
    common = {
        "size": "tiny", "dtype": "float32", "draft": "tiny", "vocab_size": 512, "chips": 1,
        "batch": 2, "capacity": 256, "filled": 100, "flops": 10**6, "int8_operations": 0,
        "collectives": [], "bytes_per_step": {"weights": 10**6, "collectives": 0},
    }  # fmt: skip
    cells = [{**common, "drafter": name} for name in ("none", "draft", "dflash")]
    here = Chip("here", 1e12, 1e9, 1e12, 1e12, 1e9)
    rows = [line.split("|")[1:-1] for line in beside(cells, here).splitlines()[2:]]
    assert [row[2].strip() for row in rows] == ["none", "draft", "dflash"]
    for row in rows:
        if row[4].strip() != "disturbed":
            assert float(row[4]) == 1.0  # 1 MB at 1 GB/s
            assert float(row[5]) > 0


def test_slices_hold_the_chips():
    assert slice_of(CHIPS["v5e"], 1) == "v5e:2x2" and slice_of(CHIPS["v5e"], 8) == "v5e:2x4"
    assert slice_of(CHIPS["v5p"], 8) == "v5p:2x2x2"


def failure(capsys, *argv):
    with pytest.raises(SystemExit):
        command.run(lambda: command.main(list(argv)))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chip", "v9"], ["'v9'", "v5e", "v6e"]),
        (["--chip", "h100"], ["h100 is no TPU"]),
        (["--chips", "1000"], ["1000 chips", "1 to 256"]),
        (["--chips", "0"], ["--chips is 0", "at least 1"]),
        (["--batch", "0"], ["--batch is 0", "at least 1"]),
        (["--alpha", "1.5"], ["--alpha is [1.5]"]),
        (["--also", "v9"], ["'v9'"]),
        (["--filled", "0"], ["--filled is 0", "at least 1"]),
        (["--target-config", "nowhere"], ["nowhere"]),
        (["--size", "3b"], ["3b"]),
        (["--vocab-size", "0"], ["--vocab-size is 0", "at least 1"]),
        (["--expect", "draft"], ["'draft'", "DRAFTER=ALPHA"]),
        (["--expect", "draft=2"], ["'draft=2'", "[0, 1]"]),
        (["--expect", "what=0.5"], ["'what=0.5'", "ngram"]),
        (["--layers", "3"], ["--layers is [3]", "two numbers"]),
        (["--layers", "4", "2"], ["--layers is [4, 2]", "smaller one first"]),
        (["--read", "nowhere.json"], ["--read nowhere.json"]),
        (["--measure", "--chips", "4"], ["--measure", "1b on 4", "--chips 1"]),
        (["--measure", "--target-config", "x"], ["--measure", "not x on 1"]),
    ],
)
def test_bad_input_is_named(capsys, argv, words):
    message = failure(capsys, *argv)
    assert [word for word in words if word not in message] == [] and "Traceback" not in message


def test_without_libtpu_the_cure_is_named(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "libtpu", None)
    assert 'pip install "jax[tpu]"' in failure(capsys, "--chip", "v5e")
    with pytest.raises(ValueError, match="libtpu"):
        devices_of(chip("v5e"), 1)
