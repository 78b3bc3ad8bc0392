"""The inputs, timing and report rows of `python -m bench`, on the tiny checkpoint."""

from __future__ import annotations

import json
import pathlib
import sys
import types

import numpy as np
import pytest

import specjax
from bench import __main__ as bench
from bench import command, machine, timing, vocabularies
from bench.contestants import Contestant
from bench.prompts import SHIPPED, batches
from bench.weights import Pair
from specjax.measure import PromptCounts, turns

TINY = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny"


def test_real_prompts_are_cut_to_one_length():
    """It takes the last tokens of each prompt, in as many batches as they fill; without a file,
    random tokens."""
    target = specjax.load(TINY / "target")
    read = batches(target, SHIPPED, 4, 40, limit=10)
    assert [batch.shape for batch in read] == [(4, 40), (4, 40)]
    text = json.loads(SHIPPED.read_text().splitlines()[5])["prompt"]
    assert read[1][1].tolist() == target.tokenizer.encode(text).ids[-40:]
    assert [batch.shape for batch in batches(target, None, 3, None)] == [(3, 32)]


def test_prompts_that_do_not_fit_are_refused(tmp_path):
    """A short prompt, or too few for a batch, is refused with what to pass instead."""
    target, path = specjax.load(TINY / "target"), tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os and sys and json"}\n{"prompt": "x"}\n')
    with pytest.raises(
        ValueError, match=r"prompt 1 of .* has 2 tokens, fewer than the 8 .*--prompt-length 2"
    ):
        batches(target, path, 1, 8)
    with pytest.raises(ValueError, match=r"--batch 3 asks for more prompts than the 2"):
        batches(target, path, 3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1", "0"], "bench: --batch is 0; it must be at least 1"),
        (["--rounds", "0"], "bench: --rounds is 0; it must be at least 1"),
        (
            ["--synthetic-acceptance", "1.5"],
            "bench: --synthetic-acceptance is 1.5; it is a probability, 0 to 1",
        ),
        (["--target", "nowhere"], "bench: nowhere is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, options, message):
    """The error is one line with the value and the cure, and the exit status is 2."""
    monkeypatch.setattr(machine, "ceilings", lambda: {"bandwidth": 10.0})
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", *options])
    with pytest.raises(SystemExit) as left:
        command.run(bench.main)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_all_batches_count_and_disturbed_samples_do_not(monkeypatch):
    """Counts add up over the batches; a batch without an undisturbed sample has no median."""
    busy = iter([0.0, 0.9, 0.0, 0.0])
    monkeypatch.setattr(turns, "Meter", lambda: types.SimpleNamespace(busy=lambda: next(busy)))
    counts, prefill = [], []

    def run(prompts, new):
        counts.append(PromptCounts(*np.array([[3], [6], [4], prompts[0]])))
        prefill.append(-1.0)
        return np.full((1, new), prompts[0, 0])

    asked = [np.array([[1]]), np.array([[3]])]
    (timed,), _ = timing.alternate(
        [Contestant("draft", "specjax", 1, run, counts, prefill)], asked, 2, rounds=2
    )
    figures = timed.acceptance()
    assert (figures["alpha"][0], figures["tau"], timed.dropped) == (0.5, (2.0, 2.0, 2.0), 1)
    assert 0.25 <= figures["alpha"][1] <= figures["alpha"][2] <= 0.75
    assert [len(samples) for samples in timed.seconds] == [2, 1]
    assert [tokens.tolist() for tokens in timed.tokens] == [[[1, 1]], [[3, 3]]]
    assert timed.median == pytest.approx(sum(map(np.median, timed.seconds)))
    assert timed.prefill == [[-1, -1], [-1]]
    assert timed.decoding == pytest.approx(timed.median + 2) and timed.step == pytest.approx(
        timed.decoding / 6
    )
    timed.seconds[1].clear()
    assert (timed.median, timed.spread, timed.step) == (None, None, None)


def test_few_bits_beside_float32(monkeypatch, tmp_path, capsys):
    """Each use of int8 and int4 has a row; wherever the target is float32, the text is that of
    plain decoding.  No sample counts as disturbed, whatever else the machine does."""
    monkeypatch.setattr(machine, "ceilings", lambda: {"bandwidth": 10.0})
    monkeypatch.setattr(turns, "Meter", lambda: types.SimpleNamespace(busy=lambda: 0.0))
    sizes = [
        "--num-drafts",
        "1",
        "--prompt-length",
        "16",
        "--new-tokens",
        "8",
        "--limit-prompts",
        "2",
        "--rounds",
        "1",
    ]
    models = ["--target", str(TINY / "target"), "--prompt-file", str(SHIPPED)]
    report = ["--json", str(tmp_path / "report.json")]
    bench.main([*models, *sizes, "--int8", "--int4", "--peers", *report])
    assert "2 real prompts of 16 tokens" in capsys.readouterr().out
    rows = {
        row["proposer"]: row
        for row in json.loads((tmp_path / "report.json").read_text())[0]["rows"]
    }
    few = [name for bits in ("int8", "int4") for name in (f"{bits} target", f"self-{bits}")]
    assert list(rows) == ["plain", "plain at 2 rows", "ngram", *few]
    assert all(
        "same_tokens" not in row if name.endswith(" target") else row["same_tokens"] == 2
        for name, row in rows.items()
    )
    assert rows["self-int8"]["alpha"][0] > 0.8 and rows["self-int4"]["alpha"][0] > 0.5
    assert rows["self-int4"]["parts_over_step"] is not None
    assert rows["plain"]["tau"] == [1.0, 1.0, 1.0]
    target, draft = (specjax.load(TINY / name) for name in ("target", "draft"))
    pair = Pair(target, draft, lambda role: None)
    for bits in ("int8", "int4"):
        options = bench.ReportOptions(num_drafts=(1, 2))
        contestants = [
            (one.name, one.num_drafts)
            for one in bench._in_few_bits(bits, pair, options, None, lambda _: None)
        ]
        names = f"draft {bits}", f"{bits} target and draft", f"self-{bits}"
        drafts = [(name, gamma) for gamma in (1, 2) for name in names]
        assert contestants == [(f"{bits} target", 0), (f"draft {bits} alone", 0), *drafts]


def test_vocabularies_are_alike_and_not_equal(capsys):
    """Two artificial tokenizers share most tokens of the smaller one, whose pieces spell the
    larger one's."""
    target, draft = (
        vocabularies.tokenizer(900, 1, "byte-level"),
        vocabularies.tokenizer(700, 2, "sentencepiece"),
    )
    tables, seconds = vocabularies.measure(target, draft, 1)
    assert seconds > 0
    shared = np.flatnonzero(tables.to_draft >= 0)
    assert 200 < len(shared) < 700
    for token in shared[::50].tolist():
        assert draft.decode([int(tables.to_draft[token])]) == target.decode([token])
    vocabularies.main(["--target-size", "900", "--draft-size", "700", "--rounds", "1"])
    assert f"| sentencepiece | 700 | {len(shared)} |" in capsys.readouterr().out
