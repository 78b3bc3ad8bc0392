"""Defaults that fit the target, and what `run.json` says about it."""

from __future__ import annotations

import pytest
import trained

import specjax
from specjax.training import (
    DistillOptions,
    DrafterOptions,
    MedusaOptions,
    distillation,
    drafter_training,
    medusa_training,
)

JOBS = {
    "distill": (distillation, DistillOptions, {"sampled_prompt": 8, "sampled_fraction": 0.0}),
    "drafter": (drafter_training, DrafterOptions, {"kind": "eagle3", "sampled_prompt": 8}),
    "medusa": (medusa_training, MedusaOptions, {"written_prompt": 8}),
}


@pytest.mark.parametrize("name", JOBS)
def test_sequences_fit_the_target_by_default(name, tmp_path, capsys):
    """A target of 32 positions is trained for with folders alone; a length that was asked for is
    refused.  A tied matrix counts once among the parameters in `run.json`."""
    make, options, more = JOBS[name]
    folders = {"target": str(trained.target()), "data": (str(trained.text()),)}
    job = make(options(**folders, **more, out=str(tmp_path / "run")))
    assert job.options.sequence_length == 32
    said = "the target reads at most 32 tokens, so sequences have 32 (--sequence-length)"
    assert said in capsys.readouterr().out
    found = job.facts["models"]["target"]["parameters"]
    assert found == specjax.load(trained.target()).num_params
    with pytest.raises(ValueError, match="--sequence-length is 64; the target reads at most 32"):
        make(options(**folders, **more, out=str(tmp_path / "other"), sequence_length=64))


@pytest.mark.parametrize("name", JOBS)
def test_too_little_held_out_text_is_refused_at_the_start(name, tmp_path):
    """And not where it is read first, which may be after a thousand steps."""
    make, options, more = JOBS[name]
    data = tmp_path / "data"
    data.mkdir()
    for i in range(9):
        (data / f"{i}.py").write_text(f"x{i} = {i}\n" * (2 if i < 4 else 60))
    folders = {"target": str(trained.target()), "data": (str(data),)}
    with pytest.raises(ValueError, match=r"held_out.bin has \d+ tokens: too few for a sequence of"):
        make(options(**folders, **more, out=str(tmp_path / "run")))
