"""The greedy drafts of a block draft in NumPy, from a folder's configuration and tensors.

It computes in float64, and keeps nothing between blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """[T, heads, D], the first half of the dimensions paired with the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (np.arange(half) / half)
    turn = np.exp(1j * angles) * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turn.real, turn.imag], axis=-1)


def convolved(u: np.ndarray, base: np.ndarray, dynamic: np.ndarray) -> np.ndarray:
    """[S, H], by base [K, H] and dynamic [S, K, H / g]."""
    out = np.zeros_like(u)
    group = u.shape[1] // dynamic.shape[2]
    for s in range(len(u)):
        for t in range(min(len(base), s + 1)):
            out[s] += (base[t] + np.repeat(dynamic[s, t], group)) * u[s - t]
    return out


class BlockReference:
    """A draft of the layouts of z-lab and SpecForge."""

    def __init__(self, config: dict, tensors: dict, embedding: Any, head: Any) -> None:
        self.config, self.own = config, {**config, **config["dflash_config"]}
        self.t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding, self.head = np.asarray(embedding, float), np.asarray(head, float)

    def hidden(self, features: np.ndarray, anchor: int) -> np.ndarray:
        """[S, H] after the final norm; `features` [T, F] at all committed tokens."""
        c, t, eps = self.config, self.t, self.config["rms_norm_eps"]
        size, start = self.own["block_size"], len(features)
        tokens = [anchor, *[self.own["mask_token_id"]] * (size - 1)]
        x = self.embedding[tokens] * self.own.get("input_embedding_scale", 1.0)
        context = norm(features @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        at = np.arange(start + size)
        theta = c["rope_parameters"]["rope_theta"]
        for i, kind in enumerate(c["layer_types"]):
            layer = f"layers.{i}."
            slides = kind == "sliding_attention"
            causal = c.get("is_causal")
            causal = slides if causal is None else causal
            distance = at[start:, None] - at
            seen = distance >= 0 if causal else distance > -(10**6)
            if slides:
                seen = seen & (np.abs(distance) < c["sliding_window"])
            y = norm(x, t[layer + "input_layernorm.weight"], eps)
            attend = functools.partial(
                self.attention, context, layer + "self_attn.", seen, at, theta
            )
            x = x + self.around(y, layer + "attention_conv", attend)
            y = norm(x, t[layer + "post_attention_layernorm.weight"], eps)
            x = x + self.around(y, layer + "mlp_conv", functools.partial(self.mlp, layer + "mlp."))
        return norm(x, t["norm.weight"], eps)

    def around(self, u: np.ndarray, name: str, branch: Any) -> np.ndarray:
        if name + ".base_kernel" not in self.t:
            return branch(u)
        base = self.t[name + ".base_kernel"]
        dynamic = u @ self.t[name + ".kernel_projection.weight"].T
        dynamic = dynamic.reshape(len(u), 2, base.shape[1], -1)
        y = branch(convolved(u, base[0], dynamic[:, 0]))
        return convolved(y, base[1], dynamic[:, 1])

    def attention(self, context, name, seen, at, theta, y) -> np.ndarray:
        t, dim = self.t, self.config["head_dim"]
        eps, both = self.config["rms_norm_eps"], np.concatenate([context, y])
        q = (y @ t[name + "q_proj.weight"].T).reshape(len(y), -1, dim)
        k = (both @ t[name + "k_proj.weight"].T).reshape(len(both), -1, dim)
        v = (both @ t[name + "v_proj.weight"].T).reshape(len(both), -1, dim)
        q = rotated(norm(q, t[name + "q_norm.weight"], eps), at[-len(y) :], theta)
        k = rotated(norm(k, t[name + "k_norm.weight"], eps), at, theta)
        groups = q.shape[1] // k.shape[1]
        mixed = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // groups].T / dim**0.5
            weights = np.exp(np.where(seen, scores, -np.inf))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, head // groups])
        return np.concatenate(mixed, axis=-1) @ t[name + "o_proj.weight"].T

    def mlp(self, name: str, y: np.ndarray) -> np.ndarray:
        gate = y @ self.t[name + "gate_proj.weight"].T
        up = y @ self.t[name + "up_proj.weight"].T
        return (gate * sigmoid(gate) * up) @ self.t[name + "down_proj.weight"].T

    def drafts(self, features: np.ndarray, anchor: int) -> list[int]:
        """The greedy drafts of one block."""
        t, own = self.t, self.own
        hidden = self.hidden(features, anchor)
        dspark, gru = "markov_head.markov_w1.weight" in t, "prefix_gru.weight_ih_l0" in t
        hidden = hidden[0 if dspark or (gru and own["shift_label"]) else 1 :]
        logits = hidden @ self.head.T * own.get("output_multiplier", 1.0)
        cap = own.get("final_logit_softcapping")
        logits = cap * np.tanh(logits / cap) if cap else logits
        drafts, state = [anchor], None
        for slot, (h, row) in enumerate(zip(hidden, logits, strict=True)):
            before = drafts[-1]
            if dspark:
                bias, state = self.markov(h, before, state)
                row = row + bias
            elif gru:
                bias, state = self.gru(h, before, state)
                row = row + (bias if slot >= own["pure_draft_prefix_len"] else 0)
            elif "candidate_selector.hidden_projection.weight" in t:
                row = self.selected(h, row, before)
            drafts.append(int(row.argmax()))
        return drafts[1:]

    def markov(self, h: np.ndarray, before: int, state: Any) -> tuple[np.ndarray, Any]:
        t = {name.removeprefix("markov_head."): x for name, x in self.t.items()}
        e, kind = t["markov_w1.weight"][before], self.own["markov_head_type"]
        if kind == "gated":
            e = e * sigmoid(t["gate_proj.weight"] @ np.r_[h, e] + t["gate_proj.bias"])
        if kind == "rnn":
            state = np.zeros_like(e) if state is None else state
            joint = t["joint_proj.weight"] @ np.r_[state, e, h] + t["joint_proj.bias"]
            gate, new, out = np.split(joint, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
            e = np.tanh(out)
        return t["markov_w2.weight"] @ e, state

    def gru(self, h: np.ndarray, before: int, state: Any) -> tuple[np.ndarray, Any]:
        t = self.t
        state = np.zeros(self.own["gru_hidden_dim"]) if state is None else state
        reset, update, new = np.split(t["prefix_gru.weight_ih_l0"] @ self.embedding[before], 3)
        r, z, n = np.split(t["prefix_gru.weight_hh_l0"] @ state, 3)
        new = np.tanh(new + sigmoid(reset + r) * n)
        state = (1 - sigmoid(update + z)) * new + sigmoid(update + z) * state
        inner = t["embed_proj.0.weight"] @ np.r_[h, state]
        return t["embed_proj.2.weight"] @ (inner * sigmoid(inner)), state

    def selected(self, h: np.ndarray, row: np.ndarray, before: int) -> np.ndarray:
        t = {name.removeprefix("candidate_selector."): x for name, x in self.t.items()}
        query = t["predecessor_codebook"][before] * (t["hidden_projection.weight"] @ h)
        scores = np.full_like(row, -np.inf)
        best = np.argsort(-row)[: self.own["selector_top_k"]]
        scores[best] = row[best] + t["successor_codebook"][best] @ query
        return scores
