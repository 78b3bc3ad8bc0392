"""The text model of Llama 4: attention in chunks, layers without positions, and few experts."""

from __future__ import annotations

from specjax._internal.fields import LAYERS, Kind, count, list_of, one_of
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.experts import ExpertNames, fused_experts, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, number
from specjax.models.families.fused import renamed
from specjax.models.families.llama import read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.rope import Rope
from specjax.models.router import Router

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_DEFAULTS = {
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_key_value_heads": 8,
    "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""Values of fields that a file leaves out."""

_TUNING = Kind("true, false, or a whole number", lambda value: isinstance(value, int))


def _turned(config: Config) -> list[bool]:
    """Returns the layers that have rotary positions."""
    flags = config.get("no_rope_layers")  # in spite of its name, 1 means that a layer has them
    interval = count(1, MOST["num_layers"]).read(config, "no_rope_layer_interval", 4)
    if flags:
        return [bool(x) for x in flags]
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


def _windows(config: Config, turned: list[bool]) -> tuple[int | None, ...]:
    """Returns the size of each layer's chunks, or None; () if no layer has any."""
    size = config["attention_chunk_size"] if "attention_chunk_size" in config else 8192
    kinds = config.get("layer_types")
    if kinds is None:
        chunked = [turn and size is not None for turn in turned]
    else:
        list_of(one_of((_CHUNKED, _FULL))).of("layer_types", kinds)
        chunked = [kind == _CHUNKED for kind in kinds]
    if not any(chunked):
        return ()
    count(1, 2**31 - 1).of("attention_chunk_size", size)
    return tuple(size if cut else None for cut in chunked)


def _sparse(config: Config) -> tuple[bool, ...]:
    """Returns the layers that have experts; () if all have."""
    layers = range(config["num_hidden_layers"])
    places = config.get("moe_layers")
    if places is None:
        step = count(1, MOST["num_layers"]).read(config, "interleave_moe_layer_step", 1)
        places = layers[step - 1 :: step]
    else:
        LAYERS.of("moe_layers", places)
    sparse = tuple(i in places for i in layers)
    return () if all(sparse) else sparse


def _plain(config: Config) -> Rope | None:
    """Returns what layers without positions have: their queries may grow."""
    tuned = _TUNING.of("attn_temperature_tuning", given(config, "attn_temperature_tuning", True))
    growth = number(config, "attn_scale", 0.1, least=0.0, most=1e3)
    span = count(1, MOST["max_positions"]).read(config, "floor_scale", 8192)
    if not tuned or not growth:
        return None
    return Rope(kind="none", growth=growth, original_max_positions=span, counted_from_one=True)


def _read(config: Config) -> TransformerConfig:
    config = {**_DEFAULTS, **config}
    check_sizes(config, "num_hidden_layers", "intermediate_size", "intermediate_size_mlp")
    check_sizes(config, "num_local_experts", "num_experts_per_tok")
    rope, plain, turned = read_rope(config, theta=5e5), _plain(config), _turned(config)
    return read_llama(
        {**config, "intermediate_size": config["intermediate_size_mlp"]},
        rope=rope,
        ropes=tuple(rope if turn else plain for turn in turned),
        interleaved=True,
        windows=_windows(config, turned),
        chunked=True,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        qk_norm="unit" if flag(config, "use_qk_norm", True) else None,
        qk_norm_last=True,
        mlp_bias=False,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
        shared_size=config["intermediate_size"],
        normalise_experts=False,
        router=Router("sigmoid", of_chosen=True, on_input=True),
        sparse=_sparse(config),
    )


def _write(c: TransformerConfig) -> Config:
    layers = range(c.num_layers)
    turned = [rope is not None and rope.kind != "none" for rope in map(c.rope_of, layers)]
    plain = next((c.rope_of(i) for i in layers if not turned[i]), None)
    tuning: Config = {"attn_temperature_tuning": plain is not None}
    if plain is not None:
        tuning |= {"attn_scale": plain.growth, "floor_scale": plain.original_max_positions}
    return write_llama(
        c,
        **tuning,
        attention_bias=c.qkv_bias,
        use_qk_norm=c.qk_norm is not None,
        no_rope_layers=[int(turn) for turn in turned],
        layer_types=[_CHUNKED if c.window_of(i) else _FULL for i in layers],
        attention_chunk_size=next((c.window_of(i) for i in layers if c.window_of(i)), None),
        intermediate_size=c.expert_size,
        intermediate_size_mlp=c.mlp_size,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_layers=[i for i in layers if c.is_sparse(i)],
    )


def _tensors(c: TransformerConfig) -> list[Tensor]:
    names = ExpertNames("feed_forward", ("gate", "up", "down"), shared="shared_expert")
    rows = fused_experts(sparse_tensors(c, names), c, inputs_first=True)
    return renamed(
        rows, {".feed_forward.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}
    )


LLAMA4 = Family("Llama4ForCausalLM", _read, _write, _tensors, fused=True)
