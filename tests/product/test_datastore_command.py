"""`specjax generate` with a datastore; `tests/core/test_datastore.py` has a tree of its drafts."""

import json

import pytest
from command_line import TINY, run


@pytest.mark.parametrize("more", [[], ["--num-drafts", 2, "--min-share", 0.1]])
def test_a_datastore_drafts_for_the_command(tmp_path, capsys, more):
    """The text is that of plain decoding."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 9)
    build = ["datastore", "build", tmp_path / "a.txt", "--tokenizer", TINY / "target"]
    run(capsys, *build, "--out", tmp_path / "store")
    use = ["generate", "the cat", "--target", TINY / "target", "--max-new-tokens", 8, "--json"]
    made = run(capsys, *use, "--proposer", "datastore", "--drafter", tmp_path / "store", *more)
    assert json.loads(made.out)["stats"]["same_tokens"]
