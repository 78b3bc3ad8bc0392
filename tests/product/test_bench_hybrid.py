"""`python -m bench.hybrid` on tiny models, and the acceptance that it imposes on a tree."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import command, hybrid, prompts
from bench.contestants import ours
from bench.imposed import walk

TINY = ["--size", "tiny", "--vocab-size", "256", "--new-tokens", "12", "--rounds", "2",
        "--disturbed", "--no-peer"]  # fmt: skip


def test_a_report_has_both_targets_and_their_gains(tmp_path, capsys):
    """Each way writes what plain decoding writes, and the command prints the ratio of the gains."""
    out = tmp_path / "rows.json"
    hybrid.main([*TINY, "--weights", str(tmp_path), "--json", str(out)])
    report = json.loads(out.read_text())
    ways = [(row["model"], row["way"]) for row in report["rows"]]
    assert ways == [(m, w) for m in ("hybrid", "dense") for w in ("plain", "chain", "tree")]
    assert all(row["same_tokens"] and row["over_plain"] for row in report["rows"])
    assert all(len(row["seconds"][0]) == 2 for row in report["rows"])
    assert set(report["gains"]) == {"chain", "tree"}
    said = capsys.readouterr().out
    assert "tree: the gain on the hybrid over the gain on the dense target" in said


@pytest.mark.parametrize("branching", [(1, 2, 2), (3, 1)])
def test_a_tree_accepts_what_a_chain_as_deep_accepts(branching, tmp_path):
    """The first children are the drafts of the chain, and no sibling is accepted."""
    options = hybrid.HybridOptions(
        size="tiny", vocab_size=256, new_tokens=20, branching=branching, weights=str(tmp_path)
    )
    pair = hybrid.pairs(options)["hybrid"]
    (prompt,) = prompts.batches(pair.target, None, 1, None)
    script = hybrid._script(pair.target, prompt, options)
    made = ours(
        pair.target, pair.draft, "tree", len(branching), script, name="tree", branching=branching
    )
    written = made.run(prompt, 20)
    np.testing.assert_array_equal(written[0], script[0][0, prompt.shape[1] :][:20])
    (counts,) = made.counts
    right = script[1][0, prompt.shape[1] :][:20]
    passes, accepted, tested = walk(right, len(branching))
    found = [counts.passes, counts.accepted, counts.tested]
    assert [int(np.squeeze(count)) for count in found] == [passes, accepted, tested]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--acceptance", "1.5"], ["acceptance", "1.5"]),
        (["--rounds", "0"], ["rounds", "0"]),
        (["--size", "2t"], ["2t"]),
    ],
)
def test_bad_input_is_named(argv, words, capsys):
    with pytest.raises(SystemExit):
        command.run(lambda: hybrid.main(argv))
    message = capsys.readouterr().err
    assert [word for word in words if word not in message] == [] and "Traceback" not in message
