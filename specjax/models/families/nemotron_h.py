"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): a layer is a mixer, an MLP or experts."""

from __future__ import annotations

from specjax._internal.fields import TEXT, list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.experts import ExpertNames, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import (
    activation,
    activation_name,
    check_sizes,
    flag,
    given,
    number,
    refuse,
)
from specjax.models.families.fused import renamed
from specjax.models.families.latent import read_experts
from specjax.models.families.llama import dense, read_llama, write_llama
from specjax.models.families.mamba2 import KINDS, check_limit, mamba_tensors
from specjax.models.mixers import Mamba2

_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".norm.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}
"""Parts of Llama's names, and those of Nemotron-H."""

_SIZES = {
    "heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "state_dim": ("ssm_state_size", 128),
    "groups": ("n_groups", 8),
    "conv_size": ("conv_kernel", 4),
}
"""Fields of `Mamba2` -> fields of the file, and their defaults."""

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The kinds of layers in `hybrid_override_pattern`."""

_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}  # fmt: skip
"""Values of fields that a file leaves out."""


def _kinds(config: Config) -> list[str]:
    """Returns the kind of each layer."""
    kinds = config.get("layers_block_type")
    if kinds is None:
        pattern = TEXT.read(config, "hybrid_override_pattern")
        list_of(one_of(_LETTERS)).of("hybrid_override_pattern", list(pattern))
        kinds = [_LETTERS[letter] for letter in pattern]
    list_of(one_of((*KINDS, "mlp", "moe"))).of("layers_block_type", kinds)
    return kinds


def _experts(config: Config, kinds: list[str]) -> Config:
    """Reads the fields of experts, also where no layer has some: parts of a model may not."""
    config = {**_EXPERTS, **config}
    check_sizes(config, "moe_shared_expert_intermediate_size", optional=("moe_latent_size",))
    refuse(config, n_shared_experts=1)
    fields = read_experts(config, "sigmoid", tuple(kind == "moe" for kind in kinds))
    return {
        **fields,
        "shared_size": config["moe_shared_expert_intermediate_size"],
        "expert_width": given(config, "moe_latent_size", 0),
    }


def _read(config: Config) -> TransformerConfig:
    refuse(config, mamba_hidden_act="silu", attention_bias=False)
    check_limit(config)
    kinds = _kinds(config)
    theirs = [name for name, _ in _SIZES.values()]
    check_sizes(config, "num_attention_heads", optional=(*theirs, "num_key_value_heads"))
    bias = flag(config, "use_bias", False)
    mixer = Mamba2(
        conv_bias=flag(config, "use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        **{ours: given(config, *names) for ours, names in _SIZES.items()},
    )
    given_heads = config.get("num_key_value_heads", 8)
    return read_llama(
        {**config, "num_hidden_layers": len(kinds)},
        rope=None,
        mixers=tuple(mixer if KINDS.get(kind) else None for kind in kinds),
        branches=tuple("mlp" if kind in ("mlp", "moe") else "mixer" for kind in kinds),
        num_kv_heads=given_heads or config["num_attention_heads"],
        head_dim=given(config, "head_dim", 128),
        max_positions=given(config, "max_position_embeddings", 4096),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5, least=0.0, most=1.0),
        activation=activation(given(config, "mlp_hidden_act", "relu2")),
        gated=False,
        **_experts(config, kinds),
    )


def _write(c: TransformerConfig) -> Config:
    m = next((m for m in c.mixers if m is not None), None)
    letters = [
        "E" if c.is_sparse(i) else "-" if branch == "mlp" else "M" if c.mixer_of(i) else "*"
        for i, branch in enumerate(c.branches)
    ]
    config = write_llama(
        c,
        layer_norm_epsilon=c.norm_eps,
        mlp_hidden_act=activation_name(c.activation),
        mlp_bias=c.mlp_bias,
        hybrid_override_pattern="".join(letters),
    )
    if isinstance(m, Mamba2):
        config |= {theirs: getattr(m, ours) for ours, (theirs, _) in _SIZES.items()}
        config |= {"use_bias": m.bias, "use_conv_bias": m.conv_bias}
    if c.num_experts:
        config |= {
            "n_routed_experts": c.num_experts,
            "num_experts_per_tok": c.experts_per_token,
            "moe_intermediate_size": c.expert_size,
            "moe_shared_expert_intermediate_size": c.shared_size,
            "moe_latent_size": c.expert_width or None,
            "norm_topk_prob": c.normalise_experts,
            "routed_scaling_factor": c.router.scale,
            "n_group": c.router.groups,
            "topk_group": c.router.kept_groups,
        }
    return {k: v for k, v in config.items() if k not in ("rms_norm_eps", "hidden_act")}


def _tensors(c: TransformerConfig) -> list[Tensor]:
    def mixer(c: TransformerConfig, layer: int) -> list[Tensor]:
        m, theirs = c.mixer_of(layer), f"model.layers.{layer}.mixer"
        assert isinstance(m, Mamba2)
        return mamba_tensors(m, theirs, (f"layer_{layer}", "mixer"), c.hidden_size)

    names = ExpertNames(parts=("up_proj", "down_proj"))
    rows = sparse_tensors(c, names, mixer)
    for i in range(c.num_layers) if c.expert_width else ():
        if c.is_sparse(i):
            for own, theirs in (
                ("latent_in", "fc1_latent_proj"),
                ("latent_out", "fc2_latent_proj"),
            ):
                there = f"model.layers.{i}.mlp.{theirs}"
                rows += dense(there, (f"layer_{i}", "mlp", own), c.mlp_bias)
    return renamed(rows, _NAMES)


NEMOTRON_H = Family("NemotronHForCausalLM", _read, _write, _tensors, skipped=("mtp.",))
