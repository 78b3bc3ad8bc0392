"""The tokens a pass at which drafts pay, by context and batch, and texts made to be rejected."""

import dataclasses
import json
from typing import Any

import pytest

from bench import attack, surface

SMALL = "--size tiny --context 64 128 --batch 1 --rounds 1 --steps 2".split()


def test_the_surface_is_timed_and_predicted(tmp_path, capsys):
    """Each cell is the quotient of its times; steps of which no draft is accepted are slower."""
    path = tmp_path / "cells.json"
    surface.main([*SMALL, "--json", str(path)])
    cells = json.loads(path.read_text())
    assert [c["context"] for c in cells if c["on"] == "this device"] == [64, 128]
    for cell in cells:
        assert cell["break_even"] == pytest.approx(cell["drafting"] / cell["plain"])
        assert cell["plain"] > 0 and (cell["on"] == "this device" or cell["break_even"] > 1)
    printed = capsys.readouterr().out
    assert all(f"| {c['batch']} | {c['context']} |" in printed for c in cells)
    pytest.importorskip("matplotlib")
    assert len(surface.draw(cells).axes) == 3


def test_a_target_that_drafts_for_itself_is_timed(capsys):
    """The speed is that of the tokens which a rate of 1 gives, over the break-even."""
    own = ["--draft", "self", "--draft-window", "16", "--acceptance", "1"]
    own += ["--selected", "2", "--chunk", "8"]
    surface.main([*SMALL, *own, "--predicted-context", "131072", "--predicted-batch", "16"])
    last = capsys.readouterr().out.splitlines()[-1].split("|")
    assert float(last[-2]) == pytest.approx(5 / float(last[-3]), abs=0.02)
    with pytest.raises(ValueError, match="--acceptance 2"):
        surface.SurfaceOptions(acceptance=2.0)


def test_a_window_bounds_what_drafts_need():
    """Without one the number grows with the context, with one it falls; a target that drafts for
    itself needs fewer where keys and values outweigh the weights."""
    far = surface.SurfaceOptions(rounds=0, predicted_batch=(16,), chip=("h100",))
    whole = [c["break_even"] for c in surface.predicted(far)]
    assert whole == sorted(whole) and whole[-1] < 1 + 4 / 4 + 0.01  # a quarter of the keys
    near = surface.SurfaceOptions(
        rounds=0, predicted_batch=(16,), chip=("h100",), draft_window=1024, draft="self"
    )
    own = [c["break_even"] for c in surface.predicted(near)]
    assert own == sorted(own, reverse=True) and own[0] > 3 and own[-1] < 1.3
    chosen = [
        c["break_even"] for c in surface.predicted(dataclasses.replace(near, selected=16, chunk=64))
    ]
    # Chunks and their bounds are read besides the window, but never more than the whole text.
    assert all(a < b for a, b in zip(own[1:], chosen[1:], strict=True)) and chosen[-1] < 1.4
    with pytest.raises(ValueError, match="add --draft self"):
        surface.SurfaceOptions(selected=2)
    with pytest.raises(ValueError, match="add --draft-window"):
        surface.SurfaceOptions(draft="self")
    refused: tuple[dict[str, Any], ...] = (
        {"predicted_batch": (0,)}, {"context": (8,)}, {"draft_window": 0},
    )  # fmt: skip
    for options in refused:
        (name,) = options
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}.* at least"):
            surface.SurfaceOptions(rounds=0, **options)


def test_the_attack_is_printed(capsys):
    attack.main(["--draft-cost", "0.1", "--new-tokens", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 + 3 and "always 8" in lines[-1]
