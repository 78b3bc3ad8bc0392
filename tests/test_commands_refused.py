"""A mistake on the command line ends in a message of one line that says how to fix it."""

from __future__ import annotations

import pytest
from command_line import PAIR, TINY, failure

from specjax.flags import inputs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["prompt", "--prompt-file"]),
        (["x", "--prompt-file", "y"], ["not both"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
        (["x", "--target", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", "--target", str(TINY / "target"), "--proposer", "draft"], ["--draft", "ngram"]),
        (["x", *PAIR, "--proposer", "ngram"], ["--draft is not used"]),
        (["x", *PAIR[:2], "--proposer", "medusa"], ["--adapter", "trained for this target"]),
        (["x", *PAIR[:2], "--proposer", "ngram", "--adapter", "y"], ["--adapter is not used"]),
        (["x", *PAIR[:2], "--adapter", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", *PAIR, "--plot", "x.png"], ["--plot", "--proposer medusa"]),
        (["x", *PAIR, "--num-drafts", "-1"], ["num_drafts=-1", "0 (plain) or greater"]),
        (["x", *PAIR, "--confidence-threshold", "2"], ["confidence_threshold=2", "[0, 1]"]),
        (
            ["x", *PAIR, "--proposer", "tree", "--branching", "2", "0"],
            ["branching=(2, 0)", "at least 1"],
        ),
        (
            ["x", *PAIR[:2], "--proposer", "early-exit", "--exit-layer", "9"],
            ["exit_layer=9", "it must lie in [1, "],
        ),
        (["x", *PAIR[:2], "--proposer", "first-of"], ["--proposer first-of needs --draft"]),
        (
            ["x", *PAIR, "--proposer", "dynamic-tree", "--num-nodes", "1"],
            ["num_nodes=1", "candidates"],
        ),
        (
            ["x", *PAIR[:2], "--proposer", "ngram", "--branching", "2"],
            ["--branching is not used by --proposer ngram"],
        ),
        (
            ["x", *PAIR, "--proposer", "tree", "--num-drafts", "3"],
            ["--num-drafts is not used by --proposer tree"],
        ),
        (
            ["x", *PAIR, "--exit-layer", "1"],
            ["--exit-layer is not used by --proposer draft", "early-exit"],
        ),
        (["x", *PAIR, "--temperature", "-1"], ["temperature=-1"]),
        (["x", *PAIR, "--temperature", "nan"], ["temperature=nan"]),
        (["x", *PAIR, "--repetition-penalty", "0"], ["repetition_penalty=0", "above 0"]),
        (["x", *PAIR, "--logit-bias", "five=1"], ["--logit-bias five=1", "42=-1.5"]),
        (["x", *PAIR, "--stop", ""], ["stop", "empty string"]),
        (["x", *PAIR, "--logprobs", "2"], ["--logprobs", "--json"]),
        (["x", *PAIR, "--top-p", "0"], ["top_p=0", "(0, 1]"]),
        (["x", *PAIR, "--max-new-tokens", "5000"], ["5000", "256", "shorten"]),
        (["x", *PAIR, "--dtype", "int4"], ["int4", "bfloat16"]),
        (["", *PAIR], ["prompt 0 is empty"]),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, words):
    """The error is one line with the option, its value and the fix."""
    message = failure(capsys, "generate", *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_a_bad_line_in_a_prompt_file(capsys, tmp_path):
    """The error names the file and the line, and shows the expected form."""
    path = tmp_path / "bad.jsonl"
    for line in ('"just a text"', '{"prompt": 5}', '{"text": "x"}', "{", "[" * 100_000):
        path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
        message = failure(capsys, "generate", "--prompt-file", path, *PAIR)
        assert "bad.jsonl, line 3: it must be an object" in message


def test_a_prompt_file_that_holds_no_text(capsys, tmp_path):
    """The error names the file and the cure."""
    path = tmp_path / "x.jsonl"
    for content, words in (
        (b"", "holds no prompt"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "holds conversations"),
    ):
        path.write_bytes(content)
        message = failure(capsys, "generate", "--prompt-file", path, *PAIR)
        assert "x.jsonl" in message and words in message


def test_without_the_shipped_checkpoint(capsys, monkeypatch, tmp_path):
    """An installed package has no checkpoint, so the error asks for `--target`."""
    monkeypatch.setattr(inputs, "_SHIPPED", tmp_path / "nowhere")
    assert "pass --target" in failure(capsys, "generate", "x")
