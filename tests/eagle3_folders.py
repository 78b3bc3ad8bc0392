"""Random EAGLE-3 and P-EAGLE heads in every published layout, and targets for them."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np

import specjax

VOCAB, SIZE, LAYERS = 320, 48, 7
DRAFT_VOCAB = 200


@functools.cache
def target_model(kind: str = "llama") -> folders.Llama:
    """A random target of seven layers whose greedy text varies."""
    made = folders.random_llama(
        7, hidden_size=SIZE, num_hidden_layers=LAYERS, head_dim=12, max_position_embeddings=512,
        initializer_range=0.4, pad_token_id=0, tie_word_embeddings=kind == "gemma2",
    )  # fmt: skip
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
              "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
              "tie_word_embeddings")  # fmt: skip
    config = {name: made.config[name] for name in shared} | {"model_type": kind, **MORE[kind]}
    tensors, rng = dict(made.tensors), np.random.default_rng(8)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        more = {"qwen3": ("self_attn.q_norm", "self_attn.k_norm"),
                "gemma2": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}  # fmt: skip
        for part in more.get(kind, ()):
            size = 12 if "attn" in part else SIZE
            tensors[f"{name}{part}.weight"] = 1 + 0.3 * rng.standard_normal(size, np.float32)
    if kind == "gemma2":  # its norms multiply by one more than their weight
        tensors = {n: x - 1 if x.ndim == 1 else x for n, x in tensors.items()}
    return folders.Llama(config, tensors)


MORE: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"]},
}


@functools.cache
def target(kind: str = "llama") -> pathlib.Path:
    return folders.write(target_model(kind), f"eagle3-target-{kind}")


@functools.cache
def _reader(kind: str) -> tuple[specjax.LanguageModel, Any]:
    loaded = specjax.load(target(kind))

    @jax.jit
    def read(params: Any, tokens: jax.Array) -> jax.Array:
        at = jnp.arange(tokens.shape[1])[None]
        return loaded.model.apply(params, tokens, at, taps=tuple(range(LAYERS))).features

    return loaded, read


@functools.cache
def _states(kind: str, tokens: tuple[int, ...]) -> np.ndarray:
    """[LAYERS, T, E] by one pass without a cache; `tests/product` compares it with transformers."""
    loaded, read = _reader(kind)
    padded = np.zeros((1, -(-len(tokens) // 32) * 32), np.int32)
    padded[0, : len(tokens)] = tokens
    features = np.asarray(read(loaded.params, padded)[0, : len(tokens)], np.float64)
    return features.reshape(len(tokens), LAYERS, SIZE).swapaxes(0, 1)


def features_of(kind: str, tokens: tuple[int, ...], taps: tuple[int, ...]) -> np.ndarray:
    """[T, n E] of the target, read plainly."""
    assert max(taps) < LAYERS
    return np.concatenate([_states(kind, tokens)[tap] for tap in taps], axis=-1)


@dataclasses.dataclass(frozen=True)
class Head:
    """The form of a head."""

    taps: tuple[int, ...] = (2, 3, 4)
    num_layers: int = 1
    draft_vocab: int | None = DRAFT_VOCAB  # None: the target's
    own_embedding: bool = False
    own_head: bool = True
    qk_norm: bool = False
    bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_hidden: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    mlp: int = 56
    theta: float = 10000.0
    eps: float = 1e-5

    def tensors(self, seed: int = 0, midlayer: bool = False) -> dict[str, np.ndarray]:
        """Random tensors under the names of the layout."""
        draw = np.random.default_rng(seed)

        def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
            return np.float32(scale) * draw.standard_normal(shape, np.float32)

        def norm(size: int) -> np.ndarray:
            return 1 + normal(size)

        made = {"fc.weight": normal(SIZE, len(self.taps) * SIZE), "norm.weight": norm(SIZE)}
        for i in range(self.num_layers):
            name = f"layers.{i}."
            if midlayer:
                name = "midlayer." if self.num_layers == 1 else f"midlayer.{i}."
            wide = 2 * SIZE if i == 0 else SIZE
            made[f"{name}input_layernorm.weight"] = norm(SIZE)
            if i == 0:
                made[f"{name}hidden_norm.weight"] = norm(SIZE)
            made[f"{name}post_attention_layernorm.weight"] = norm(SIZE)
            for part, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                made[f"{name}self_attn.{part}_proj.weight"] = normal(count * self.head_dim, wide)
                if self.bias:
                    made[f"{name}self_attn.{part}_proj.bias"] = normal(count * self.head_dim)
            made[f"{name}self_attn.o_proj.weight"] = normal(SIZE, self.heads * self.head_dim)
            for part in "qk" if self.qk_norm else "":
                made[f"{name}self_attn.{part}_norm.weight"] = norm(self.head_dim)
            made[f"{name}mlp.gate_proj.weight"] = normal(self.mlp, SIZE)
            made[f"{name}mlp.up_proj.weight"] = normal(self.mlp, SIZE)
            made[f"{name}mlp.down_proj.weight"] = normal(SIZE, self.mlp)
        if self.norm_before_fc:
            made["input_norm.weight"] = norm(len(self.taps) * SIZE)
        for k in range(len(self.taps) if self.fc_norm else 0):
            made[f"fc_norm.{k}.weight"] = norm(SIZE)
        if self.own_embedding:
            made["embed_tokens.weight"] = normal(VOCAB, SIZE)
        if self.own_head:
            made["lm_head.weight"] = normal(self.draft_vocab or VOCAB, SIZE)
        if self.mask_hidden:
            made["mask_hidden"] = normal(1, 1, len(self.taps) * SIZE)
        if self.draft_vocab is not None:
            kept = np.sort(draw.permutation(VOCAB)[: self.draft_vocab])
            made["d2t"] = kept - np.arange(self.draft_vocab)
            made["t2d"] = np.isin(np.arange(VOCAB), kept)
        return made

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration of the layers."""
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": SIZE,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCAB,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "max_position_embeddings": 64,
        }


