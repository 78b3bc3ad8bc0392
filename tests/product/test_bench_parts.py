"""The parts of the benchmark: imposed acceptance, equal weights, goals, pictures, growth and
Spec-Bench."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

import specjax
from bench import __main__ as bench
from bench import (
    experts,
    first_call,
    first_process,
    goals,
    growth,
    imposed,
    laws,
    machine,
    predictions,
    report,
    step_parts,
    weights,
)
from bench.contestants import ours, theirs
from specjax.decoding.stats import expected_accepted_length

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny"


@pytest.mark.parametrize("rows", [1, 8])
def test_coins_keep_what_the_rate_promises(rows):
    """Acceptance and length are as promised for every lookahead over all rows, and rows differ."""
    right = imposed.coins(rows, 64, 0.8, [2, 4])
    assert right.shape == (rows, 64)
    assert len(np.unique(right, axis=0)) == rows
    for gamma in (2, 4):
        passes, accepted, tested = np.sum([imposed.walk(row, gamma) for row in right], axis=0)
        assert accepted / tested == pytest.approx(0.8, abs=0.015)
        assert right.size / passes == pytest.approx(expected_accepted_length(0.8, gamma), rel=0.02)


def test_the_imposed_figures_of_the_table_of_int8():
    """docs/benchmarks.md prints alpha and tau of these coins, which no machine changes."""
    passes, accepted, tested = imposed.walk(imposed.coins(1, 64, 0.8, [4])[0], 4)
    cells = f"| {accepted / tested:.2f}, imposed | {64 / passes:.2f} |"
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count(cells) == text.count(", imposed |") == 2


def test_a_walk_by_hand():
    """One pass accepts two and rejects one, one accepts all and adds the bonus token, one is cut
    by the end."""
    assert imposed.walk(np.array([1, 1, 0, 1, 1, 1], bool), 2) == (2, 4, 4)
    assert imposed.walk(np.array([0, 1, 0, 1], bool), 2) == (3, 2, 4)


@pytest.fixture(scope="module")
def pair():
    return weights.random_on_device("tiny", 256, "float32")


def test_imposed_contestants_say_the_same(pair, monkeypatch):
    """specjax, transformers and the PyTorch loop give the text of plain decoding and accept as
    the coins say."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    torch_loop = pytest.importorskip("bench.torch_loop")
    monkeypatch.setattr("torch.compile", lambda step, **_: step)
    prompts, new = np.random.default_rng(0).integers(1, 256, (2, 6), dtype=np.int32), 16
    plain = ours(pair.target, None, "plain", width=4)
    text, right = plain.run(prompts, new), imposed.coins(2, new, 0.7, [3])
    whole = np.concatenate([prompts, text], axis=1)
    script = np.pad(whole, ((0, 0), (0, 4))), np.pad(right, ((0, 0), (6, 4)))
    drafted = ours(pair.target, pair.draft, "draft", 3, script)
    for contestant in (
        drafted,
        theirs(pair, "plain"),
        torch_loop.loop(pair),
        torch_loop.loop(pair, 3, script),
    ):
        np.testing.assert_array_equal(contestant.run(prompts, new), text)
    passes, accepted, tested = np.sum([imposed.walk(row, 3) for row in right], axis=0)
    counts = drafted.counts[0]
    assert [counts.passes.sum(), counts.accepted.sum(), counts.tested.sum()] == [
        passes,
        accepted,
        tested,
    ]
    np.testing.assert_array_equal(
        torch_loop.loop(pair, 3).run(prompts, new), text
    )  # real acceptance


def test_laws_hold_here(pair):
    """One key gives one text whatever the number of drafts; the auditor has tests of its own."""
    proposer, arrays = laws.proposers(pair, 2)["the target as its own draft"]
    decoder = laws.Decoder(pair.target.model, proposer, laws.Match(), (), 32)
    assert laws.drafts_of_one_width(
        decoder, laws.Params(pair.target.params, arrays), np.arange(1, 9), 12
    )


def row(library, proposer, gamma, seconds, **more):
    """A row with three samples of one item; [] if none is clean."""
    rate = seconds and 60 / sorted(seconds)[1]
    return {
        "library": library,
        "proposer": proposer,
        "num_drafts": gamma,
        "seconds": [seconds],
        "tokens_per_second": rate or None,
        "speedup": 6 * (rate or 0) / 60 or None,
        **more,
    }


REPORT = {
    "arguments": {"batch": 1, "prompt_length": None, "vocab_size": 256},
    "rows": [
        row("specjax", "plain", 0, [6.0] * 3, share_of_bandwidth=0.8, over_peer=(0.9, 0.8, 1.1),
            peer="llama.cpp"),
        row("specjax", "draft", 4, [2.0] * 3, parts_over_step=0.9),
        row("transformers", "plain", 0, [12.0] * 3),
        row("llama.cpp", "draft", 4, [3.0] * 3),
        row("openvino", "draft", 4, []),
    ],
}  # fmt: skip


