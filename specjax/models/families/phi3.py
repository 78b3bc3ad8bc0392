"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): Llama with fused projections and longrope."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import number, read_windows, refuse, write_windows
from specjax.models.families.fused import fused
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope


def _read(config: Config) -> TransformerConfig:
    refuse(config, attention_bias=False, mlp_bias=False)
    rope = read_rope(config)
    sliding = config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding else "full_attention"] * config["num_hidden_layers"]
    return read_llama(
        config,
        rope=rope,
        windows=read_windows(config, types),
        max_positions=read_context(config, rope, 4096),
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
    )


def _write(c: TransformerConfig) -> Config:
    config = write_llama(c, sliding_window=write_windows(c.windows)["sliding_window"])
    if c.rope is not None and c.rope.kind == "longrope":
        config["original_max_position_embeddings"] = c.rope.original_max_positions
    return config


def _tensors(c: TransformerConfig) -> list[Tensor]:
    heads, shared = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention, mlp = (
        {"q": heads, "k": shared, "v": shared},
        {"gate": c.mlp_size, "up": c.mlp_size},
    )
    rows = llama_tensors(c)
    for i in range(c.num_layers):
        rows = fused(rows, i, "self_attn.qkv_proj", attention, c.hidden_size)
        rows = fused(rows, i, "mlp.gate_up_proj", mlp, c.hidden_size)
    return rows


PHI3 = Family("Phi3ForCausalLM", _read, _write, _tensors, ignored=(".rotary_emb.inv_freq",))
