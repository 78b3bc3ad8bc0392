"""Counting the launches of a program for a GPU: on a sequence of thunks written by hand."""

import pytest

from bench.compiled.chips import chip
from bench.compiled.hlo import parse
from bench.compiled.roofline import least_seconds
from bench.gpu import command
from bench.gpu.counting import Costs, Counting
from bench.gpu.described import devices_of
from bench.gpu.lines import LAUNCH_SECONDS, line
from bench.gpu.thunks import GRAPH, LOOP, Thunk, read_thunks

SEQUENCE = """
001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=008 (1)]
        004: kCustomKernel [source       | sink        ] loop_add_fusion grid: [4, 2, 1] threads: [1, 1, 1]
        005: kConditional [source       | sink        ]
          false_branch:
            006: kCustomKernel [source | sink] sorting grid: [1, 1, 1] threads: [1, 1, 1]
            007: kCustomKernel [source | sink] sorting grid: [1, 1, 1] threads: [1, 1, 1]
    008: kWhile [prev=000 (1) | sink        ]
condition:
        009: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        010: kCustomKernel [source | sink] add grid: [1, 1, 1] threads: [1, 1, 1]
"""  # noqa: E501
METADATA = "".join(
    f'thunk_metadata {{ profile_annotation: "{name}" thunk_id: {number} }}\n'
    for number, name in ((2, "main.1"), (5, "choice.1"), (8, "inner.1"))
)
PROGRAM = """
%nothing (x.0: s32[]) -> s32[] {
  ROOT %x.0 = s32[] parameter(0)
}

ENTRY %main (p.0: s32[]) -> s32[] {
  %p.0 = s32[] parameter(0)
  %choice.1 = s32[] conditional(%p.0, %p.0), branch_computations={%nothing, %nothing}, metadata={op_name="jit(_run)/while/body/verify/filters/cond"}
  %inner.1 = s32[] while(%choice.1), condition=%nothing, body=%nothing, metadata={op_name="jit(_run)/while/body/verify/while"}TURNS
  ROOT %main.1 = s32[] while(%inner.1), condition=%nothing, body=%nothing, metadata={op_name="jit(_run)/while"}
}
"""  # noqa: E501


def counted(turns: int | None) -> tuple[Counting, list[Thunk]]:
    known = "" if turns is None else f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    instructions = parse(PROGRAM.replace("TURNS", known)).entry.by_name
    (_, main) = read_thunks(SEQUENCE, METADATA).parts[""]
    return Counting(instructions, most_turns=4), main.parts["body"]


def test_thunks_are_a_tree():
    root = read_thunks(SEQUENCE, METADATA)
    copy, main = root.parts[""]
    assert (copy.kind, main.kind, main.instruction) == ("kCopy", LOOP, "main.1")
    graph, inner = main.parts["body"]
    assert graph.kind == GRAPH and [t.blocks for t in graph.parts[""]] == [8, 0]
    assert [t.kernel for t in inner.parts["condition"]] == ["less"]
    assert {t.kernel for t, captured in root.walk() if captured} == {
        "loop_add_fusion", "sorting", "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "launches", "waits"),
    [
        # a kernel; a branch of none or of two kernels; 3 turns of one, without a test
        (3, (4, 6), (0, 0)),
        # up to 4 turns with a test before each and after the last, for which the host waits
        (None, (2, 12), (1, 5)),
    ],
)
def test_launches_and_waits_of_branches_and_loops(turns, launches, waits):
    count, body = counted(turns)
    assert count.all(body, captured=False) == Costs(launches, waits)


def test_in_a_graph_nothing_waits():
    count, body = counted(None)
    assert count.all(body, captured=True).waits == (0, 0)
    described = [count.describe(thunk, True) for thunk, _ in ((body[1], True),)]
    assert described == ["0-4 x 1 verify"]


def test_the_least_time_has_the_launches():
    cell = {
        "size": "1b", "dtype": "bfloat16", "drafter": "none", "chips": 1, "chip": "h100",
        "batch": 1, "capacity": 1024, "bytes_per_step": {"weights": 3350000000}, "flops": 0,
        "int8_operations": 0, "launches_least": 500, "launches_most": 700, "waits_least": 1,
        "waits_most": 2, "whole_loop": False, "graphs": 3, "terms_written": 2,
        "terms_written_bytes": 4000000, "padded": 0, "padded_bytes": 0, "cache_copies": 0,
        "tables_gathered": 0, "products": {"Triton": 3}, "library_calls": {}, "of_one_block": 1,
        "scratch_bytes": 1000000, "fits": True, "missing_bytes": 0, "compile_seconds": 1.0,
    }  # fmt: skip
    assert least_seconds(cell, chip("h100")) == pytest.approx(1e-3)
    assert LAUNCH_SECONDS * 500 == pytest.approx(1e-3)
    shown = [entry.strip() for entry in line(cell).split("|")]
    assert "500-700" in shown and "2 (4 MB)" in shown
    assert shown[-5:-2] == ["1.00", "1.00", "2.00"]


def failure(capsys, *argv):
    with pytest.raises(SystemExit):
        command.run(lambda: command.main(list(argv)))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chip", "v5e"], ["v5e", "h100"]),
        (["--chips", "0"], ["--chips is 0", "at least 1"]),
        (["--chips", "16"], ["16 chips", "at most 8"]),
        (["--layers", "3"], ["--layers is [3]", "two numbers"]),
        (["--target-config", "nowhere"], ["nowhere"]),
    ],
)
def test_bad_input_is_named(capsys, argv, words):
    message = failure(capsys, *argv)
    assert [word for word in words if word not in message] == [] and "Traceback" not in message


def test_without_the_plugin_the_cure_is_named(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax_cuda12_plugin", None)
    assert "pip install -r .ci/gpu.txt" in failure(capsys, "--chip", "h100")
    with pytest.raises(ValueError, match="v5e is not described"):
        devices_of(chip("v5e"), 1)
