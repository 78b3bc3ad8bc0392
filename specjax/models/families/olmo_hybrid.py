"""OLMo Hybrid: gated delta nets with norms before them, and OLMo 3's attention without windows."""

from __future__ import annotations

from specjax._internal.fields import list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, refuse
from specjax.models.families.fused import convolution, renamed
from specjax.models.families.llama import dense, llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope
from specjax.models.mixers import GatedDelta

_ALIASES = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}
"""Spellings of norms; transformers writes the last one in layers with attention."""

_CONVOLUTIONS = (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")
"""Tensors that transformers joins, and writes in three equal parts whatever their sizes."""


def _kinds(config: Config) -> list[str]:
    """Returns "linear_attention" or "full_attention" for each layer."""
    many = config["num_hidden_layers"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(many)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    kinds = config.get("layer_types") or kinds
    list_of(one_of(("linear_attention", "full_attention"))).of("layer_types", kinds)
    return kinds


def _mixer(config: Config) -> GatedDelta:
    sizes = ("num_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    names = ("linear_num_key_heads", "linear_num_value_heads", *(f"linear_{x}" for x in sizes[1:]))
    check_sizes(config, "hidden_size", "num_attention_heads", optional=names)
    heads = config["num_attention_heads"]
    keys = given(config, "linear_num_key_heads", heads)
    key_dim = given(config, "linear_key_head_dim", int(0.75 * config["hidden_size"] / keys))
    return GatedDelta(
        key_heads=keys,
        value_heads=given(config, "linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=given(config, "linear_value_head_dim", 2 * key_dim),
        conv_size=given(config, "linear_conv_kernel_dim", 4),
        norm_eps=1e-5,
        negative=flag(config, "linear_allow_neg_eigval", True),
    )


def _read(config: Config) -> TransformerConfig:
    refuse(config, hidden_act="silu")
    check_sizes(config, "num_hidden_layers")
    # Published files have a rope without a base, which means that there is none.
    scaling = config.get("rope_parameters") or {"rope_theta": 1e4}
    rope = None if scaling.get("rope_theta", 1e4) is None else read_rope(config)
    full = [kind == "full_attention" for kind in _kinds(config)]
    mixer = _mixer(config)
    return read_llama(
        config,
        rope=rope,
        max_positions=read_context(config, rope, 65536),
        mixers=tuple(None if whole else mixer for whole in full),
        norm_orders=tuple("post" if whole else "pre" for whole in full),
        qk_norm="whole",
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    m = next((m for m in c.mixers if isinstance(m, GatedDelta)), None)
    config = write_llama(
        c,
        attention_bias=c.qkv_bias,
        layer_types=[
            "full_attention" if c.attends(i) else "linear_attention" for i in range(c.num_layers)
        ],
    )
    if c.rope is None:
        config["rope_parameters"] = {"rope_theta": None, "rope_type": "default"}
    if m is not None:
        config |= {
            "linear_num_key_heads": m.key_heads,
            "linear_num_value_heads": m.value_heads,
            "linear_key_head_dim": m.key_dim,
            "linear_value_head_dim": m.value_dim,
            "linear_conv_kernel_dim": m.conv_size,
            "linear_allow_neg_eigval": m.negative,
        }
    return config


def _delta_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    m = c.mixer_of(layer)
    assert isinstance(m, GatedDelta)
    theirs, ours = f"model.layers.{layer}.linear_attn", (f"layer_{layer}", "mixer")
    keys = m.key_heads * m.key_dim
    rows = []
    for name, size in {"q": keys, "k": keys, "v": m.value_heads * m.value_dim}.items():
        rows += convolution(f"{theirs}.{name}_conv1d", ours, {name: size}, m.conv_size)
    for own, name in {**dict(zip("qkvba", "qkvba", strict=True)), "z": "g", "o": "o"}.items():
        rows += dense(f"{theirs}.{name}_proj", (*ours, own), False)
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "norm"}
    return rows + [Tensor(f"{theirs}.{name}", (*ours, own)) for name, own in names.items()]


def _tensors(c: TransformerConfig) -> list[Tensor]:
    rows = llama_tensors(c, mixers=_delta_tensors)
    for i in range(c.num_layers):
        if not c.attends(i):
            layer = f"model.layers.{i}."
            names = (("attention", "input_layernorm"), ("feedforward", "post_attention_layernorm"))
            rows = renamed(
                rows, {f"{layer}{own}.": f"{layer}{new}_layer_norm." for new, own in names}
            )
    return rows


OLMO_HYBRID = Family(
    "OlmoHybridForCausalLM", _read, _write, _tensors, aliases=_ALIASES, cut=_CONVOLUTIONS
)
