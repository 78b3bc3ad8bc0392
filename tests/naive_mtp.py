"""What layers of multi-token prediction predict, by NumPy in float64 and without a cache."""

from __future__ import annotations

import numpy as np
from naive_eagle3 import NaiveEagle3


class NaiveMtp(NaiveEagle3):
    """An MTP layer with attention and an MLP; its head has the switches of `MtpConfig`, too."""

    def fuse(self, raw: np.ndarray) -> np.ndarray:
        return raw

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x if name == "norm" and not self.head.has_norm else super().norm(name, x)

    def states(self, tokens: list[int], features: np.ndarray) -> np.ndarray:
        embedded = self.table[tokens]
        if self.head.zeroes_first:
            embedded[0] = 0
        parts = [self.norm("embedding_norm", embedded), self.norm("hidden_norm", features)]
        both = np.concatenate(parts[::-1] if self.head.hidden_first else parts, axis=-1)
        x = self.linear("project", both)
        x = x + self.attend("layers.0.", self.norm("layers.0.input_layernorm", x))
        y = self.norm("layers.0.post_attention_layernorm", x)
        gate, up = (self.linear(f"layers.0.mlp.{part}_proj", y) for part in ("gate", "up"))
        return x + self.linear("layers.0.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


class NaiveMtpLayers:
    """Several MTP layers: each reads the outputs of the one before it, and the last its own."""

    def __init__(self, layers: list[NaiveMtp]) -> None:
        self.layers = layers

    def logits(self, text: list[int], path: tuple[int, ...] = ()) -> np.ndarray:
        """[V] after a text, whose last token is pending, and the drafts of a path below it."""
        tokens, features = [*text, *path], self.layers[0].features_of(tuple(text[:-1]))
        normed = features
        for k, layer in enumerate(self.layers[: len(path) + 1]):
            following = tokens[k + 1 :]
            while True:
                used = following[: len(features)]
                states = layer.states(used, features)
                normed = layer.norm("norm", states)
                fed = normed if layer.head.norm_output else states
                if layer is not self.layers[-1] or len(used) == len(following):
                    break
                features = np.concatenate([features, fed[-1:]])
            features = fed
        return (normed[-1:] @ self.layers[0].matrix.T)[0]
