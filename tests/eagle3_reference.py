"""What random EAGLE-3 and P-EAGLE heads draft, computed by NumPy alone.

The reference reads the tensors of a folder by their published names.  It has no cache: for every
token it computes everything again, in float64.  The target's features come from a pass without a
cache, which `tests/product` compares with transformers.
"""

from __future__ import annotations

import functools
import pathlib

import folders
import numpy as np
from eagle3_folders import LAYOUTS, PARALLEL, VOCAB, Head, features_of, target_model, write


class Reference:
    """What a head predicts, from its tensors and the target's features."""

    def __init__(self, head: Head, tensors: dict[str, np.ndarray], kind: str = "llama") -> None:
        def plain(name: str) -> str:
            for stem in ("midlayer.0.", "midlayer.1."):
                if name.startswith(stem):
                    return name.replace("midlayer", "layers", 1)
            return name.replace("midlayer.", "layers.0.")

        self.head, self.kind = head, kind
        self.w = {plain(name): np.asarray(t, np.float64) for name, t in tensors.items()}
        of_target = target_model(kind).tensors
        table = of_target["model.embed_tokens.weight"]
        self.table = self.w.get("embed_tokens.weight", np.float64(table))
        self.matrix = self.w.get(
            "lm_head.weight", np.float64(of_target.get("lm_head.weight", table))
        )

    def features_of(self, tokens: list[int]) -> np.ndarray:
        """[T, n E] of the target at a text."""
        return features_of(self.kind, tuple(tokens), self.head.taps)

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
        out = np.full(VOCAB, -np.inf)
        out[np.arange(len(logits)) + self.w["d2t"].astype(int)] = logits
        return out

    def logits(self, text: list[int], path: tuple[int, ...] = ()) -> np.ndarray:
        """[V] after a text, whose last token is pending, and the drafts of a path below it."""
        features = self.fuse(self.features_of(text[:-1]))
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
        raw = self.features_of(text[:-1])
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


@functools.cache
def reference(layout: str) -> Reference:
    head, _, midlayer, kind = LAYOUTS[layout]
    return Reference(head, head.tensors(1, midlayer), kind)


@functools.cache
def parallel(layout: str) -> tuple[pathlib.Path, Reference]:
    head, config = PARALLEL[layout]
    tensors = head.tensors(2)
    made = write(folders.ROOT / f"peagle-{layout}", config(head), tensors)
    return made, Reference(head, tensors)
