"""Fields and tensors of latent attention and experts, which families of DeepSeek's form share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax._internal.checks import shown
from specjax._internal.fields import count
from specjax.models.config import MOST, Mixer, TransformerConfig
from specjax.models.families.experts import ExpertNames, sparse_tensors
from specjax.models.families.family import Config, Tensor
from specjax.models.families.fields import check_sizes, flag, given, number, refuse
from specjax.models.families.llama import dense, read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.mixers import Latent
from specjax.models.rope import Rope, yarn_growth
from specjax.models.router import Router

DRAFTING = ("model.layers.{num_layers}.",)
"""The beginning of the names of the layer that drafts, which stands behind the last one."""

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def read_latent(
    config: Config, rope: Rope | None, others: Sequence[Mixer | None] = (), **changes: object
) -> TransformerConfig:
    """Reads a configuration as `read_llama`, of which some or all layers have latent attention.

    Args:
      config: with the family's defaults for the fields that the file leaves out.
      rope: of the shared key; None: it has no positions.
      others: by layer: the mixer of a layer that has another one; () if all layers have this.
      changes: as for `read_llama`.
    """
    check_sizes(config, *_SIZES, optional=("q_lora_rank",))
    refuse(config, mlp_bias=False)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    if given(config, "num_key_value_heads", heads) != heads:
        raise ValueError(
            f"num_key_value_heads={shown(config['num_key_value_heads'])} is not supported for "
            f"{config['model_type']}; latent attention has one for each of the {heads} heads"
        )
    sizes = Latent(
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        q_rank=config.get("q_lora_rank"),
    )
    grows = rope is not None and rope.mscale_all_dim
    growth = yarn_growth(rope.factor, rope.mscale_all_dim) if rope and grows else 1.0
    fields: dict[str, Any] = {
        "rope": rope,
        "interleaved": flag(config, "rope_interleave", True),
        "num_kv_heads": heads,
        "head_dim": sizes.rope_dim,
        "query_scale": None if growth == 1.0 else sizes.key_dim**-0.5 * growth**2,
        "mixers": tuple(other or sizes for other in others or (None,) * layers),
        "mlp_bias": False,
    }
    return read_llama(config, **{**fields, **changes})


def read_latent_rope(config: Config, whole: int | None = None) -> Rope:
    """Reads the rope of the shared key, all of whose numbers are turned.

    Args:
      config: as for `read_latent`.
      whole: the numbers of which the file says what part is turned; by default those of the key.

    Raises:
      ValueError: a field that would change the numbers, and that is not supported.
    """
    check_sizes(config, *_SIZES)
    turned, kind = config["qk_rope_head_dim"], {"model_type": config["model_type"]}
    every = turned if whole is None else whole
    rope = read_rope(config, fraction=turned / every)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.kind != "yarn" and scaling.get("rope_type", scaling.get("type")) != "default":
        refuse({**scaling, **kind}, mscale_all_dim=0)
    if int(every * rope.fraction) != turned:
        part = {"partial_rotary_factor": rope.fraction, **kind}
        refuse(part, partial_rotary_factor=turned / every)
    return dataclasses.replace(rope, fraction=1.0)


def read_experts(
    config: Config, scores: str, sparse: tuple[bool, ...], group_best: int = 2
) -> Config:
    """Reads the fields of experts.

    Args:
      config: as for `read_latent`.
      scores: the family's scores; those of a sigmoid are corrected.
      sparse: by layer: whether it has experts.
      group_best: as in `Router`.

    Returns:
      Fields of `TransformerConfig`.
    """
    check_sizes(config, *_EXPERTS, optional=("n_group", "topk_group"))
    shared = count(0, MOST["num_experts"]).read(config, "n_shared_experts", 0)
    groups = given(config, "n_group", 1)
    router = Router(
        scores=scores,
        corrected=scores == "sigmoid",
        groups=groups,
        kept_groups=given(config, "topk_group", 1) if groups > 1 else 1,
        group_best=group_best,
        scale=number(config, "routed_scaling_factor", 1.0, most=1e6),
    )
    return {
        "num_experts": config["n_routed_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "shared_size": shared * config["moe_intermediate_size"],
        "normalise_experts": flag(config, "norm_topk_prob", True),
        "router": router,
        "sparse": () if all(sparse) else sparse,
    }


def sparse_after(config: Config) -> tuple[bool, ...]:
    """Returns the layers that have experts: those from `first_k_dense_replace` on."""
    refuse(config, moe_layer_freq=1)
    first = count(0).read(config, "first_k_dense_replace", 0)
    return tuple(i >= first for i in range(config["num_hidden_layers"]))


def write_latent(c: TransformerConfig, **changes: object) -> Config:
    """Returns a Hugging Face configuration; `changes` replace fields in which a family differs.

    Without a layer of latent attention it has only the size of the shared key, which is `head_dim`.
    """
    fields: Config = {
        "attention_bias": c.qkv_bias,
        "qk_rope_head_dim": c.head_dim,
        "rope_interleave": c.interleaved,
        "n_routed_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_size,
        "n_shared_experts": c.shared_size // c.expert_size,
        "norm_topk_prob": c.normalise_experts,
        "routed_scaling_factor": c.router.scale,
        "n_group": c.router.groups,
        "topk_group": c.router.kept_groups,
        "first_k_dense_replace": sum(not c.is_sparse(i) for i in range(c.num_layers)),
    }
    sizes = next((m for m in c.mixers if isinstance(m, Latent)), None)
    if sizes is not None:
        fields |= {
            "kv_lora_rank": sizes.kv_rank,
            "q_lora_rank": sizes.q_rank,
            "qk_nope_head_dim": sizes.nope_dim,
            "v_head_dim": sizes.value_dim,
        }
    return write_llama(c, **{**fields, **changes})


def latent_tensors(c: TransformerConfig) -> list[Tensor]:
    """Returns every tensor that the files must hold, with a matrix for each part of an expert."""
    return sparse_tensors(c, ExpertNames(), mixer_tensors)


def mixer_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns the tensors of a layer's latent attention."""
    sizes, heads = c.mixer_of(layer), c.num_heads
    assert isinstance(sizes, Latent)
    theirs, ours = f"model.layers.{layer}.self_attn", (f"layer_{layer}", "mixer")
    if sizes.q_rank is None:
        rows = dense(f"{theirs}.q_proj", (*ours, "q"), False)
    else:
        rows = dense(f"{theirs}.q_a_proj", (*ours, "q_a"), c.qkv_bias)
        rows.append(Tensor(f"{theirs}.q_a_layernorm.weight", (*ours, "q_norm", "weight")))
        rows += dense(f"{theirs}.q_b_proj", (*ours, "q_b"), False)
    rows += dense(f"{theirs}.kv_a_proj_with_mqa", (*ours, "kv_a"), c.qkv_bias)
    rows.append(Tensor(f"{theirs}.kv_a_layernorm.weight", (*ours, "kv_norm", "weight")))
    both = sizes.nope_dim + sizes.value_dim
    parts = {"key_up": slice(sizes.nope_dim), "value_up": slice(sizes.nope_dim, None)}
    for name, part in parts.items():
        row = Tensor(
            f"{theirs}.kv_b_proj.weight",
            (*ours, name),
            shape=(heads * both, sizes.kv_rank),
            view=(heads, both, sizes.kv_rank),
            index=(slice(None), part),
        )
        rows.append(row)
    return rows + dense(f"{theirs}.o_proj", (*ours, "o"), c.out_bias)