def test_goals_are_judged():
    """A goal is met or missed by its interval; open if that has the goal inside, or if a side has
    no undisturbed sample."""
    judged = [goals.judge(goal, REPORT) for goal in goals.GOALS if goal.run == "110M f32"]
    wanted = ["missed", "open", "met", "met", "missed", "open", "met", "open"]
    assert [row["verdict"] for row in judged] == wanted
    assert judged[0]["measured"] == (2.0, 2.0, 2.0) and judged[0]["peer"] == "transformers"
    assert judged[1]["measured"] == (0.9, 0.8, 1.1) and judged[1]["peer"] == "llama.cpp"
    assert judged[2]["measured"] == (3.0, 3.0, 3.0) and judged[2]["peer"] == ""
    assert judged[5]["measured"] is None
    assert judged[6]["measured"][0] == 1.5 and judged[6]["peer"] == "llama.cpp draft 4"
    alone = {**REPORT, "rows": [r for r in REPORT["rows"] if r["library"] != "llama.cpp"]}
    alone["rows"] = [r for r in alone["rows"] if r["library"] != "openvino"]
    over_peers = [goals.judge(goal, alone) for goal in goals.GOALS if "peer" in goal.case]
    assert over_peers and all(row["verdict"] == "open" for row in over_peers)
    assert {goal.run for goal in goals.GOALS} == set(goals.RUNS)
    quick = goals.GoalsOptions(quick=True, engines=("llama.cpp",), engine_python="python")
    settings = {name: goals.settings(name, quick) for name in goals.RUNS}
    assert settings["110M f32 batch 8"].batch == 8 and settings["110M bf16"].dtype == "bfloat16"
    assert settings["shipped pair"].engines == ("llama.cpp",)
    assert {asked.new_tokens for asked in settings.values()} == {16}


def test_an_item_without_a_sample_is_an_error():
    with pytest.raises(ValueError, match="no sample of 1 of 2 items is left"):
        report.ratio([[1.0], []], [[1.0], [1.0]])


def test_parts_over_a_step():
    """The verification pass plus the draft's passes, divided by a step; it may exceed 1 and is
    not cut."""
    alone = {("plain at 5 rows", 0): 1.6, ("draft alone", 0): 0.2}
    steps = {**alone, ("draft", 4): 2.0, ("ngram", 4): 1.5}
    assert report.parts_over_step(steps, "draft", 4) == pytest.approx(1.2)
    assert report.parts_over_step(steps, "ngram", 4) == pytest.approx(1.6 / 1.5)
    assert report.parts_over_step(steps, "draft", 6) is None
    assert report.parts_over_step({**steps, ("draft alone", 0): None}, "draft", 4) is None


def test_several_batches_are_several_reports(monkeypatch, tmp_path, capsys):
    """Each batch size has a table and a column of the picture."""
    pytest.importorskip("matplotlib")

    def measure(arguments):
        return {**REPORT, "arguments": {**REPORT["arguments"], "batch": arguments.batch}}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "table", lambda report: f"batch {report['arguments']['batch']}")
    files = [tmp_path / "reports.json", tmp_path / "picture.png"]
    bench.main(["--batch", "1", "8", "--json", str(files[0]), "--plot", str(files[1])])
    assert capsys.readouterr().out.split("\n\n")[:2] == ["batch 1", "batch 8"]
    assert [report["arguments"]["batch"] for report in json.loads(files[0].read_text())] == [1, 8]
    figure = bench.draw(json.loads(files[0].read_text()))
    assert [axes.get_title() for axes in figure.axes[:2]] == ["batch 1", "batch 8"]
    promised = [
        line
        for line in figure.axes[2].lines
        if line.get_linestyle() == ":" and len(line.get_xdata())
    ]
    assert promised[0].get_ydata()[0] == pytest.approx(3.0 / 0.9)


def test_growth_says_where_it_departs():
    """Deviations from a straight line are named with their position; each cost has a panel."""
    x = np.array([1.0, 2, 4, 8])
    assert growth.law(x, 3 + 2 * x, "linear")[1] == ""
    assert growth.law(x, np.array([5.0, 5, 5, 15]), "flat")[1].startswith("departs: ")
    pytest.importorskip("matplotlib")
    report = {
        "batch": [{"batch": n, "step": 0.1 * n, "memory": 1e6, "compile": 2.0} for n in (1, 2)]
    }
    assert len(growth.plot(report).axes) == len(growth.PARTS) == 3


