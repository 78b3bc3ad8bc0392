"""Qwen3.5, 3.6 and 3.8, dense or with experts: three gated delta nets, then one gated attention.

The norms of the stream, the queries and the keys are 1 + weight; that inside a delta net is not.
"""

from __future__ import annotations

from specjax._internal.fields import list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.experts import ExpertNames, fused_experts, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, given, number, refuse
from specjax.models.families.fused import convolution, divided
from specjax.models.families.llama import dense, llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.mixers import GatedDelta

_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv_size": ("linear_conv_kernel_dim", 4),
}
"""Fields of `GatedDelta` -> fields of the file, and their defaults."""


def layer_kinds(config: Config) -> list[str]:
    """Returns "linear_attention" or "full_attention" for each layer."""
    check_sizes(config, "num_hidden_layers", optional=("full_attention_interval",))
    every = given(config, "full_attention_interval", 4)
    return config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]


def read_delta(config: Config) -> tuple[GatedDelta | None, ...]:
    """Reads the mixer of each layer.

    Raises:
      ValueError: a layer of another kind, or a size that is not supported.
    """
    theirs = [name for name, _ in _SIZES.values()]
    check_sizes(config, optional=tuple(theirs))
    mixer = GatedDelta(**{ours: given(config, *names) for ours, names in _SIZES.items()})
    kinds = {"linear_attention": mixer, "full_attention": None}
    found = layer_kinds(config)
    list_of(one_of(kinds)).of("layer_types", found)
    return tuple(kinds[kind] for kind in found)


def read_qwen3_next(config: Config, theta: float, **changes: object) -> TransformerConfig:
    """Reads the fields that Qwen3-Next and Qwen3.5 share; `theta` is the default of the rope."""
    refuse(config, attn_output_gate=True, hidden_act="silu")
    changes = {
        "rope": read_rope(config, theta=theta, fraction=0.25),
        "head_dim": given(config, "head_dim", 256),
        "norm_eps": number(config, "rms_norm_eps", 1e-6, least=0.0, most=1.0),
        "norm_offset": 1.0,
        "qk_norm": "head",
        "output_gate": True,
        "mlp_bias": False,
        "mixers": read_delta(config),
        **changes,
    }
    return read_llama(config, **changes)


def write_delta(c: TransformerConfig) -> Config:
    """Returns the fields that `read_qwen3_next` reads beside those of Llama."""
    mixer = next((m for m in c.mixers if isinstance(m, GatedDelta)), None)
    sizes = {} if mixer is None else {t: getattr(mixer, ours) for ours, (t, _) in _SIZES.items()}
    return {
        "attention_bias": c.qkv_bias,
        "attn_output_gate": True,
        "layer_types": [
            "full_attention" if c.attends(i) else "linear_attention" for i in range(c.num_layers)
        ],
        **sizes,
    }


def delta_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns the tensors of a delta net whose queries, keys and values are one projection."""
    mixer, rows = c.mixer_of(layer), shared_tensors(c, layer)
    assert isinstance(mixer, GatedDelta)
    theirs, ours = f"model.layers.{layer}.linear_attn", (f"layer_{layer}", "mixer")
    rows += divided(f"{theirs}.in_proj_qkv", ours, _convolved(mixer), c.hidden_size)
    for name in "zba":
        rows += dense(f"{theirs}.in_proj_{name}", (*ours, name), False)
    return rows


def shared_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns the tensors that a delta net of Qwen3-Next has too."""
    mixer = c.mixer_of(layer)
    assert isinstance(mixer, GatedDelta)
    theirs, ours = f"model.layers.{layer}.linear_attn", (f"layer_{layer}", "mixer")
    rows = convolution(f"{theirs}.conv1d", ours, _convolved(mixer), mixer.conv_size)
    rows += [
        Tensor(f"{theirs}.{name}", (*ours, own))
        for name, own in {"A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm"}.items()
    ]
    return rows + dense(f"{theirs}.out_proj", (*ours, "o"), False)


def _convolved(mixer: GatedDelta) -> dict[str, int]:
    """Returns the names and widths of what a delta net convolves, in the order of the files."""
    keys = mixer.key_heads * mixer.key_dim
    return {"q": keys, "k": keys, "v": mixer.value_heads * mixer.value_dim}


def read_experts(config: Config) -> Config:
    """Returns the fields of the configuration about experts, and one shared expert with a gate."""
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    check_sizes(config, *sizes, "shared_expert_intermediate_size")
    return {
        "num_experts": config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "shared_size": config["shared_expert_intermediate_size"],
        "shared_gate": True,
    }


def write_experts(c: TransformerConfig) -> Config:
    """Returns the fields that `read_experts` reads."""
    return {
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_size,
        "shared_expert_intermediate_size": c.shared_size,
    }


def _read(config: Config) -> TransformerConfig:
    return read_qwen3_next(config, theta=1e4)


def _read_moe(config: Config) -> TransformerConfig:
    experts = read_experts(config)
    config = {**config, "intermediate_size": experts["expert_size"]}  # no layer has a plain MLP
    return read_qwen3_next(config, theta=1e4, **experts)


def _write_moe(c: TransformerConfig) -> Config:
    config = write_llama(c, **write_delta(c), **write_experts(c))
    del config["intermediate_size"]
    return config


def _moe_tensors(c: TransformerConfig) -> list[Tensor]:
    return sparse_tensors(c, ExpertNames(shared="shared_expert"), delta_tensors)


def _fused_tensors(c: TransformerConfig) -> list[Tensor]:
    return fused_experts(_moe_tensors(c), c)


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, **write_delta(c))


def _tensors(c: TransformerConfig) -> list[Tensor]:
    return llama_tensors(c, mixers=delta_tensors)


QWEN3_5 = Family("Qwen3_5ForCausalLM", _read, _write, _tensors, skipped=("mtp.",))
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    _read_moe,
    _write_moe,
    _moe_tensors,
    skipped=("mtp.",),
    fused=True,
    fused_tensors=_fused_tensors,
)
