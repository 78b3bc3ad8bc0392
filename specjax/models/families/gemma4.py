"""The text models of Gemma 4 (E2B, E4B, 26B-A4B, 31B) and of Gemma 4 unified (12B).

Unlike in Gemma 1 to 3 the factors of the norms are plain weights.  Layers with full attention have
heads of another size, and may take their keys as values; the last layers may read the keys and
values of earlier ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from specjax._internal.fields import OBJECT, count, list_of, one_of
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import (
    activation,
    activation_name,
    check_sizes,
    flag,
    given,
    number,
    read_windows,
    refuse,
    write_windows,
)
from specjax.models.families.gemma import read_cap
from specjax.models.families.llama import (
    attention_tensors,
    dense,
    llama_tensors,
    read_llama,
    write_llama,
)
from specjax.models.mixers import AttentionSizes
from specjax.models.rope import Rope
from specjax.models.router import Router

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_SLIDING: 1e4, _FULL: 1e6}
_ROPES: Config = {
    _SLIDING: {"rope_type": "default"},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
_FAR = 1e15  # far beyond the bases and factors of ropes that are in use
_BY_LAYER = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
"""The fields that a file may have for each layer -> ours."""

_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_size": "moe_intermediate_size",
}
_ROUTER = Router(normed_input=True, expert_scale=True)
_UNREAD = tuple(
    f"self_attn.{name}"
    for name in ("k_norm.weight", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
)
"""Tensors that files may hold for a layer that does not read them."""


def _layer_types(config: Config) -> list[str]:
    types = config.get("layer_types") or [
        _SLIDING if (i + 1) % 6 else _FULL for i in range(config["num_hidden_layers"])
    ]
    list_of(one_of((_FULL, _SLIDING))).of("layer_types", types)
    return [*types[:-1], _FULL]  # transformers takes the last layer for one, whatever its kind is


def _sizes(config: Config, types: list[str]) -> list[tuple[int, int]]:
    """Returns the number of key heads and the size of a head of each layer."""
    plain = config["num_key_value_heads"], config["head_dim"]
    if config.get("per_layer_config") is None:  # the published form
        check_sizes(config, optional=("num_global_key_value_heads", "global_head_dim"))
        same = flag(config, "attention_k_eq_v", False)
        heads = given(config, "num_global_key_value_heads", plain[0]) if same else plain[0]
        full = heads, given(config, "global_head_dim", 512)
        return [full if kind == _FULL else plain for kind in types]
    # The form that transformers 5 writes: the layers whose sizes are others.
    sizes = [dict(zip(_BY_LAYER, plain, strict=True)) for _ in types]
    by_number = {str(i): size for i, size in enumerate(sizes)}
    for key, fields in OBJECT.read(config, "per_layer_config").items():
        layer = str(int(key)) if key.isdecimal() and len(key) < 9 else key  # it may write "05"
        one_of(by_number).of("the layer of an entry in per_layer_config", layer)
        name = f"per_layer_config[{layer}]"
        list_of(one_of(_BY_LAYER)).of(f"the list of fields in {name}", [*OBJECT.of(name, fields)])
        for field, value in fields.items():
            most = MOST[_BY_LAYER[field]]
            by_number[layer][field] = count(1, most).of(f"{field} in {name}", value)
    return [(size["num_key_value_heads"], size["head_dim"]) for size in sizes]


def _read_mixers(config: Config, types: list[str]) -> tuple[AttentionSizes | None, ...]:
    layers = config["num_hidden_layers"]
    shared = count(0, layers - 1).read(config, "num_kv_shared_layers", 0)
    plain = AttentionSizes(config["num_key_value_heads"], config["head_dim"])
    same = flag(config, "attention_k_eq_v", False)
    mixers = [
        AttentionSizes(heads, size, same and kind == _FULL, i >= layers - shared)
        for i, (kind, (heads, size)) in enumerate(zip(types, _sizes(config, types), strict=True))
    ]
    return tuple(None if mixer == plain else mixer for mixer in mixers)


def _read_rope(config: Config, kind: str) -> Rope:
    every = config.get("rope_parameters") or _ROPES
    params = OBJECT.of(f"rope_parameters for {kind}", every.get(kind))
    found = one_of(("default", "proportional")).of(f"rope_type for {kind}", params.get("rope_type"))
    theta = number(params, "rope_theta", _THETAS[kind], above=1.0, most=_FAR)
    if found == "default":
        return Rope(theta)  # transformers reads no partial_rotary_factor here
    fraction = number(params, "partial_rotary_factor", 1.0, most=1.0)
    return Rope(theta, found, fraction, factor=number(params, "factor", 1.0, most=_FAR))


def _read(config: Config, context: int, window: int, **changes: object) -> TransformerConfig:
    """Reads a configuration; `context` and `window` are the defaults of its fields."""
    refuse(config, use_bidirectional_attention="vision")  # which is about images only
    config = {
        **config,
        "sliding_window": given(config, "sliding_window", window),
        "num_key_value_heads": given(config, "num_key_value_heads", 4),
        "head_dim": given(config, "head_dim", 256),
    }
    check_sizes(config, "num_hidden_layers", *_BY_LAYER)
    types = _layer_types(config)
    ropes = {kind: _read_rope(config, kind) for kind in dict.fromkeys(types)}
    fields: Config = {
        "max_positions": given(config, "max_position_embeddings", context),
        "rope": ropes[_FULL],
        "ropes": tuple(ropes[kind] for kind in types),
        "windows": read_windows({**config, "layer_types": types}, types),
        "mixers": _read_mixers(config, types),
        "embedding_scale": config["hidden_size"] ** 0.5,
        "tied_embeddings": flag(config, "tie_word_embeddings", True),
        "logit_softcap": read_cap(config, "final_logit_softcapping"),
        "norm_order": "sandwich",
        "qk_norm": "head",
        "value_norm": True,
        "query_scale": 1.0,
        "activation": activation(given(config, "hidden_activation", "gelu_pytorch_tanh")),
        "mlp_bias": False,
        "wide_sharing": flag(config, "use_double_wide_mlp", False),
        "layer_scale": True,
    }
    return read_llama(config, **{**fields, **changes})


def _read_gemma4(config: Config) -> TransformerConfig:
    experts: Config = {}
    if flag(config, "enable_moe_block", False):
        check_sizes(config, *_EXPERTS.values())
        experts = {ours: config[theirs] for ours, theirs in _EXPERTS.items()}
        experts |= {"router": _ROUTER, "experts_beside": True}
    most = MOST["per_layer_size"]
    size = count(0, most).read(config, "hidden_size_per_layer_input", 256)
    if size:
        every = {"vocab_size_per_layer_input": 262144, **config}
        refuse(every, vocab_size_per_layer_input=config["vocab_size"])
    return _read(config, 131072, 512, per_layer_size=size, **experts)


def _read_unified(config: Config) -> TransformerConfig:
    return _read(config, 262144, 1024)


def _write_rope(rope: Rope) -> Config:
    written: Config = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "proportional":
        written |= {"partial_rotary_factor": rope.fraction, "factor": rope.factor}
    return written


def _write(read: Callable[[Config], TransformerConfig], c: TransformerConfig) -> Config:
    """Returns the configuration that `read` reads as `c`.

    Raises ValueError if there is none.
    """
    mixers = [mixer for mixer in c.mixers if isinstance(mixer, AttentionSizes)]
    windows = [c.window_of(i) for i in range(c.num_layers)]
    ropes = {
        _FULL if window is None else _SLIDING: _write_rope(rope)
        for i, window in enumerate(windows)
        if (rope := c.rope_of(i)) is not None
    }
    heads, size, _ = c.slots_of(c.num_layers - 1) or (0, 0, 0)
    same = any(mixer.keys_as_values for mixer in mixers)
    written = write_llama(
        c,
        **write_windows(tuple(windows)),
        rope_parameters=ropes,
        attention_bias=c.qkv_bias,
        global_head_dim=size,
        num_global_key_value_heads=heads if same else None,
        attention_k_eq_v=same,
        num_kv_shared_layers=sum(mixer.shared for mixer in mixers),
        use_double_wide_mlp=c.wide_sharing,
        final_logit_softcapping=c.logit_softcap,
        hidden_activation=activation_name(c.activation),
        hidden_size_per_layer_input=c.per_layer_size,
        vocab_size_per_layer_input=c.vocab_size,
        enable_moe_block=c.experts_beside,
        **{name: getattr(c, ours) or None for ours, name in _EXPERTS.items() if c.num_experts},
    )
    left_out = ["hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor"]
    if written["sliding_window"] is None:
        left_out.append("sliding_window")
    written = {name: value for name, value in written.items() if name not in left_out}
    # The scale of embeddings follows from the hidden size.
    if dataclasses.replace(read(written), embedding_scale=c.embedding_scale) != c:
        raise ValueError(
            f"no config.json of {c.family} describes these {c.num_layers} layers: the last one "
            "must have full attention, layers of one kind the same sizes, and those that share "
            "keys must be the last ones"
        )
    return written


def _tensors(c: TransformerConfig) -> list[Tensor]:
    plain = dataclasses.replace(c, num_experts=0, experts_beside=False)
    rows = llama_tensors(plain, mixers=_mixer_tensors)
    for i in range(c.num_layers):
        theirs, ours = f"model.layers.{i}", f"layer_{i}"
        rows.append(Tensor(f"{theirs}.layer_scalar", (ours, "scale")))
        rows += _per_layer_tensors(c, i) if c.per_layer_size else []
        rows += _expert_tensors(c, theirs, ours) if c.is_sparse(i) else []
    if c.per_layer_size:
        rows.append(Tensor("model.per_layer_projection_norm.weight", ("per_layer_norm",)))
    return rows


def _mixer_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    mixer = c.mixer_of(layer)
    assert isinstance(mixer, AttentionSizes)
    missing = "kv" if mixer.shared else "v" if mixer.keys_as_values else ""
    ours = (f"layer_{layer}", "attention")
    rows = attention_tensors(c, f"model.layers.{layer}.self_attn", ours)
    return [row for row in rows if row.path[2].removesuffix("_norm") not in tuple(missing)]


def _expert_tensors(c: TransformerConfig, theirs: str, ours: str) -> list[Tensor]:
    """Returns the experts beside a layer's MLP: the outputs of gate come before those of up."""
    norms = {
        "mlp_own_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_post_norm": "post_feedforward_layernorm_2",
    }
    rows = [
        Tensor(f"{theirs}.{there}.weight", (ours, norm, "weight")) for norm, there in norms.items()
    ]
    block, size = (ours, "experts"), c.expert_size
    rows += dense(f"{theirs}.router.proj", (*block, "router"), False)
    rows.append(Tensor(f"{theirs}.router.scale", (*block, "router_scale")))
    rows.append(Tensor(f"{theirs}.router.per_expert_scale", (*block, "expert_scale")))
    shape = (c.num_experts, 2 * size, c.hidden_size)
    for part, start in (("gate", 0), ("up", size)):
        index = (slice(None), slice(start, start + size))
        name = f"{theirs}.experts.gate_up_proj"
        rows.append(Tensor(name, (*block, part), True, shape=shape, index=index))
    rows.append(Tensor(f"{theirs}.experts.down_proj", (*block, "down"), transpose=True))
    return rows


