"""Drafts of arctic-inference's suffix tree, counted by replaying texts that the target wrote.

The peer runs on the host and is not a part of a decoding loop here.  What a rule would accept of
its drafts is known without a target: under `match` a draft is accepted if the text goes on with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

INSTALL = (
    "pip install arctic-inference; or build its csrc/suffix_decoding alone, which needs cmake, "
    "ninja and nanobind, beside arctic_inference/suffix_decoding"
)
_DOCUMENT = 4096
_DEPTH, _LEAST = 24, 0.1
"""vLLM's defaults of its suffix decoding: the depth of a tree, and the least probability of a draft
by the tree's counts."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How it drafts."""

    most: int  # drafts in a step
    tree: bool
    factor: float  # the most drafts for each token of the match

    def __str__(self) -> str:
        shape = f"a tree of {self.most}" if self.tree else f"{self.most} drafts"
        return f"suffix tree, {shape}, {self.factor:g} for each matching token"


class Peer:
    """A suffix tree of a corpus."""

    def __init__(self, corpus: np.ndarray) -> None:
        """Raises ImportError if arctic-inference is not there."""
        from arctic_inference.suffix_decoding import (  # pyright: ignore[reportMissingImports]
            SuffixDecodingCache,
        )

        self._cache: Any = SuffixDecodingCache(_DEPTH, -1)
        for start in range(0, len(corpus), _DOCUMENT):
            part = np.ascontiguousarray(corpus[start : start + _DOCUMENT], np.int32)
            self._write(start, np.zeros(0, np.int32), part)

    def tokens_per_pass(
        self, prompts: list[list[int]], texts: list[list[int]], setting: Setting
    ) -> float:
        """New tokens per target pass, over all texts; a text does not help the next one."""
        passes = 0
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            name = f"text {index}"
            self._cache.start_request(name, np.array(prompt, np.int32))
            done = 0
            while done < len(text):
                context = np.array([*prompt, *text[:done]][-_DEPTH:], np.int32)
                draft = self._cache.speculate(
                    name, context, max_spec_tokens=setting.most, max_spec_factor=setting.factor,
                    min_token_prob=_LEAST, use_tree_spec=setting.tree,
                )  # fmt: skip
                new = _accepted(draft.token_ids, draft.parents, text[done:]) + 1
                step = np.array(text[done : done + new], np.int32)
                self._cache.add_active_response(name, step)
                done, passes = done + len(step), passes + 1
            self._cache.stop_request(name)
            self._cache.evict_cached_response(name)
        return sum(map(len, texts)) / passes

    def _write(self, name: object, prompt: np.ndarray, answer: np.ndarray) -> None:
        self._cache.start_request(name, prompt)
        self._cache.add_active_response(name, answer)
        self._cache.stop_request(name)


def _accepted(tokens: list[int], parents: list[int], text: list[int]) -> int:
    """How deep the nodes of a tree follow the text; -1 is the parent of the first level."""
    at, depth = -1, 0
    for _ in text:
        found = [
            node
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))
            if parent == at and token == text[depth]
        ]
        if not found:
            break
        at, depth = found[0], depth + 1
    return min(depth, len(text))
