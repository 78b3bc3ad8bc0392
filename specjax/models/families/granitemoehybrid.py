"""Granite 4 hybrid: Mamba2 layers, attention that may have no rope, and perhaps experts."""

from __future__ import annotations

from specjax._internal.fields import count, list_of, one_of
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.experts import ExpertNames, fused_experts, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, refuse
from specjax.models.families.fused import fused, renamed
from specjax.models.families.granite import read_factors, write_factors
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.mamba2 import KINDS, check_limit, mamba_tensors
from specjax.models.families.positions import read_rope
from specjax.models.mixers import Mamba2
from specjax.models.router import Router

_SIZES = {
    "heads": ("mamba_n_heads", 128),
    "state_dim": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1),
    "conv_size": ("mamba_d_conv", 4),
}
"""Fields of `Mamba2` -> fields of the file, and their defaults."""

_NAMES = {
    ".block_sparse_moe.shared_experts.down_proj.": ".shared_mlp.output_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
    ".block_sparse_moe.gate.": ".block_sparse_moe.router.layer.",
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}
"""Parts of the names that tables of experts have, and those of Granite."""


def _mixers(config: Config) -> tuple[Mamba2 | None, ...]:
    kinds = config.get("layer_types") or ["linear_attention"] * config["num_hidden_layers"]
    list_of(one_of(KINDS)).of("layer_types", kinds)
    if not any(KINDS[kind] for kind in kinds):
        return ()
    check_limit(config)
    theirs = [name for name, _ in _SIZES.values()]
    check_sizes(config, optional=(*theirs, "mamba_expand"))
    sizes = {ours: given(config, *names) for ours, names in _SIZES.items()}
    wide = given(config, "mamba_expand", 2) * config["hidden_size"]
    dim = given(config, "mamba_d_head", "auto")
    dim = wide // sizes["heads"] if dim == "auto" else dim
    if dim * sizes["heads"] != wide:
        raise ValueError(
            f"mamba_n_heads={sizes['heads']} heads of mamba_d_head={dim} numbers do not make up "
            f"mamba_expand * hidden_size = {wide}"
        )
    bias = flag(config, "mamba_proj_bias", False)
    conv_bias = flag(config, "mamba_conv_bias", True)
    mixer = Mamba2(head_dim=dim, bias=bias, out_bias=bias, conv_bias=conv_bias, **sizes)
    return tuple(mixer if KINDS[kind] else None for kind in kinds)


def _read(config: Config) -> TransformerConfig:
    refuse(config, hidden_act="silu")
    check_sizes(config, "num_hidden_layers", "hidden_size", optional=("shared_intermediate_size",))
    shared = given(config, "shared_intermediate_size", 1024)
    experts = count(0, MOST["num_experts"]).read(config, "num_local_experts", 8)
    chosen: Config = {}
    if experts:
        config = {"intermediate_size": 32000, **config}
        check_sizes(config, "intermediate_size", optional=("num_experts_per_tok",))
        chosen = {
            "num_experts": experts,
            "experts_per_token": given(config, "num_experts_per_tok", 2),
            "expert_size": config["intermediate_size"],
            "normalise_experts": False,
            "router": Router(of_chosen=True),
            "shared_size": shared,
        }
    else:
        config = {**config, "intermediate_size": shared}
    kind = config.get("position_embedding_type")
    one_of((None, "nope", "rope")).of("position_embedding_type", kind)
    return read_llama(
        config,
        rope=read_rope(config) if kind == "rope" else None,
        mixers=_mixers(config),
        mlp_bias=False,
        **read_factors(config),
        **chosen,
    )


def _write(c: TransformerConfig) -> Config:
    m = next((m for m in c.mixers if isinstance(m, Mamba2)), None)
    config = write_llama(
        c,
        attention_bias=c.qkv_bias,
        shared_intermediate_size=c.shared_size if c.num_experts else c.mlp_size,
        num_local_experts=c.num_experts,
        position_embedding_type=None if c.rope is None else "rope",
        layer_types=[
            "mamba" if mixer else "attention" for mixer in c.mixers or (None,) * c.num_layers
        ],
        **write_factors(c),
    )
    if c.num_experts:
        config |= {
            "intermediate_size": c.expert_size,
            "num_experts_per_tok": c.experts_per_token,
        }
    if m is None:  # the default of 128 heads does not fit all sizes
        return {**config, "mamba_n_heads": 1}
    return {
        **config,
        **{theirs: getattr(m, ours) for ours, (theirs, _) in _SIZES.items()},
        "mamba_d_head": m.head_dim,
        "mamba_expand": m.size // c.hidden_size,
        "mamba_proj_bias": m.bias,
        "mamba_conv_bias": m.conv_bias,
    }


def _tensors(c: TransformerConfig) -> list[Tensor]:
    def mixer(c: TransformerConfig, layer: int) -> list[Tensor]:
        m, theirs = c.mixer_of(layer), f"model.layers.{layer}.mamba"
        assert isinstance(m, Mamba2)
        return mamba_tensors(m, theirs, (f"layer_{layer}", "mixer"), c.hidden_size)

    if c.num_experts:
        names = ExpertNames("block_sparse_moe", ("gate", "up", "down"))
        rows, size = fused_experts(sparse_tensors(c, names, mixer), c), c.shared_size
    else:
        rows, size = llama_tensors(c, mixers=mixer), c.mlp_size
    for i in range(c.num_layers):
        both = {"gate": size, "up": size}
        rows = fused(rows, i, "shared_mlp.input_linear", both, c.hidden_size)
    return renamed(rows, _NAMES)


GRANITEMOEHYBRID = Family("GraniteMoeHybridForCausalLM", _read, _write, _tensors, fused=True)
