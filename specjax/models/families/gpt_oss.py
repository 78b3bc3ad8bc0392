"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, biases, and experts in fused tensors."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import (
    check_sizes,
    flag,
    number,
    read_windows,
    refuse,
    write_windows,
)
from specjax.models.families.llama import attention_tensors, dense, read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.router import Router

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling of a file that has none."""


def _read(config: Config) -> TransformerConfig:
    refuse(config, hidden_act="silu")  # the experts' activation is a fixed one
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    check_sizes(config, experts, "num_experts_per_tok")
    names = ("rope_parameters", "rope_scaling")
    if all(config.get(name) is None for name in names):
        config = {**config, "rope_parameters": _YARN}
    layers = range(config["num_hidden_layers"])
    types = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    bias = flag(config, "attention_bias", True)
    return read_llama(
        config,
        rope=read_rope(config, theta=150000.0),
        head_dim=config.get("head_dim") or 64,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        windows=read_windows({"sliding_window": 128, **config}, types),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        mlp_bias=False,
        gate_limit=number(config, "swiglu_limit", 7.0, most=1e9),
        gate_slope=number(config, "swiglu_alpha", 1.702, least=0.0, most=1e9),
        num_experts=config[experts],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
        expert_bias=True,
        normalise_experts=False,
        router=Router(of_chosen=True, bias=True),
    )


def _write(c: TransformerConfig) -> Config:
    return write_llama(
        c,
        attention_bias=c.qkv_bias,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        swiglu_limit=c.gate_limit,
        swiglu_alpha=c.gate_slope,
        **write_windows(c.windows or (None,) * c.num_layers),
    )


def _tensors(c: TransformerConfig) -> list[Tensor]:
    rows = [
        Tensor("model.embed_tokens.weight", ("embedding",)),
        Tensor("model.norm.weight", ("norm", "weight")),
    ]
    if not c.tied_embeddings:
        rows.append(Tensor("lm_head.weight", ("head", "kernel"), transpose=True))
    for i in range(c.num_layers):
        theirs, ours = f"model.layers.{i}", f"layer_{i}"
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        for name, there in norms.items():
            rows.append(Tensor(f"{theirs}.{there}.weight", (ours, name, "weight")))
        rows += attention_tensors(c, f"{theirs}.self_attn", (ours, "attention"), {})
        rows.append(Tensor(f"{theirs}.self_attn.sinks", (ours, "attention", "sinks")))
        rows += dense(f"{theirs}.mlp.router", (ours, "mlp", "router"), True)
        rows += _experts(c, f"{theirs}.mlp.experts", (ours, "mlp"))
    return rows


def _experts(c: TransformerConfig, theirs: str, ours: tuple[str, ...]) -> list[Tensor]:
    """Returns the rows of a layer's experts: the outputs of gate and up lie in turn."""
    rows = []
    for kind, inner in (("", (c.hidden_size,)), ("_bias", ())):
        shape = (c.num_experts, *inner, 2 * c.expert_size)
        for first, part in enumerate(("gate", "up")):
            turn = (..., slice(first, None, 2))
            name, path = f"{theirs}.gate_up_proj{kind}", (*ours, part + kind)
            rows.append(Tensor(name, path, shape=shape, index=turn))
        rows.append(Tensor(f"{theirs}.down_proj{kind}", (*ours, f"down{kind}")))
    return rows


GPT_OSS = Family("GptOssForCausalLM", _read, _write, _tensors, fused=True)
