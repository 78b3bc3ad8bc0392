"""EXAONE 4 (arXiv 2507.11407): norms after each branch, and no rope in layers of full attention."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, given, number, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope


def _types(config: Config) -> list[str]:
    """Returns the kind of each layer, where the file has no list of them."""
    layers = range(config["num_hidden_layers"])
    if config["sliding_window"] is None:
        return ["full_attention" for _ in layers]
    pattern = given(config, "sliding_window_pattern", 4)
    if isinstance(pattern, str):  # it is repeated, and the last layer has full attention
        full = [pattern[i % len(pattern)] == "G" or i + 1 == len(layers) for i in layers]
    else:
        check_sizes(config, optional=("sliding_window_pattern",))
        full = [(i + 1) % pattern == 0 for i in layers]
    return ["full_attention" if whole else "sliding_attention" for whole in full]


def _read(config: Config) -> TransformerConfig:
    config = {"sliding_window": 4096, **config}  # the default of a missing field
    rope = read_rope(config)
    windows = read_windows(config, config.get("layer_types") or _types(config))
    per_layer = windows or (None,) * config["num_hidden_layers"]
    # Where no layer may slide, all have the rope.
    hybrid = config["sliding_window"] is not None
    return read_llama(
        config,
        norm_order="post",
        qk_norm="head",
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        windows=windows,
        rope=rope,
        ropes=tuple(rope if window else None for window in per_layer) if hybrid else (),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    windows = write_windows(c.windows or (None,) * c.num_layers)
    if c.ropes and windows["sliding_window"] is None:  # all layers are global, without a rope
        windows["sliding_window"] = 4096
    return write_llama(c, **windows)


EXAONE4 = Family("Exaone4ForCausalLM", _read, _write, llama_tensors)
