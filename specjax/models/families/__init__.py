"""Families of checkpoints: the reader of each configuration, and its tensor names."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from specjax.models.families.experts import FUSED
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_fields
from specjax.models.families.mtp import (
    MTP,
    MtpNames,
    mtp_beginnings,
    mtp_layers,
    mtp_layout,
    splits_layers,
)
from specjax.models.families.nested import NESTED, Nested

_ROWS = {
    "cohere2": "cohere2.COHERE2",
    "deepseek_v2": "deepseek.DEEPSEEK_V2",
    "deepseek_v3": "deepseek.DEEPSEEK_V3",
    "ernie4_5": "ernie4_5.ERNIE4_5",
    "ernie4_5_moe": "ernie4_5_moe.ERNIE4_5_MOE",
    "exaone4": "exaone4.EXAONE4",
    "falcon_h1": "falcon_h1.FALCON_H1",
    "gemma": "gemma.GEMMA",
    "gemma2": "gemma.GEMMA2",
    "gemma3_text": "gemma.GEMMA3",
    "gemma4_text": "gemma4.GEMMA4",
    "gemma4_unified_text": "gemma4.GEMMA4_UNIFIED",
    "glm4": "glm4.GLM4",
    "glm4_moe_lite": "glm4_moe_lite.GLM4_MOE_LITE",
    "glm4_moe": "glm4_moe.GLM4_MOE",
    "gpt2": "gpt2.GPT2",
    "gpt_neox": "gpt_neox.GPT_NEOX",
    "gpt_oss": "gpt_oss.GPT_OSS",
    "granite": "granite.GRANITE",
    "granitemoehybrid": "granitemoehybrid.GRANITEMOEHYBRID",
    "hunyuan_v1_dense": "hunyuan.HUNYUAN",
    "kimi_k2": "deepseek.KIMI_K2",
    "kimi_linear": "kimi_linear.KIMI_LINEAR",
    "lfm2": "lfm2.LFM2",
    "lfm2_moe": "lfm2.LFM2_MOE",
    "llama": "llama.LLAMA",
    "llama4_text": "llama4.LLAMA4",
    "mimo": "qwen.MIMO",
    "minimax_m2": "minimax_m2.MINIMAX_M2",
    "ministral3": "ministral3.MINISTRAL3",
    "mistral": "mistral.MISTRAL",
    "mistral4": "mistral4.MISTRAL4",
    "mixtral": "mistral.MIXTRAL",
    "nemotron_h": "nemotron_h.NEMOTRON_H",
    "olmo2": "olmo2.OLMO2",
    "olmo3": "olmo3.OLMO3",
    "olmo_hybrid": "olmo_hybrid.OLMO_HYBRID",
    "opt": "opt.OPT",
    "phi3": "phi3.PHI3",
    "phimoe": "phimoe.PHIMOE",
    "qwen2": "qwen.QWEN2",
    "qwen2_moe": "qwen.QWEN2_MOE",
    "qwen3": "qwen.QWEN3",
    "qwen3_5_moe_text": "qwen3_5.QWEN3_5_MOE",
    "qwen3_5_text": "qwen3_5.QWEN3_5",
    "qwen3_moe": "qwen.QWEN3_MOE",
    "qwen3_next": "qwen3_next.QWEN3_NEXT",
    "seed_oss": "seed_oss.SEED_OSS",
    "smollm3": "smollm3.SMOLLM3",
    "stablelm": "stablelm.STABLELM",
    "starcoder2": "starcoder2.STARCODER2",
}
"""The `model_type` in config.json -> the module of the family, and its name there."""


class _Families(Mapping[str, Family]):
    """Imports the module of a family when the family is first used."""

    def __getitem__(self, model_type: str) -> Family:
        module, name = _ROWS[model_type].split(".")
        family: Family = getattr(import_module(f"{__name__}.{module}"), name)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(_ROWS)

    def __len__(self) -> int:
        return len(_ROWS)


FAMILIES = _Families()
"""The family of each `model_type` in config.json."""

__all__ = [
    "FAMILIES",
    "FUSED",
    "MTP",
    "NESTED",
    "Config",
    "Family",
    "MtpNames",
    "Nested",
    "Tensor",
    "check_fields",
    "mtp_beginnings",
    "mtp_layers",
    "mtp_layout",
    "splits_layers",
]
