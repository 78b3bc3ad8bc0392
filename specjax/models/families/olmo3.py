"""OLMo 3 (arXiv 2512.13961): OLMo 2 with windows in three of four layers."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import number, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, rope_of, write_rope
from specjax.models.rope import Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA = 5e5  # of the family's ropes, where a file does not say it


def _read(config: Config) -> TransformerConfig:
    kinds = config.get("rope_parameters")
    if kinds is not None:  # of each kind of layer
        full, local = (kinds.get(kind) or {} for kind in (_FULL, _SLIDING))
    else:  # the rope of the full layers; the others have the default
        names = ("rope_theta", "partial_rotary_factor")
        outside = {name: config[name] for name in names if name in config}
        full, local = {**outside, **(config.get("rope_scaling") or {})}, {}
    rope, near = rope_of(full, _THETA, 1.0, config), rope_of(local, _THETA, 1.0, config)
    types = [_SLIDING if (i + 1) % 4 else _FULL for i in range(config["num_hidden_layers"])]
    windows = read_windows({"sliding_window": 4096, **config}, types)
    per_layer = windows or (None,) * config["num_hidden_layers"]
    return read_llama(
        config,
        norm_order="post",
        qk_norm="whole",
        mlp_bias=False,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        windows=windows,
        rope=rope,
        ropes=() if near == rope else tuple(near if w else rope for w in per_layer),
        max_positions=read_context({**config, "rope_parameters": full}, rope),
    )


def _write(c: TransformerConfig) -> Config:
    near = next((c.rope_of(i) for i in range(c.num_layers) if c.window_of(i)), None)
    windows = write_windows(c.windows or (None,) * c.num_layers)  # by default layers slide
    config = write_llama(c, attention_bias=c.qkv_bias, **windows)
    if near in (None, Rope(_THETA)):
        return config
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    local = write_rope(near)
    kinds = {
        _FULL: {"rope_theta": config["rope_theta"], **scaling},
        _SLIDING: {
            "rope_theta": local["rope_theta"],
            **(local["rope_scaling"] or {"rope_type": "default"}),
        },
    }
    return {**config, "rope_parameters": kinds}


OLMO3 = Family("Olmo3ForCausalLM", _read, _write, llama_tensors)
