"""The replay of a peer's drafts counts what `match` would accept of them."""

import sys
import types

import numpy as np
import pytest
from command_line import TINY

from bench import datastore
from bench.suffix_tree import Peer, Setting, _accepted


@pytest.mark.parametrize(
    ("tokens", "parents", "text", "depth"),
    [
        ([], [], [1, 2], 0),
        ([1, 2, 3], [-1, 0, 1], [1, 2, 9], 2),
        ([1, 2, 3], [-1, 0, 1], [1, 2], 2),  # the text ends within the drafts
        ([5, 1, 2, 7], [-1, -1, 1, 0], [1, 2, 7], 2),  # 7 is below 5
        ([4], [-1], [1], 0),
    ],
)
def test_how_deep_a_tree_follows_a_text(tokens, parents, text, depth):
    assert _accepted(tokens, parents, text) == depth


class _Cache:
    """Always drafts 1, 1; it checks that every token of a text is reported once and in order."""

    def __init__(self, depth, most):
        self.answers = {}

    def start_request(self, name, prompt):
        assert prompt.dtype == np.int32
        self.answers[name] = []

    def add_active_response(self, name, tokens):
        self.answers[name] += tokens.tolist()

    def stop_request(self, name):
        assert name in self.answers

    def evict_cached_response(self, name):
        assert self.answers.pop(name) == TEXT

    def speculate(self, name, context, **settings):
        written = self.answers[name]
        assert context.tolist() == [*PROMPT, *written][-24:]
        return types.SimpleNamespace(token_ids=[1, 1], parents=[-1, 0])


PROMPT, TEXT = [3, 4], [1, 1, 2, 5, 1, 6, 1]


def test_tokens_per_pass(monkeypatch):
    """Steps 1 1 2, then 5, then 1 6, then 1: seven tokens in four passes."""
    module = types.SimpleNamespace(SuffixDecodingCache=_Cache)
    monkeypatch.setitem(sys.modules, "arctic_inference", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    peer = Peer(np.arange(9000))
    assert peer.tokens_per_pass([PROMPT], [TEXT], Setting(2, False, 1.0)) == 7 / 4


def test_a_missing_peer_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=r"--peer needs arctic-inference .*pip install"):
        datastore.main(
            ["--tokens", str(tmp_path / "train.bin"), "--target", str(TINY / "target"), "--peer"]
        )
