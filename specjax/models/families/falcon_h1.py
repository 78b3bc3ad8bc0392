"""Falcon-H1 (arXiv 2507.22448): attention and Mamba2 side by side in every layer, with muP."""

from __future__ import annotations

from specjax._internal.fields import list_of, real
from specjax.models.config import Beside, TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, number, refuse
from specjax.models.families.fused import renamed
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.mamba2 import check_limit, mamba_tensors
from specjax.models.families.positions import read_context, read_rope
from specjax.models.mixers import Mamba2, Scales

_NAMES = {
    "model.norm.": "model.final_layernorm.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
}
"""Parts of Llama's names, and those of Falcon-H1."""

_SIZES = {
    "heads": ("mamba_n_heads", 128),
    "state_dim": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1),
    "conv_size": ("mamba_d_conv", 4),
}
"""Fields of `Mamba2` -> fields of the file, and their defaults."""

_PROJECTED = ("z", "x", "b", "c", "dt")  # the order of `ssm_multipliers`


def _factor(config: Config, name: str) -> float:
    return number(config, name, 1.0, least=1e-9, most=1e9)


def _factors(config: Config, name: str, count: int) -> list[float]:
    found = given(config, name, [1.0] * count)
    return list_of(real(least=1e-9, most=1e9), f"factors, {count} in number", count).of(name, found)


def _mixer(config: Config) -> Mamba2:
    check_limit(config)
    theirs = [name for name, _ in _SIZES.values()]
    check_sizes(config, "hidden_size", optional=(*theirs, "mamba_expand", "mamba_d_ssm"))
    sizes = {ours: given(config, *names) for ours, names in _SIZES.items()}
    wide = config.get("mamba_d_ssm", 1024)
    wide = given(config, "mamba_expand", 2) * config["hidden_size"] if wide is None else wide
    dim = given(config, "mamba_d_head", "auto")
    dim = wide // sizes["heads"] if dim == "auto" else dim
    if dim * sizes["heads"] != wide:
        raise ValueError(
            f"mamba_n_heads={sizes['heads']} heads of mamba_d_head={dim} numbers do not make up "
            f"mamba_d_ssm={wide}"
        )
    norm = "before_gate" if flag(config, "mamba_norm_before_gate", True) else "after_gate"
    projected = zip(_PROJECTED, _factors(config, "ssm_multipliers", 5), strict=True)
    return Mamba2(
        head_dim=dim,
        conv_bias=flag(config, "mamba_conv_bias", True),
        bias=flag(config, "mamba_proj_bias", False),
        out_bias=flag(config, "projectors_bias", False),
        norm=norm if flag(config, "mamba_rms_norm", False) else None,
        scales=Scales(
            input=_factor(config, "ssm_in_multiplier"),
            output=_factor(config, "ssm_out_multiplier"),
            **dict(projected),
        ),
        beside=Beside(
            _factor(config, "attention_in_multiplier"),
            _factor(config, "key_multiplier"),
            _factor(config, "attention_out_multiplier"),
        ),
        **sizes,
    )


def _read(config: Config) -> TransformerConfig:
    refuse(config, hidden_act="silu")
    check_sizes(config, "num_hidden_layers")
    rope = read_rope(config)
    gate, down = _factors(config, "mlp_multipliers", 2)
    return read_llama(
        config,
        rope=rope,
        max_positions=read_context(config, rope, 8192),
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        mixers=(_mixer(config),) * config["num_hidden_layers"],
        embedding_scale=_factor(config, "embedding_multiplier"),
        logit_scale=_factor(config, "lm_head_multiplier"),
        gate_scale=gate,
        down_scale=down,
        num_kv_heads=_key_heads(config),
    )


def _key_heads(config: Config) -> int:
    """Returns the number of key heads: null means that each query head has one."""
    check_sizes(config, "num_attention_heads", optional=("num_key_value_heads",))
    return config.get("num_key_value_heads", 8) or config["num_attention_heads"]


def _write(c: TransformerConfig) -> Config:
    m = c.mixers[0]
    assert isinstance(m, Mamba2) and m.beside is not None
    return write_llama(
        c,
        attention_bias=c.qkv_bias,
        mlp_bias=c.mlp_bias,
        embedding_multiplier=c.embedding_scale,
        lm_head_multiplier=c.logit_scale,
        mlp_multipliers=[c.gate_scale, c.down_scale],
        attention_in_multiplier=m.beside.input_scale,
        key_multiplier=m.beside.key_scale,
        attention_out_multiplier=m.beside.output_scale,
        ssm_in_multiplier=m.scales.input,
        ssm_multipliers=[getattr(m.scales, name) for name in _PROJECTED],
        ssm_out_multiplier=m.scales.output,
        mamba_d_ssm=m.size,
        mamba_d_head=m.head_dim,
        mamba_conv_bias=m.conv_bias,
        mamba_proj_bias=m.bias,
        projectors_bias=m.out_bias,
        mamba_rms_norm=m.norm is not None,
        mamba_norm_before_gate=m.norm == "before_gate",
        **{theirs: getattr(m, ours) for ours, (theirs, _) in _SIZES.items()},
    )


def _tensors(c: TransformerConfig) -> list[Tensor]:
    def mixer(c: TransformerConfig, layer: int) -> list[Tensor]:
        m, theirs = c.mixer_of(layer), f"model.layers.{layer}.mamba"
        assert isinstance(m, Mamba2)
        return mamba_tensors(m, theirs, (f"layer_{layer}", "mixer"), c.hidden_size)

    return renamed(llama_tensors(c, mixers=mixer), _NAMES)


FALCON_H1 = Family("FalconH1ForCausalLM", _read, _write, _tensors)