def _per_layer_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns a layer's parts of the tensors of all layers, and its own ones."""
    theirs, ours = f"model.layers.{layer}", (f"layer_{layer}", "per_layer")
    many, size = c.num_layers, c.per_layer_size
    return [
        Tensor(
            "model.embed_tokens_per_layer.weight",
            (*ours, "embedding"),
            shape=(c.vocab_size, many * size),
            view=(c.vocab_size, many, size),
            index=(slice(None), layer),
        ),
        Tensor(
            "model.per_layer_model_projection.weight",
            (*ours, "project", "kernel"),
            transpose=True,
            shape=(many * size, c.hidden_size),
            view=(many, size, c.hidden_size),
            index=(layer,),
        ),
        Tensor(f"{theirs}.post_per_layer_input_norm.weight", (*ours, "norm", "weight")),
        *dense(f"{theirs}.per_layer_input_gate", (*ours, "gate"), False),
        *dense(f"{theirs}.per_layer_projection", (*ours, "out"), False),
    ]


GEMMA4 = Family(
    "Gemma4ForCausalLM",
    _read_gemma4,
    functools.partial(_write, _read_gemma4),
    _tensors,
    ignored=_UNREAD,
    fused=True,
)
GEMMA4_UNIFIED = Family(
    "Gemma4UnifiedForCausalLM",
    _read_unified,
    functools.partial(_write, _read_unified),
    _tensors,
    ignored=_UNREAD,
)
