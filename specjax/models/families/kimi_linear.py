"""Kimi Linear (arXiv 2510.26692): Kimi delta attention, and latent attention without positions."""

from __future__ import annotations

from typing import Any

from specjax._internal.fields import OBJECT, count, list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.experts import ExpertNames, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, given, number, refuse
from specjax.models.families.fused import convolution
from specjax.models.families.latent import (
    DRAFTING,
    mixer_tensors,
    read_experts,
    read_latent,
    sparse_after,
    write_latent,
)
from specjax.models.families.llama import dense
from specjax.models.mixers import KimiDelta

_DEFAULTS = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "n_shared_experts": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "max_position_embeddings": 2**20,
}  # fmt: skip
"""Values of fields that a file leaves out."""

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Names of fields in files, and those of DeepSeek's files."""

_OWN = {
    "head_dim": ("linear_head_dim", 128),
    "num_heads": ("linear_num_heads", 32),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
"""Fields of `linear_attn_config`, the fields of transformers, and their defaults."""

_FULL, _LINEAR = "full_attention", "linear_attention"
_LISTS = {"full_attn_layers": _FULL, "kda_layers": _LINEAR}
"""Lists of layers in `linear_attn_config`, which count from 1."""


def _kinds(config: Config, linear: Config) -> list[str]:
    """Returns the kind of each layer."""
    many = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None and all(linear.get(name) is not None for name in _LISTS):
        found: dict[int, str] = {}
        for name, kind in _LISTS.items():
            layers = list_of(count(1, many)).of(f"linear_attn_config: {name}", linear[name])
            found |= dict.fromkeys(layers, kind)
        if len(found) < many:
            missing = [i for i in range(1, many + 1) if i not in found]
            raise ValueError(
                f"linear_attn_config names layers {missing} neither in full_attn_layers nor in "
                f"kda_layers, which together must have each of the layers 1 to {many}"
            )
        kinds = [found[i] for i in range(1, many + 1)]
    if kinds is None:
        kinds = [_FULL if i and i % 4 == 0 else _LINEAR for i in range(many)]
    list_of(one_of((_FULL, _LINEAR))).of("layer_types", kinds)
    return kinds


def _sparse(config: Config) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return sparse_after(config)
    layers, each = config["num_hidden_layers"], "entries, one for each of num_hidden_layers"
    list_of(one_of(("dense", "sparse")), each, layers).of("mlp_layer_types", kinds)
    return tuple(kind == "sparse" for kind in kinds)


def _read(config: Config) -> TransformerConfig:
    renamed = {_NAMES.get(name, name): value for name, value in config.items()}
    config = {**_DEFAULTS, **renamed}
    refuse(
        config,
        hidden_act="silu",
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
    )
    check_sizes(config, "num_hidden_layers")
    linear = OBJECT.of("linear_attn_config", given(config, "linear_attn_config", {}))
    sizes = {
        **{theirs: default for theirs, default in _OWN.values()},
        **{theirs: config[theirs] for theirs, _ in _OWN.values() if theirs in config},
        **{theirs: linear[name] for name, (theirs, _) in _OWN.items() if name in linear},
    }
    check_sizes(sizes, *sizes)
    mixer = KimiDelta(
        heads=sizes["linear_num_heads"],
        head_dim=sizes["linear_head_dim"],
        conv_size=sizes["linear_conv_kernel_dim"],
    )
    return read_latent(
        config,
        None,
        [mixer if kind == _LINEAR else None for kind in _kinds(config, linear)],
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        interleaved=False,
        **read_experts(config, "sigmoid", _sparse(config)),
    )


def _write(c: TransformerConfig) -> Config:
    written: dict[str, Any] = write_latent(c)
    del written["rope_interleave"]
    theirs = {ours: name for name, ours in _NAMES.items() if name != "num_local_experts"}
    config = {theirs.get(name, name): value for name, value in written.items()}
    kinds = [isinstance(c.mixer_of(i), KimiDelta) for i in range(c.num_layers)]
    linear: dict[str, Any] = {
        name: [i + 1 for i, delta in enumerate(kinds) if delta == (kind == _LINEAR)]
        for name, kind in _LISTS.items()
    }
    m = next((m for m in c.mixers if isinstance(m, KimiDelta)), None)
    if m is not None:
        own = (m.head_dim, m.heads, m.conv_size)
        linear |= dict(zip(_OWN, own, strict=True))
    return {
        **config,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "mlp_layer_types": ["sparse" if c.is_sparse(i) else "dense" for i in range(c.num_layers)],
    }


def _tensors(c: TransformerConfig) -> list[Tensor]:
    def mixer(c: TransformerConfig, layer: int) -> list[Tensor]:
        m = c.mixer_of(layer)
        if not isinstance(m, KimiDelta):
            return mixer_tensors(c, layer)
        theirs, ours = f"model.layers.{layer}.self_attn", (f"layer_{layer}", "mixer")
        rows = [
            Tensor(f"{theirs}.A_log", (*ours, "A_log"), shape=(1, 1, m.heads, 1)),
            Tensor(f"{theirs}.dt_bias", (*ours, "dt_bias")),
            Tensor(f"{theirs}.o_norm.weight", (*ours, "norm")),
        ]
        for name in "qkv":
            sizes = {name: m.heads * m.head_dim}
            rows += convolution(f"{theirs}.{name}_conv1d", ours, sizes, m.conv_size)
        for name in ("q", "k", "v", "b", "o", "f_a", "f_b", "g_a", "g_b"):
            rows += dense(f"{theirs}.{name}_proj", (*ours, name), False)
        return rows

    return sparse_tensors(c, ExpertNames("block_sparse_moe", ("w1", "w3", "w2")), mixer)


KIMI_LINEAR = Family(
    "KimiLinearForCausalLM",
    _read,
    _write,
    _tensors,
    skipped=DRAFTING,
    aliases={".mlp.": ".block_sparse_moe."},  # transformers writes dense layers like that
)
