"""Qwen3-Next: the layers of Qwen3.5 with experts; a projection has the parts of a head together."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.experts import (
    ExpertNames,
    fused_experts,
    plain_layers,
    sparse_in_turn,
    sparse_tensors,
)
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import flag
from specjax.models.families.llama import write_llama
from specjax.models.families.qwen3_5 import (
    read_experts,
    read_qwen3_next,
    shared_tensors,
    write_delta,
    write_experts,
)
from specjax.models.mixers import GatedDelta


def _read(config: Config) -> TransformerConfig:
    changes = {
        "normalise_experts": flag(config, "norm_topk_prob", True),
        "sparse": sparse_in_turn(config),
        **read_experts(config),
    }
    return read_qwen3_next(config, theta=1e4, **changes)


def _write(c: TransformerConfig) -> Config:
    return write_llama(
        c,
        norm_topk_prob=c.normalise_experts,
        decoder_sparse_step=1,
        mlp_only_layers=plain_layers(c),
        **write_delta(c),
        **write_experts(c),
    )


def _delta_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns the tensors of a delta net; each key head has its q, k, v and z, or b and a."""
    mixer, rows = c.mixer_of(layer), shared_tensors(c, layer)
    assert isinstance(mixer, GatedDelta)
    theirs, ours = f"model.layers.{layer}.linear_attn", (f"layer_{layer}", "mixer")
    heads, each = mixer.key_heads, mixer.value_heads // mixer.key_heads
    keys, values = mixer.key_dim, each * mixer.value_dim
    tensors = {
        "in_proj_qkvz": {"q": keys, "k": keys, "v": values, "z": values},
        "in_proj_ba": {"b": each, "a": each},
    }
    for name, sizes in tensors.items():
        shape, start = (sum(sizes.values()), c.hidden_size), 0
        for part, size in sizes.items():
            rows.append(
                Tensor(
                    f"{theirs}.{name}.weight",
                    (*ours, part, "kernel"),
                    transpose=True,
                    shape=(heads * shape[0], shape[1]),
                    view=(heads, *shape),
                    index=(slice(None), slice(start, start + size)),
                )
            )
            start += size
    return rows


def _tensors(c: TransformerConfig) -> list[Tensor]:
    return sparse_tensors(c, ExpertNames(shared="shared_expert"), _delta_tensors)


def _fused_tensors(c: TransformerConfig) -> list[Tensor]:
    return fused_experts(_tensors(c), c)


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    _read,
    _write,
    _tensors,
    skipped=("mtp.",),
    fused=True,
    fused_tensors=_fused_tensors,
)
