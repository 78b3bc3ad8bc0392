"""What a layer of multi-token prediction predicts, by NumPy in float64 and without a cache."""

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
