"""`--loss auto`: the losses are compared on equal terms, and the best one trains the draft."""

from __future__ import annotations

import json

import pytest
import trained
from trained import metrics

from specjax.training.jobs import calibration, distill
from specjax.training.jobs.distill import DistillOptions
from specjax.training.loop import fit

LOSSES = ("--auto-losses", "forward-kl", "jensen-shannon", "total-variation")
SHORT = ("--auto-steps", "4", "--auto-prompts", "4", "--eval-tokens", "8")


def run(out, *more):
    distill.main([
        "--target", str(trained.target()), "--data", str(trained.text()), "--out", str(out),
        "--sampled-fraction", "0", "--sampled-prompt", "8", "--learning-rate", "0.01",
        "--warmup-steps", "2", "--log-every", "1", "--steps", "6", *trained.DRAFT_SIZES, *more,
    ])  # fmt: skip
    return out


def model(out):
    return (out / "model" / "model.safetensors").read_bytes()


def test_the_best_loss_goes_on(tmp_path, monkeypatch, capsys):
    """The choice has the greatest tau of trainings that differ in their loss alone, is told in the
    log and in run.json, and is bit for bit the run that names this loss."""
    seen = {}

    def watched(job, options):
        report = fit(job, options)
        seen[options.loss] = (options, metrics(trained.pathlib.Path(options.out)), report)
        return report

    monkeypatch.setattr(calibration, "fit", watched)
    out = run(tmp_path / "auto", "--loss", "auto", *LOSSES, *SHORT)
    facts = json.loads((out / "run.json").read_text())
    found, chosen = facts["auto"]["losses"], facts["options"]["loss"]
    assert list(seen) == list(found) == list(LOSSES[1:])
    assert {loss: seen[loss][2]["tau"] for loss in seen} == {k: v["tau"] for k, v in found.items()}
    assert chosen == facts["auto"]["chosen"] == max(found, key=lambda loss: found[loss]["tau"])
    said = capsys.readouterr().out
    assert f"--loss auto: the run goes on with --loss {chosen}" in said
    assert all(f"{loss}: tau {value['tau']:.3f}" in said for loss, value in found.items())
    options = [vars(seen[loss][0]) for loss in seen]
    differ = {name for name in options[0] for one in options if one[name] != options[0][name]}
    assert differ == {"loss", "out", "anneal_steps"} and options[0]["steps"] == 4
    assert not (out / "auto").exists()
    named = run(tmp_path / "named", "--loss", chosen)
    assert model(named) == model(out) and metrics(named) == metrics(out)


def test_a_choice_that_was_interrupted(tmp_path, monkeypatch):
    """What is measured is not measured again, a training resumes, and the choice stays with more
    steps; other options are refused by name."""
    out, tried = tmp_path / "run", []

    def interrupted(job, options):
        tried.append(options.loss)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return fit(job, options)

    arguments = ("--loss", "auto", *LOSSES, *SHORT, "--stop-at", "3")
    monkeypatch.setattr(calibration, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out, *arguments)
    run(out, *arguments)
    assert tried == ["forward-kl", "jensen-shannon", "jensen-shannon", "total-variation"]
    before = json.loads((out / "run.json").read_text())["auto"]
    run(out, "--loss", "auto", *LOSSES, *SHORT)
    assert len(tried) == 4 and json.loads((out / "run.json").read_text())["auto"] == before
    whole = run(tmp_path / "whole", "--loss", before["chosen"])
    assert model(whole) == model(out)
    with pytest.raises(ValueError, match=r"auto\.json was written .*\n  --auto-prompts was 4 and"):
        run(out, "--loss", "auto", *LOSSES, *SHORT, "--auto-prompts", "5")


def test_a_loss_that_fails_is_not_chosen(tmp_path, monkeypatch):
    """Its message is kept; without any other loss the job ends."""

    def failing(job, options):
        if options.loss != "jensen-shannon":
            raise FloatingPointError(f"{options.loss} is nan")
        return fit(job, options)

    monkeypatch.setattr(calibration, "fit", failing)
    out = run(tmp_path / "run", "--loss", "auto", *LOSSES, *SHORT, "--steps", "1")
    facts = json.loads((out / "run.json").read_text())
    assert facts["options"]["loss"] == "jensen-shannon"
    assert facts["auto"]["losses"]["forward-kl"] == {"failure": "forward-kl is nan"}
    with pytest.raises(ValueError, match="training failed with every loss"):
        run(tmp_path / "none", "--loss", "auto", "--auto-losses", "adaptive", *SHORT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_losses": ("reverse-kl",), "top_k": 5}, "reverse-kl is infinite"),
        ({"sequence_length": 64}, "--sampled-prompt 32 and --eval-tokens 64 together are more"),
        ({"teacher": "x"}, "--loss auto measures tau with the target"),
        ({"auto_steps": -1}, "--auto-steps is -1"),
    ],
)
def test_what_cannot_be_compared(changes, message):
    with pytest.raises(ValueError, match=message):
        DistillOptions(loss="auto", **changes)


def test_how_long_the_trainings_are():
    """A twentieth of the run, at least 20 steps, and never more than the run."""
    for steps, wanted in ((1000, 50), (100, 20), (7, 7)):
        assert DistillOptions(loss="auto", steps=steps).auto == wanted


def test_one_prompt_has_no_interval():
    assert calibration._said({"tau": 1.5}) == "tau 1.500"
    both = {"tau": 1.5, "tau_low": 1.25, "tau_high": 1.75}
    assert calibration._said(both) == "tau 1.500 (1.250 to 1.750)"
