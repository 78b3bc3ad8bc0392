"""Mistral Small 4: latent attention whose queries grow with the position, and experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_fields, check_sizes, number
from specjax.models.families.latent import (
    latent_tensors,
    read_experts,
    read_latent,
    read_latent_rope,
    sparse_after,
    write_latent,
)

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_DEFAULTS = {
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "max_position_embeddings": 2**20,
}  # fmt: skip
_ROPE: Config = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, _ORIGINAL: 8192, "mscale": 1.0,
    "mscale_all_dim": 1.0, _BETA: 0.1,
}  # fmt: skip
"""Values of fields that a file leaves out, and the rope of a file that has none."""


def _read(config: Config) -> TransformerConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
    config = {**_DEFAULTS, **config, "rope_parameters": scaling}
    check_sizes(config, "qk_nope_head_dim", "qk_rope_head_dim")
    rope = read_latent_rope(config, config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if scaling.get(_BETA):
        growth = number(scaling, _BETA, least=0.0, most=1e3)
        check_fields({_ORIGINAL: scaling[_ORIGINAL]})
        rope = dataclasses.replace(rope, growth=growth, original_max_positions=scaling[_ORIGINAL])
    return read_latent(config, rope, **read_experts(config, "softmax", sparse_after(config)))


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    config: dict[str, Any] = write_latent(c)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {}
    whole = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rope = {
        "rope_type": "default",
        "rope_theta": theta,
        **scaling,
        "partial_rotary_factor": config["qk_rope_head_dim"] / whole,
        _BETA: c.rope.growth,
        _ORIGINAL: c.rope.original_max_positions,
    }
    return {**config, "head_dim": whole, "rope_parameters": rope}


def _tensors(c: TransformerConfig) -> list[Tensor]:
    """Returns the tensors; an expert's gate and up are one matrix, in a stack of all experts."""
    rows, size = [], c.expert_size
    stacked = {"gate": slice(size), "up": slice(size, None), "down": slice(None)}
    for row in latent_tensors(c):
        if row.at is not None:
            part, width = row.path[2], c.hidden_size
            block = f"model.layers.{row.path[0].removeprefix('layer_')}.mlp.experts"
            name, shape = "down_proj", (c.num_experts, width, size)
            if part != "down":
                name, shape = "gate_up_proj", (c.num_experts, 2 * size, width)
            index = (row.at, stacked[part])
            row = dataclasses.replace(row, name=f"{block}.{name}", shape=shape, index=index)
        rows.append(row)
    return rows


MISTRAL4 = Family("Mistral4ForCausalLM", _read, _write, _tensors)
