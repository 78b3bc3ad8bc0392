"""What an assistant of Gemma 4 predicts, by NumPy in float64 and for one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.methods import AssistantConfig

OWNERS = 2


class NaiveAssistant:
    """An assistant with norms before and after each branch, as Gemma has them.

    Args:
      config: of the network.
      own: its parameters.
      embedding: [V, Et] of the target.
      memories: of the target's two layers: keys and values [S, K, D] of a row's text.
    """

    def __init__(self, config: AssistantConfig, own: Any, embedding: Any) -> None:
        self.config, self.c = config, config.layers
        self.own, self.embedding = own, np.float64(embedding)

    def norm(self, weight: Any, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.norm_eps) * np.float64(weight)

    def attend(self, i: int, x: np.ndarray, position: int, memory: Any) -> np.ndarray:
        c, made = self.c, self.own["network"][f"layer_{i - OWNERS}"]["attention"]
        keys, values = (np.float64(part) for part in memory)
        window = c.window_of(i)
        first = 0 if window is None else max(0, len(keys) - window)
        keys, values, dim = keys[first:], values[first:], keys.shape[-1]
        q = self.norm(made["q_norm"]["weight"], (x @ made["q"]["kernel"]).reshape(-1, dim))
        half = dim // 2
        angle = position * c.rope_of(i).theta ** (-np.arange(half) / half)
        q = np.concatenate(
            [
                q[:, :half] * np.cos(angle) - q[:, half:] * np.sin(angle),
                q[:, half:] * np.cos(angle) + q[:, :half] * np.sin(angle),
            ],
            axis=-1,
        )
        group = len(q) // keys.shape[1]
        mixed = []
        for head, query in enumerate(q):
            scores = keys[:, head // group] @ query * c.query_scale
            weights = np.exp(scores - scores.max())
            mixed.append(weights / weights.sum() @ values[:, head // group])
        return np.concatenate(mixed) @ made["o"]["kernel"]

    def step(self, token: int, hidden: np.ndarray, position: int, memories: Sequence[Any]) -> Any:
        """Returns the next hidden state, and the logits [V]."""
        made, c = self.own["network"], self.c
        embedded = self.embedding[token] * self.config.embedding_scale
        x = np.concatenate([embedded, hidden]) @ made["pre_projection"]["kernel"]
        for i in range(OWNERS, c.num_layers):
            layer, memory = made[f"layer_{i - OWNERS}"], memories[c.owner_of(i)]
            y = self.norm(layer["attention_norm"]["weight"], x)
            y = self.attend(i, y, position, memory)
            x = x + self.norm(layer["attention_post_norm"]["weight"], y)
            y = self.norm(layer["mlp_norm"]["weight"], x)
            gate, up = (y @ layer["mlp"][part]["kernel"] for part in ("gate", "up"))
            curve = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
            y = (0.5 * gate * (1 + curve) * up) @ layer["mlp"]["down"]["kernel"]
            x = (x + self.norm(layer["mlp_post_norm"]["weight"], y)) * layer["scale"]
        x = self.norm(made["norm"]["weight"], x)
        return x @ made["post_projection"]["kernel"], self.head(x)

    def head(self, x: np.ndarray) -> np.ndarray:
        logits = self.own["table"] @ x
        if self.config.num_clusters is None:
            return logits
        scores = x @ self.own["network"]["centroids"]["kernel"]
        best = np.argsort(-scores)[: self.config.clusters_read]
        read = self.own["order"].reshape(self.config.num_clusters, -1)[best].ravel()
        kept = np.full(len(logits), -np.inf)
        kept[read] = logits[read]
        return kept

    def logits(
        self, hidden: np.ndarray, pending: int, path: Sequence[int], memories: Sequence[Any]
    ) -> np.ndarray:
        """[V] after the pending token and the drafts of a path.

        Args:
          hidden: [Et] of the target at the token before the pending one.
          pending, path: the tokens.
          memories: of the target's two layers: keys and values [T, K, D] of the tokens before.
        """
        logits = None
        for token in (pending, *path):
            hidden, logits = self.step(token, hidden, len(memories[0][0]), memories)
        return logits
