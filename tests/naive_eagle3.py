"""What EAGLE-3 and P-EAGLE heads predict, by NumPy in float64 and without a cache.

For every token everything is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class NaiveEagle3:
    """A head, by the names of its published tensors.

    Args:
      head: its form, with the attributes of `eagle3_folders.Head`.
      tensors: by their published names; the layers are called `layers.{i}`.
      table: [V, E] embeddings, of the head or of its target.
      matrix: [U, E] the rows of the output, for U = `head.draft_vocab` or V tokens.
      features_of: from tokens to the target's [T, n E] at the taps of the head.
    """

    def __init__(
        self,
        head: Any,
        tensors: Mapping[str, np.ndarray],
        table: np.ndarray,
        matrix: np.ndarray,
        features_of: Callable[[tuple[int, ...]], np.ndarray],
    ) -> None:
        self.head, self.w = head, tensors
        self.table, self.matrix, self.features_of = table, matrix, features_of
        self.vocab = len(table)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        eps = self.head.eps
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[f"{name}.weight"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def fuse(self, raw: np.ndarray) -> np.ndarray:
        if self.head.norm_before_fc:
            raw = self.norm("input_norm", raw)
        if self.head.fc_norm:
            parts = np.split(raw, len(self.head.taps), axis=-1)
            raw = np.concatenate([self.norm(f"fc_norm.{k}", x) for k, x in enumerate(parts)], -1)
        return self.linear("fc", raw)

    def turned(self, x: np.ndarray) -> np.ndarray:
        """[T, H, D] rotated by the positions 0 ... T - 1."""
        half = x.shape[-1] // 2
        freq = self.head.theta ** (-np.arange(half) / half)
        angle = np.arange(len(x))[:, None, None] * freq
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(self, name: str, x: np.ndarray) -> np.ndarray:
        h = self.head

        def project(part: str, count: int) -> np.ndarray:
            y = self.linear(f"{name}self_attn.{part}_proj", x).reshape(len(x), count, h.head_dim)
            if part == "v":
                return y
            return self.turned(self.norm(f"{name}self_attn.{part}_norm", y) if h.qk_norm else y)

        q = project("q", h.heads)
        k, v = (np.repeat(project(part, h.kv_heads), h.heads // h.kv_heads, 1) for part in "kv")
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(h.head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return self.linear(f"{name}self_attn.o_proj", mixed)

    def states(self, tokens: list[int], features: np.ndarray) -> np.ndarray:
        """[T, E] after the layers, for T pairs."""
        x, embedded = features, self.table[tokens]
        for i in range(self.head.num_layers):
            name = f"layers.{i}."
            if i == 0:
                feature = self.norm(f"{name}hidden_norm", x)
                inputs = np.concatenate([self.norm(f"{name}input_layernorm", embedded), feature], 1)
                x = feature if self.head.norm_before_residual else x
            else:
                inputs = self.norm(f"{name}input_layernorm", x)
            x = x + self.attend(name, inputs)
            y = self.norm(f"{name}post_attention_layernorm", x)
            gate, up = (self.linear(f"{name}mlp.{part}_proj", y) for part in ("gate", "up"))
            x = x + self.linear(f"{name}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return x

    def full(self, logits: np.ndarray) -> np.ndarray:
        """Logits of the head's rows -> [V] of the target's tokens."""
        if self.head.draft_vocab is None:
            return logits
        out = np.full(self.vocab, -np.inf)
        out[np.arange(len(logits)) + self.w["d2t"].astype(int)] = logits
        return out

    def logits(self, text: list[int], path: tuple[int, ...] = ()) -> np.ndarray:
        """[V] after a text, whose last token is pending, and the drafts of a path below it."""
        features = self.fuse(self.features_of(tuple(text[:-1])))
        tokens = [*text[1:]]
        for token in (*path, None):
            states = self.states(tokens, features)
            normed = self.norm("norm", states[-1:])
            if token is None:
                return self.full((normed @ self.matrix.T)[0])
            fed = normed if self.head.norm_output else states[-1:]
            features, tokens = np.concatenate([features, fed]), [*tokens, token]
        raise AssertionError

    def block(self, text: list[int], mask_token: int, depth: int) -> np.ndarray:
        """[D, V] logits of the next D tokens by one pass (P-EAGLE)."""
        raw = self.features_of(tuple(text[:-1]))
        mask = np.tile(self.w["mask_hidden"][0], (depth - 1, 1))
        features = self.fuse(np.concatenate([raw, mask]))
        states = self.states([*text[1:], *[mask_token] * (depth - 1)], features)
        logits = self.norm("norm", states[-depth:]) @ self.matrix.T
        return np.stack([self.full(row) for row in logits])

    def drafts(self, text: list[int], count: int) -> list[int]:
        """The greedy chain."""
        path: tuple[int, ...] = ()
        for _ in range(count):
            path = (*path, int(self.logits(text, path).argmax()))
        return list(path)
