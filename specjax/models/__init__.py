"""Models: one transformer, a table of the families that are read into it, and adapters for models of your own."""

from specjax.models.adapters import from_function, from_linen, from_nnx
from specjax.models.base import LinenModel
from specjax.models.check import check_model
from specjax.models.config import TransformerConfig
from specjax.models.family import Family, Tensor
from specjax.models.gemma import GEMMA, GEMMA2, GEMMA3
from specjax.models.gpt2 import GPT2
from specjax.models.gpt_neox import GPT_NEOX
from specjax.models.llama import LLAMA
from specjax.models.mistral import MISTRAL, MIXTRAL
from specjax.models.olmo2 import OLMO2
from specjax.models.opt import OPT
from specjax.models.phi3 import PHI3
from specjax.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from specjax.models.rope import Rope
from specjax.models.smollm3 import SMOLLM3
from specjax.models.transformer import Transformer

FAMILIES: dict[str, Family] = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
}
"""`model_type` in config.json -> how to read it."""

__all__ = [
    "FAMILIES",
    "Family",
    "LinenModel",
    "Rope",
    "Tensor",
    "Transformer",
    "TransformerConfig",
    "check_model",
    "from_function",
    "from_linen",
    "from_nnx",
]
