"""What the networks of sources say about a text, in NumPy and without a cache."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from block_reference import BlockReference
from naive_eagle3 import NaiveEagle3
from naive_mtp import NaiveMtp
from table_model import PLACES

from specjax.methods import BlockDraftSource, Eagle3Config, MtpConfig


class NaiveTable:
    """A `TableModel` with parameters, which reads one text."""

    def __init__(self, params: Any, memory: int) -> None:
        self.embedding, self.place, self.head = (
            np.asarray(x) for x in (params["embedding"], params["place"], params["head"]["kernel"])
        )
        self.memory = memory

    def hidden(self, text: Sequence[int]) -> np.ndarray:
        """[T, E]"""
        rows = self.embedding[list(text)]
        mixed = self.place[np.arange(len(text)) % PLACES].copy()
        for age in range(min(self.memory + 1, len(text))):
            mixed[age:] += np.float32(0.5**age) * rows[: len(text) - age]
        return mixed

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """[V] after the text."""
        return self.hidden(text)[-1] @ self.head

    def features(self, text: Sequence[int], taps: Sequence[int]) -> np.ndarray:
        """[T, sum E]"""
        hidden = self.hidden(text)
        return np.concatenate(
            [np.roll(hidden, tap - 1, axis=-1) if tap else self.embedding[list(text)]
             for tap in taps], axis=-1,
        )  # fmt: skip


def drawn(shapes: Any, seed: int, scale: float = 0.3) -> Any:
    """Random numbers in the shapes of parameters; the weights of norms are around 1."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        around = 1.0 if str(path[-1].key) == "weight" else 0.0
        return (around + scale * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _layer(params: Any, name: str, norms: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a layer by their published names."""
    for ours, theirs in {**norms, "mlp_norm": "post_attention_layernorm"}.items():
        yield f"{name}{theirs}.weight", params[ours]["weight"]
    for part in "qkvo":
        yield f"{name}self_attn.{part}_proj.weight", params["attention"][part]["kernel"].T
    for part in "qk" if "q_norm" in params["attention"] else "":
        yield f"{name}self_attn.{part}_norm.weight", params["attention"][f"{part}_norm"]["weight"]
    for part in ("gate", "up", "down"):
        yield f"{name}mlp.{part}_proj.weight", params["mlp"][part]["kernel"].T


def naive_eagle3(
    network: Eagle3Config, own: Any, embedding: Any, head: Any, features_of: Any
) -> NaiveEagle3:
    """A head of one layer, from the parameters of an `Eagle3Source` or a `PEagleSource`."""
    made, c = own["network"], network.layers
    tensors = {"fc.weight": made["fc"]["kernel"].T, "norm.weight": made["norm"]["weight"]}
    norms = {"embedding_norm": "input_layernorm", "feature_norm": "hidden_norm"}
    tensors |= dict(_layer(made["layers_0"], "layers.0.", norms))
    if network.norm_before_fc:
        tensors["input_norm.weight"] = made["input_norm"]["weight"]
    for tap in range(network.num_taps if network.fc_norm else 0):
        tensors[f"fc_norm.{tap}.weight"] = made[f"fc_norms_{tap}"]["weight"]
    if "mask_hidden" in own:
        tensors["mask_hidden"] = own["mask_hidden"][None, None]
    if "to_draft" in own:
        kept = np.flatnonzero(own["to_draft"] >= 0)
        tensors["d2t"] = kept - np.arange(len(kept))
    form = types.SimpleNamespace(
        taps=range(network.num_taps), num_layers=1, qk_norm=False, heads=c.num_heads,
        draft_vocab=len(head[0]) if "to_draft" in own else None,
        norm_before_residual=network.norm_before_residual, norm_output=network.feeds_normed,
        norm_before_fc=network.norm_before_fc, fc_norm=network.fc_norm, theta=c.rope.theta,
        eps=c.norm_eps, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
    )  # fmt: skip
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    matrix = np.asarray(head, np.float64).T
    return NaiveEagle3(form, tensors, np.asarray(embedding, np.float64), matrix, features_of)


def naive_mtp(
    network: MtpConfig, own: Any, embedding: Any, head: Any, features_of: Any
) -> NaiveMtp:
    """An MTP layer with an MLP, from the parameters of an `MtpSource`."""
    made, c = own["network"], network.layers
    tensors = {"project.weight": made["project"]["kernel"].T}
    norms = ("embedding_norm", "hidden_norm", *["norm"] * network.has_norm)
    tensors |= {f"{name}.weight": made[name]["weight"] for name in norms}
    tensors |= dict(_layer(made["layers_0"], "layers.0.", {"attention_norm": "input_layernorm"}))
    form = types.SimpleNamespace(
        qk_norm=False, heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        eps=c.norm_eps, theta=c.rope.theta, norm_output=network.feeds_normed, draft_vocab=None,
        hidden_first=network.hidden_first, zeroes_first=network.zeroes_first,
        has_norm=network.has_norm,
    )  # fmt: skip
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    matrix = np.asarray(head, np.float64).T
    return NaiveMtp(form, tensors, np.asarray(embedding, np.float64), matrix, features_of)


_CORRECTIONS = {
    ("before",): "markov_head.markov_w1.weight",
    ("after",): "markov_head.markov_w2.weight",
    ("gate", "kernel"): "markov_head.gate_proj.weight",
    ("gate", "bias"): "markov_head.gate_proj.bias",
    ("joint", "kernel"): "markov_head.joint_proj.weight",
    ("joint", "bias"): "markov_head.joint_proj.bias",
    ("input",): "prefix_gru.weight_ih_l0",
    ("state",): "prefix_gru.weight_hh_l0",
    ("inner",): "embed_proj.0.weight",
    ("output",): "embed_proj.2.weight",
    ("projection",): "candidate_selector.hidden_projection.weight",
    ("predecessor",): "candidate_selector.predecessor_codebook",
    ("successor",): "candidate_selector.successor_codebook",
}
"""Our names of the parameters of corrections -> the published ones."""

_TABLES = {("before",), ("predecessor",), ("successor",)}


class NaiveBlock(BlockReference):
    """A block draft, from the parameters of a `BlockDraftSource`."""

    def __init__(self, source: BlockDraftSource, own: Any, embedding: Any, head: Any) -> None:
        config, correction, made = source.net.config, source.correction, own["draft"]
        self.first, c = config.first_slot, config.layers
        tensors = {f"{name}.weight": made[name]["weight"] for name in ("norm", "hidden_norm")}
        tensors["fc.weight"] = made["fc"]["kernel"].T
        for i in range(c.num_layers):
            name, layer = f"layers.{i}.", made[f"layer_{i}"]
            tensors |= dict(_layer(layer, name, {"attention_norm": "input_layernorm"}))
            for conv in ("attention_conv", "mlp_conv") if config.conv_size else ():
                tensors[f"{name}{conv}.base_kernel"] = layer[conv]["base"]
                projection = layer[conv]["projection"]["kernel"]
                tensors[f"{name}{conv}.kernel_projection.weight"] = projection.T
        for path, tensor in jax.tree_util.tree_flatten_with_path(own["correction"])[0]:
            ours = tuple(key.key for key in path)
            if ours in _CORRECTIONS:
                tensors[_CORRECTIONS[ours]] = tensor if ours in _TABLES else tensor.T
        written = {
            "rms_norm_eps": c.norm_eps, "head_dim": c.head_dim, "is_causal": None,
            "rope_parameters": {"rope_theta": c.rope.theta},
            "layer_types": ["sliding_attention" if window else "" for window in c.windows],
            "sliding_window": max(window or 0 for window in c.windows),
            "dflash_config": {
                "block_size": config.block_size, "mask_token_id": config.mask_token,
                "markov_head_type": getattr(correction, "kind", None),
                "gru_hidden_dim": getattr(correction, "state_size", None),
                "selector_top_k": getattr(correction, "top_k", None),
                "pure_draft_prefix_len": getattr(correction, "uncorrected", None),
                "input_embedding_scale": config.embedding_scale,
            },
        }  # fmt: skip
        super().__init__(written, tensors, embedding, np.asarray(head).T)
        self.scale, self.cap = config.output_scale, config.logit_softcap

    def logits(self, features: np.ndarray, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """[U] after a text, whose last token is pending, and drafts below it."""
        hidden, state = self.slots(features, text), None
        for slot, before in enumerate((text[-1], *path)):
            h = hidden[slot]
            row = self.scale * (h @ self.head.T)
            row = row if self.cap is None else self.cap * np.tanh(row / self.cap)
            if "markov_head.markov_w1.weight" in self.t:
                bias, state = self.markov(h, before, state)
                row = row + bias
            elif "prefix_gru.weight_ih_l0" in self.t:
                bias, state = self.gru(h, before, state)
                row = row + bias * (slot >= self.own["pure_draft_prefix_len"])
            else:
                row = self.selected(h, row, before)
        return row

    def slots(self, features: np.ndarray, text: Sequence[int]) -> np.ndarray:
        """[D, H] the hidden states that predict the drafts."""
        return self.hidden(features, text[-1])[self.first :]