def authors(head: Head) -> dict[str, Any]:
    """The configuration in the authors' layout, which names no taps."""
    switches = {"fc_norm": True, "norm_output": True} if head.norm_output else {}
    more = {"draft_vocab_size": head.draft_vocab or VOCAB, "tie_word_embeddings": True}
    return {"architectures": ["LlamaForCausalLMEEagle3"], **head.fields, **more, **switches}


def model_opt(head: Head) -> dict[str, Any]:
    """NVIDIA's layout: nested ids of the layers whose outputs are read, counted from 0."""
    inner = {
        "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": None,
    }
    scaling = {"rope_type": "default", "rope_theta": head.theta}
    fields = {**head.fields, "attention_bias": None, "rope_scaling": scaling}
    return {"architectures": ["LlamaForCausalLMEagle3"], **fields, "eagle_config": inner}


def speculators(head: Head, kind: str = "eagle3") -> dict[str, Any]:
    """The layout of speculators, which leaves out what equals the default of a class."""
    defaults = {"rope_theta": 10000.0, "hidden_act": "silu", "num_attention_heads": 32}
    defaults |= {"head_dim": 128} if head.qk_norm else {}
    inner = {name: value for name, value in head.fields.items() if defaults.get(name) != value}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": head.draft_vocab or VOCAB,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def deep_spec(head: Head) -> dict[str, Any]:
    """DeepSpec's layout: the target's configuration, ids counted from 0, -1 is the embedding."""
    return {
        "architectures": ["Qwen3Eagle3Model"],
        **head.fields,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"],
        "target_layer_ids": [tap - 1 for tap in head.taps],
        "ttt_length": 5,
        "tie_word_embeddings": False,
        "target_model_name_or_path": "org/target",
    }


def write(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, Any]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    folders.save_tensors(tensors, folder / "model.safetensors")
    return folder


LAYOUTS: dict[str, tuple[Head, Any, bool, str]] = {
    "authors": (Head(), authors, True, "llama"),
    "authors, own tables": (Head(own_embedding=True, draft_vocab=None), authors, True, "gemma2"),
    "authors, shared": (
        Head(own_head=False, draft_vocab=None),
        authors,
        True,
        "qwen3",
    ),
    "authors, 3.1": (Head(fc_norm=True, norm_output=True), authors, True, "qwen3"),
    "ModelOpt": (Head(taps=(1, 6)), model_opt, False, "qwen3"),
    "ModelOpt, two layers": (Head(taps=(1, 3, 5), num_layers=2), model_opt, True, "gemma2"),
    "speculators": (
        Head((3, 5, 6), own_embedding=True, norm_before_residual=True, theta=5e5),
        speculators,
        False,
        "qwen3",
    ),
    "speculators, one norm": (
        Head(norm_before_fc=True, qk_norm=True, num_layers=2),
        speculators,
        False,
        "llama",
    ),
    "speculators, 3.1": (
        Head(fc_norm=True, norm_output=True, bias=True, head_dim=16),
        speculators,
        False,
        "gemma2",
    ),
    "DeepSpec": (
        Head((0, 2, 3, 4, 6), draft_vocab=None, own_embedding=True, qk_norm=True),
        deep_spec,
        False,
        "qwen3",
    ),
}
"""Name -> form, configuration, are the layers called "midlayer", and the kind of target."""

PARALLEL: dict[str, tuple[Head, Any]] = {
    "speculators": (
        Head(num_layers=2, own_embedding=True, mask_hidden=True, norm_before_residual=True),
        lambda head: {**speculators(head, "peagle"), "mask_token_id": 11},
    ),
    "SpecForge": (
        Head(num_layers=3, own_embedding=True, mask_hidden=True, fc_norm=True, draft_vocab=None),
        lambda head: {
            **head.fields,
            "architectures": ["PEagleDraftModel"],
            "fc_norm": True,
            "mask_token_id": 319,
        },
    ),
}
"""P-EAGLE: name -> form and configuration; the target is a Llama."""


@functools.cache
def folder(layout: str) -> pathlib.Path:
    head, config, midlayer, _ = LAYOUTS[layout]
    name = "eagle3-" + layout.replace(" ", "-").replace(",", "").replace("'", "")
    return write(folders.ROOT / name, config(head), head.tensors(1, midlayer))
