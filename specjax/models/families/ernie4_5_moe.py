"""ERNIE 4.5 with experts: a corrected softmax router, shared experts, and a rope of neighbours."""

from __future__ import annotations

import functools

from specjax._internal.fields import count
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.experts import ExpertNames, sparse_tensors
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, flag, given, number, refuse
from specjax.models.families.llama import read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.router import Router


def _sparse(config: Config) -> tuple[bool, ...]:
    """Returns the layers that have experts: every `interval`-th from the first to the last."""
    check_sizes(config, optional=("moe_layer_interval",))
    layers, interval = config["num_hidden_layers"], given(config, "moe_layer_interval", 1)
    first = count(0).read(config, "moe_layer_start_index", 1)
    last = count(-1).read(config, "moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    sparse = tuple((i + 1) % interval == 0 and first <= i <= last for i in range(layers))
    return () if all(sparse) else sparse


def _read(config: Config) -> TransformerConfig:
    refuse(config, use_bias=False, moe_norm_min=1e-12)
    check_sizes(config, "moe_num_experts", "moe_k", "moe_intermediate_size")
    shared = count(0, MOST["num_experts"]).read(config, "moe_num_shared_experts", 2)
    return read_llama(
        config,
        rope=read_rope(config, theta=5e5),
        interleaved=True,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        num_experts=config["moe_num_experts"],
        experts_per_token=config["moe_k"],
        expert_size=config["moe_intermediate_size"],
        router=Router(corrected=True),
        shared_size=shared * config["moe_intermediate_size"],
        sparse=_sparse(config),
    )


def _write(c: TransformerConfig) -> Config:
    places = [i for i in range(c.num_layers) if c.is_sparse(i)]
    if places:
        first, last = places[0], places[-1]
        interval = places[1] - first if len(places) > 1 else first + 1
    else:
        first, last, interval = c.num_layers, -1, 1
    fields = {
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": interval,
    }
    every = (True,) * c.num_layers
    if (_sparse({"num_hidden_layers": c.num_layers, **fields}) or every) != (c.sparse or every):
        raise ValueError(
            f"layers {places} of {c.num_layers} have experts; files of {c.family} can only say "
            "that every n-th layer of a range has some"
        )
    return write_llama(
        c,
        **fields,
        use_bias=False,
        moe_num_experts=c.num_experts,
        moe_k=c.experts_per_token,
        moe_intermediate_size=c.expert_size,
        moe_num_shared_experts=c.shared_size // c.expert_size,
    )


_NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_axes=2)

ERNIE4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    _read,
    _write,
    functools.partial(sparse_tensors, names=_NAMES),
    skipped=("model.mtp_",),  # the layer that drafts
)
