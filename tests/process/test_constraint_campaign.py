"""The campaign of random constrained calls, in short; faults that it finds; several devices."""

import subprocess
import sys

import constrained
import pytest
from several_devices import ROOT, environment

import specjax
from specjax.decoding.decoder import Decoder

SEEDS = (12, 36, 42)
"""Cases of different proposers and kinds of constraints."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_campaign(seed, capsys):
    constrained.main(["--only", str(seed)])
    assert "| 1 cases | |" in capsys.readouterr().out


def test_the_campaign_finds_one_mask_for_all_nodes(monkeypatch, capsys):
    """With the mask of the root at all nodes, some text is not complete or not that of plain
    decoding."""
    warp = Decoder._warp
    monkeypatch.setattr(Decoder, "_warp", lambda self, state, logits, path=None: warp(
        self, state, logits
    ))  # fmt: skip
    specjax.clear_programs()
    try:
        with pytest.raises(AssertionError):
            for seed in SEEDS:
                constrained.main(["--only", str(seed)])
    finally:
        specjax.clear_programs()
    assert "failed: python -m tests.constrained --only" in capsys.readouterr().err


def test_texts_on_four_devices():
    done = subprocess.run(
        [sys.executable, "tests/constrained_on_meshes.py"], cwd=ROOT, text=True,
        env=environment(4), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"
