"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786)."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import (
    activation,
    check_sizes,
    flag,
    given,
    number,
    read_windows,
    refuse,
    write_windows,
)
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope, rope_of, write_rope


def _read_gemma(config: Config, **changes: object) -> TransformerConfig:
    refuse(config, use_bidirectional_attention=False)
    # The first checkpoints say "gelu" but were trained with its tanh form.
    name = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    fields: Config = {
        "norm_offset": 1.0,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "tied_embeddings": flag(config, "tie_word_embeddings", True),
        "activation": activation("gelu_pytorch_tanh" if name == "gelu" else name),
        "head_dim": config.get("head_dim") or 256,  # the family's default, whatever the hidden size
        "mlp_bias": False,
    }
    return read_llama(config, **{**fields, **changes})


def _write_gemma(c: TransformerConfig, **changes: object) -> Config:
    config = write_llama(c, attention_bias=c.qkv_bias, **changes)
    return config | {"hidden_activation": config["hidden_act"]}


def _later(config: Config, period: int) -> Config:
    """Returns the fields that Gemma 2 and 3 share; every `period`-th layer has full attention."""
    types = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(config["num_hidden_layers"])
    ]
    return {
        "norm_order": "sandwich",
        "query_scale": number(config, "query_pre_attn_scalar", 256, least=1e-6, most=1e12) ** -0.5,
        "windows": read_windows({"sliding_window": 4096, **config}, types),
    }


def _write_later(c: TransformerConfig, **changes: object) -> Config:
    assert c.query_scale is not None
    return _write_gemma(
        c,
        query_pre_attn_scalar=round(c.query_scale**-2),
        attn_logit_softcapping=c.attention_softcap,
        final_logit_softcapping=c.logit_softcap,
        **write_windows(c.windows or (None,) * c.num_layers),  # by default layers slide in turn
        **changes,
    )


def read_cap(config: Config, name: str, default: float | None = None) -> float | None:
    """Returns the soft cap of logits in field `name`; null switches it off."""
    return (
        None
        if config.get(name, default) is None
        else number(config, name, default, least=1e-3, most=1e9)
    )


def _read_gemma2(config: Config) -> TransformerConfig:
    return _read_gemma(
        config,
        attention_softcap=read_cap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=read_cap(config, "final_logit_softcapping", 30.0),
        **_later(config, 2),
    )


def _read_gemma3(config: Config) -> TransformerConfig:
    check_sizes(config, optional=("sliding_window_pattern",))
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    later = _later(config, pattern)
    kinds = config.get("rope_parameters")
    if kinds is not None:
        full, local = (kinds.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
        rope, near = rope_of(full, 1e6, 1.0, config), rope_of(local, 1e4, 1.0, config)
    else:
        rope = read_rope(config, theta=1e6)
        near = rope_of(
            {}, number(config, "rope_local_base_freq", 1e4, above=1.0, most=1e15), 1.0, config
        )
    windows = later["windows"] or (None,) * config["num_hidden_layers"]
    return _read_gemma(
        config,
        qk_norm="head",
        # The file has the scaled length: only the layers of full attention are scaled.
        max_positions=given(config, "max_position_embeddings", 2048),
        rope=rope,
        ropes=tuple(rope if window is None else near for window in windows),
        attention_softcap=read_cap(config, "attn_logit_softcapping"),
        logit_softcap=read_cap(config, "final_logit_softcapping"),
        **later,
    )


def _write_gemma3(c: TransformerConfig) -> Config:
    near = next((r for i, r in enumerate(c.ropes) if c.window_of(i) is not None), None)
    return _write_later(
        c,
        max_position_embeddings=c.max_positions,
        rope_local_base_freq=1e4 if near is None else write_rope(near)["rope_theta"],
    )


GEMMA = Family("GemmaForCausalLM", _read_gemma, _write_gemma, llama_tensors)
GEMMA2 = Family("Gemma2ForCausalLM", _read_gemma2, _write_later, llama_tensors)
GEMMA3 = Family("Gemma3ForCausalLM", _read_gemma3, _write_gemma3, llama_tensors)
