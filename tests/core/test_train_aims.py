"""What `train.aims` computes: ratios with intervals, its text, and that it goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import trained

from experiments import aims, prose, taus


def counts(rng, tau, size=40):
    passes = rng.integers(10, 20, size)
    return {"emitted": np.round(passes * tau).astype(int).tolist(), "passes": passes.tolist()}


def test_a_ratio_of_taus():
    """The value is that of all seeds and prompts together; the interval holds it, is a point where
    nothing varies, and grows with differences between seeds."""
    rng = np.random.default_rng(0)
    slow, fast = ([counts(rng, tau) for _ in range(3)] for tau in (2, 3))
    value, low, high = taus.ratio(fast, slow)
    assert value == low == high == pytest.approx(1.5)
    assert taus.ratio(fast, None) == pytest.approx((3, 3, 3))
    mixed = [counts(rng, tau) for tau in (2.0, 3.0, 4.0)]
    value, low, high = taus.ratio(mixed, slow)
    whole = sum(sum(one["emitted"]) for one in mixed) / sum(sum(one["passes"]) for one in mixed)
    assert value == pytest.approx(whole / 2, rel=1e-2)
    assert low < 1.2 < value < 1.8 < high
    uneven = counts(rng, 2.0)
    uneven["emitted"] = (np.array(uneven["emitted"]) * np.arange(40) // 20).tolist()
    low, high = taus.ratio([uneven], None)[1:]
    assert high - low > 0.1, "prompts vary, too"


def test_the_table_names_each_ratio():
    rng = np.random.default_rng(1)
    rows = {name: [{"0.0": counts(rng, tau), "1.0": counts(rng, tau)}] for name, tau in
            (("base", 2), ("better", 3))}  # fmt: skip
    lines = taus.table("draft", rows, ("base",), {"better": "7"}).splitlines()
    assert lines[0].startswith("| draft | tau at 0 | over base at 0 | tau at 1 | over base at 1 |")
    assert lines[2].split(" | ")[2] == "", "no ratio to itself"
    assert "| 1.500 (1.500 to 1.500) |" in lines[3] and lines[3].endswith("| 1 | 7 |")


def test_a_manual_page_as_prose():
    page = ".TH LS 1\n.SH NAME\nls \\- list \\fIdirectory\\fR contents\n"
    page += '.\\" no\n.PP\n.B "\\-a, \\-\\-all"\n'
    assert prose.plain(page) == "NAME\nls - list directory contents\n-a, --all\n"
    assert prose.plain("it\\(aqs 5\\ \\[mu]m") == "it's 5 m\n"


def test_too_little_prose_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "_manuals", lambda: iter(()))
    monkeypatch.setattr(prose, "_descriptions", lambda: iter(["words " * 300]))
    with pytest.raises(ValueError, match=r"has 1800 characters .* folders of English texts"):
        prose.collect(tmp_path / "prose.jsonl")
    text = prose.collect(tmp_path / "prose.jsonl", 1000).read_text()
    assert json.loads(text) == {"text": "words " * 300}


def test_other_options_are_refused(tmp_path, capsys):
    """A folder is for one set of options, to which seeds may be added."""
    options = aims.AimOptions(aim=4, out=str(tmp_path))
    options.folder.mkdir(parents=True)
    aims.check_asked(options)
    aims.check_asked(aims.AimOptions(aim=4, out=str(tmp_path), seeds=5))
    with pytest.raises(ValueError, match=r"holds a measurement of another request:\n  steps was 0"):
        aims.check_asked(aims.AimOptions(aim=4, out=str(tmp_path), steps=3))
    with pytest.raises(SystemExit):
        aims.main(["7"])
    assert "--aim is 7; it must be one of 1, 2, 3, 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_measurement_of_defaults(tmp_path, capsys):
    """Two steps of aim 4; a second call measures nothing again."""
    command = ["4", "--out", str(tmp_path), "--seeds", "1", "--steps", "2", "--prompts", "2",
               "--new-tokens", "4", "--target", str(trained.target()), "--data",
               str(trained.text())]  # fmt: skip
    aims.main(command)
    table = (tmp_path / "4" / "table.md").read_text()
    assert "| untrained |" in table and "| trained |" in table
    result = tmp_path / "4" / "0.trained.json"
    made = result.stat().st_mtime_ns
    aims.main(command)
    assert result.stat().st_mtime_ns == made and (tmp_path / "4" / "table.md").read_text() == table
