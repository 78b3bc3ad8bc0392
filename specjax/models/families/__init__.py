"""Families of checkpoints: the reader of each configuration, and its tensor names."""

from specjax.models.families.cohere2 import COHERE2
from specjax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from specjax.models.families.ernie4_5 import ERNIE4_5
from specjax.models.families.ernie4_5_moe import ERNIE4_5_MOE
from specjax.models.families.exaone4 import EXAONE4
from specjax.models.families.experts import FUSED
from specjax.models.families.falcon_h1 import FALCON_H1
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_fields
from specjax.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from specjax.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from specjax.models.families.glm4 import GLM4
from specjax.models.families.glm4_moe import GLM4_MOE
from specjax.models.families.glm4_moe_lite import GLM4_MOE_LITE
from specjax.models.families.gpt2 import GPT2
from specjax.models.families.gpt_neox import GPT_NEOX
from specjax.models.families.gpt_oss import GPT_OSS
from specjax.models.families.granite import GRANITE
from specjax.models.families.granitemoehybrid import GRANITEMOEHYBRID
from specjax.models.families.hunyuan import HUNYUAN
from specjax.models.families.kimi_linear import KIMI_LINEAR
from specjax.models.families.lfm2 import LFM2, LFM2_MOE
from specjax.models.families.llama import LLAMA
from specjax.models.families.llama4 import LLAMA4
from specjax.models.families.minimax_m2 import MINIMAX_M2
from specjax.models.families.ministral3 import MINISTRAL3
from specjax.models.families.mistral import MISTRAL, MIXTRAL
from specjax.models.families.mistral4 import MISTRAL4
from specjax.models.families.mtp import (
    MTP,
    MtpNames,
    mtp_beginnings,
    mtp_layers,
    mtp_layout,
    splits_layers,
)
from specjax.models.families.nemotron_h import NEMOTRON_H
from specjax.models.families.nested import NESTED, Nested
from specjax.models.families.olmo2 import OLMO2
from specjax.models.families.olmo3 import OLMO3
from specjax.models.families.olmo_hybrid import OLMO_HYBRID
from specjax.models.families.opt import OPT
from specjax.models.families.phi3 import PHI3
from specjax.models.families.phimoe import PHIMOE
from specjax.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from specjax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from specjax.models.families.qwen3_next import QWEN3_NEXT
from specjax.models.families.seed_oss import SEED_OSS
from specjax.models.families.smollm3 import SMOLLM3
from specjax.models.families.stablelm import STABLELM
from specjax.models.families.starcoder2 import STARCODER2

FAMILIES: dict[str, Family] = {
    "cohere2": COHERE2,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "exaone4": EXAONE4,
    "falcon_h1": FALCON_H1,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "glm4": GLM4,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4_moe": GLM4_MOE,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "hunyuan_v1_dense": HUNYUAN,
    "kimi_k2": KIMI_K2,
    "kimi_linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "llama": LLAMA,
    "llama4_text": LLAMA4,
    "minimax_m2": MINIMAX_M2,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mistral4": MISTRAL4,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON_H,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmo_hybrid": OLMO_HYBRID,
    "opt": OPT,
    "phi3": PHI3,
    "phimoe": PHIMOE,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
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
