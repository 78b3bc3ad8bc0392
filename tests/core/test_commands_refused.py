"""A mistake on the command line ends in a message of one line that says how to fix it."""

from __future__ import annotations

import json

import pytest
from command_line import PAIR, TINY, failure

from specjax._internal import paths as folders
from specjax.generation.prompts import read_file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["prompt", "--prompt-file"]),
        (["x", "--prompt-file", "y"], ["not both"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
        (["x", "--target", "nowhere"], ["nowhere", "is not a folder"]),
        (["x", "--target", str(TINY / "target"), "--proposer", "draft"], ["--draft", "ngram"]),
        (["x", *PAIR, "--proposer", "ngram"], ["--draft is not used"]),
        (["x", *PAIR[:2], "--proposer", "medusa"], ["--drafter", "trained for this target"]),
        (["x", *PAIR[:2], "--proposer", "ngram", "--drafter", "y"], ["--drafter is not used"]),
        (["x", *PAIR[:2], "--drafter", "nowhere"], ["nowhere", "is not a folder"]),
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
        (["x", *PAIR, "--dtype", "int5"], ["int5", "bfloat16"]),
        (["x", *PAIR, "--activations", "int8"], ["activations", 'dtype="int4"']),
        (["x", *PAIR, "--activations", "int7"], ["activations", "int7"]),
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
    scalars = ('"just a text"', "5", "null", "true", "[1]", '["prompt"]', '"messages"')
    objects = ('{"prompt": 5}', '{"prompt": null}', '{"messages": "x"}', '{"text": "x"}')
    for line in (*scalars, *objects, "{", "[" * 100_000):
        path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
        message = failure(capsys, "generate", "--prompt-file", path, *PAIR)
        assert "bad.jsonl, line 3: it must be an object" in message


def test_a_prompt_file_that_holds_no_text(capsys, tmp_path):
    """The error names the file and the cure."""
    path = tmp_path / "x.jsonl"
    for content, words in (
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "cannot be encoded"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "holds conversations"),
    ):
        path.write_bytes(content)
        message = failure(capsys, "generate", "--prompt-file", path, *PAIR)
        assert words in message and message.count("\n") == 1
        assert "x.jsonl" in message or "prompt 0" in message
    text = tmp_path / "x.txt"
    for content, words in ((b"", "x.txt is empty"), (b"\xff", "x.txt is not UTF-8")):
        text.write_bytes(content)
        assert words in failure(capsys, "generate", "--prompt-file", text, *PAIR)
    assert "is a folder; pass a file" in failure(capsys, "generate", "--prompt-file", tmp_path)
    assert "cannot be encoded" in failure(capsys, "generate", "a\udcff", *PAIR)


def test_lines_end_at_newlines_only(tmp_path):
    """JSON texts may hold characters that Python takes for the end of a line, and editors put a
    mark before UTF-8."""
    prompts = ["a\u2028b", "c\x85d", "\ufeffe"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path = tmp_path / "x.jsonl"
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert read_file(path) == prompts


def test_without_the_shipped_checkpoint(capsys, monkeypatch, tmp_path):
    """Where a package was made without them, the error names `--target` and a wheel."""
    monkeypatch.setattr(folders, "_HOME", tmp_path)
    message = failure(capsys, "generate", "x")
    for word in ("pycode/target", str(tmp_path / "checkpoints"), "--target", "wheel"):
        assert word in message
