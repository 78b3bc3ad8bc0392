"""GLM-4-0414: four norms a layer, and a rope of neighbouring dimensions in half of each head."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import flag, number
from specjax.models.families.fused import fused
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope

_NAMES = {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _read(config: Config) -> TransformerConfig:
    return read_llama(
        {"head_dim": 128, **config},  # the default of a missing field
        rope=read_rope(config, fraction=0.5),
        interleaved=True,
        norm_order="sandwich",
        norm_eps=number(config, "rms_norm_eps", 1.5625e-7, least=0.0, most=1.0),
        qkv_bias=flag(config, "attention_bias", True),
        out_bias=False,
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    return write_llama(c, attention_bias=c.qkv_bias, partial_rotary_factor=c.rope.fraction)


def _tensors(c: TransformerConfig) -> list[Tensor]:
    rows, sizes = llama_tensors(c, names=_NAMES), {"gate": c.mlp_size, "up": c.mlp_size}
    for i in range(c.num_layers):
        rows = fused(rows, i, "mlp.gate_up_proj", sizes, c.hidden_size)
    return rows


GLM4 = Family("Glm4ForCausalLM", _read, _write, _tensors)
