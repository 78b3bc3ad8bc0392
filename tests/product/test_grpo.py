"""The example of reinforcement learning: drafts change no token, reward or weight."""

import json

import pytest

from bench import rollouts
from examples import grpo
from experiments import online_head, refresh
from specjax.rollouts.depths import Depths, Turn

OPTIONS = [
    "--prompts", "2", "--new-tokens", "16", "--steps-per-epoch", "1", "--refresh", "never",
    "--steps",
]  # fmt: skip


def deepest(depths: Depths, size: int, rows: list, **_) -> Turn:
    return Turn(depths.options[-1], 2, range(len(rows)))


@pytest.fixture(scope="module", autouse=True)
def _drafts():
    """Every step reads drafts, whether they pay or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Depths, "best", deepest)
        yield


@pytest.fixture(scope="module")
def whole():
    return grpo.main([*OPTIONS, "3", "--learning-rate", "1e-6"])


def test_drafts_change_nothing(whole):
    """Rollouts are looked up in old ones, which those of the same keys resemble most: the weights
    have the same bits without them."""
    plain = grpo.main([*OPTIONS, "3", "--learning-rate", "1e-6", "--no-drafts"])
    assert plain["rewards"] == whole["rewards"] and plain["weights"] == whole["weights"]
    assert plain["tokens_per_pass"] == 1.0 < whole["tokens_per_pass"]


def test_a_stopped_run_goes_on_to_the_same_weights(whole, tmp_path):
    out = ["--learning-rate", "1e-6", "--out", str(tmp_path)]
    first = grpo.main([*OPTIONS, "2", *out])
    rest = grpo.main([*OPTIONS, "3", *out])
    assert [*first["rewards"], *rest["rewards"]] == whole["rewards"]
    assert rest["weights"] == whole["weights"]


def test_the_benchmark_of_rollouts(capsys, tmp_path):
    """It compares every text with plain decoding, and has a row for each rate and number."""
    rollouts.main(
        "--target checkpoints/tiny/target --data specjax/rules --prompts 2 --samples 1 --slots 2 "
        "--prompt-tokens 8 --new-tokens 8 --num-drafts 4 --rates 1e-5 --steps 1 2 --rounds 1 "
        f"--json {tmp_path / 'report.json'}".split()
    )
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == 2
    with pytest.raises(ValueError, match="--slots must be at least 1"):
        rollouts.main(["--slots", "0"])


def test_the_experiment_with_kept_keys(capsys, tmp_path):
    """It has a row for each refresh, and goes on with the runs that are there."""
    arguments = (
        f"--target checkpoints/tiny/target --seeds 2 --epochs 2 --new-tokens 8 --prompts 2 "
        f"--samples 2 --out {tmp_path}"
    ).split()
    first = refresh.main(arguments)
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == ["1", "2", "never"]
    assert first == refresh.main(arguments)
    assert all(len(rows) == 2 for rows in first.values())
    # In the first epoch nothing was trained on.
    start = {tuple(row["rewards"][:2]) for row in first["1"]}
    assert start == {tuple(row["rewards"][:2]) for row in first["never"]}


def test_the_experiment_with_a_head_that_learns(capsys, tmp_path):
    """It has a row for each source of drafts, and every text is that of plain decoding."""
    rows = online_head.main(
        "--epochs 1 --prompts 2 --samples 2 --slots 2 --new-tokens 16 --head-steps 2 --turns 1 "
        f"--out {tmp_path}".split()
    )
    names = ["plain", "old rollouts", "frozen head", "head trained online"]
    assert [row["drafts"] for row in rows] == names
    assert rows[0]["tokens_per_pass"] == rows[0]["over_plain"] == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("| 1 | head trained online |")