def test_the_ceiling_is_the_best_read(monkeypatch):
    monkeypatch.setattr(machine, "bandwidths", lambda rounds: {"one": 39.0, "other": 70.0})
    monkeypatch.setattr(machine, "median_seconds", lambda call, rounds: 1.0)
    machine.ceilings.cache_clear()
    assert machine.ceilings()["bandwidth"] == 70.0
    machine.ceilings.cache_clear()


def test_accelerator_sh_reports_what_failed(tmp_path):
    """A part that fails does not stop the others, and the summary says so; unknown parts are
    refused."""
    script, python = ROOT / "bench" / "accelerator.sh", tmp_path / "python"
    python.write_text(
        '#!/bin/bash\n[ "$2" = bench.laws ] && exit 1\n'
        '[ "$1" = - ] && cat >/dev/null && echo {}\nexit 0\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
    done = subprocess.run([script, "--dry-run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "| laws | failed with status 1 |" in done.stdout and "| 8b | ran |" in done.stdout
    assert (tmp_path / "out" / "summary.md").read_text() == done.stdout
    done = subprocess.run([script, "9b"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "9b is neither" in done.stderr


def test_the_parts_of_a_step(capsys):
    folder = ROOT / "checkpoints" / "tiny" / "target"
    options = ["--target", str(folder), "--rows", "1", "3", "--rounds", "1"]
    step_parts.main([*options, "--dtypes", "int8", "int4"])
    printed = capsys.readouterr().out
    for name in ("step, kernels", "step, XLA", "products, kernels", "products, XLA"):
        assert re.search(rf"^\| {name} \|", printed, re.MULTILINE)
    # Two layers of seven matrices, and the output matrix.
    for dtype in (None, "int4"):
        assert len(list(step_parts.matrices(specjax.load(folder, dtype).params))) == 15
    with pytest.raises(SystemExit, match="2"):
        step_parts.main(["--rows", "0"])
    assert "--rows is 0; it must be at least 1" in capsys.readouterr().err


def test_the_table_of_experts(capsys):
    """Both forms are timed, and the bytes are those of the experts that rows chose."""
    sizes = ["--experts", "6", "--chosen", "6", "--hidden-size", "16", "--expert-size", "8"]
    experts.main([*sizes, "--rows", "1", "3", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "| rows | chosen experts | their MB | ragged_dot, ms | tiles, ms |" in printed
    assert (
        len(re.findall(r"^\| [13] \| 6 \| 0 \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)) == 2
    )
    with pytest.raises(SystemExit, match="2"):
        experts.main(["--chosen", "129"])
    assert "--chosen is 129; there are 128 experts" in capsys.readouterr().err


def test_predictions_for_imposed_acceptance(capsys):
    """All ways are measured, and drafts are accepted as often as was asked for."""
    options = ["--size", "tiny", "--vocab-size", "256", "--batch", "2", "--rounds", "1"]
    predictions.main(options)
    printed = capsys.readouterr().out
    for depth in (2, 4, 8):
        found = re.search(rf"^drafter of {depth} +(\d+\.\d+)", printed, re.MULTILINE)
        assert float(found[1]) == pytest.approx(expected_accepted_length(0.8, depth), rel=0.05)
    assert re.search(r"^auto +\d", printed, re.MULTILINE)
    for name, value in (("--acceptance", "1.5"), ("--batch", "0"), ("--new-tokens", "0")):
        with pytest.raises(SystemExit, match="2"):
            predictions.main([name, value])
        assert f"{name} is {value}; it must" in capsys.readouterr().err


def test_the_seconds_of_a_first_call(capsys):
    """The parts of the compilation are less than the whole, and each took some time."""
    sizes = ["--layers", "2", "--hidden-size", "16", "--prompt-tokens", "5"]
    first_call.main([*sizes, "--max-new-tokens", "3", "--proposer", "none"])
    proposer, layers, rows, cpu, seconds, *parts = (
        capsys.readouterr().out.splitlines()[-1].split(" | ")
    )
    assert (proposer, layers, rows) == ("| none", "2", "1")
    tracing, lowering, xla = (float(part.strip(" |")) for part in parts)
    rounding = 4 * 0.005  # of the four numbers that are printed
    assert 0 < tracing + lowering + xla <= float(seconds) + rounding and float(cpu) > 0
    with pytest.raises(SystemExit):
        first_call.main(["--hidden-size", "17"])
    assert "--hidden-size is 17; it must be a multiple of 16" in capsys.readouterr().err


def test_the_seconds_of_a_command(capsys):
    """Of a process without a cache, and of a second one."""
    first_process.main(["--commands", "imports", "--rounds", "1"])
    name, first, *_, second, _ = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert name == "| imports" and 0 < float(second) < 60 and 0 < float(first) < 60
    with pytest.raises(SystemExit):
        first_process.main(["--rounds", "0"])
    assert "--rounds is 0; it must" in capsys.readouterr().err
