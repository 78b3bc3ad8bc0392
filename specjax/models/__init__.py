"""Models: one transformer, the model families that it covers, and adapters for your own models."""

from specjax.models.adapters import from_function, from_linen, from_nnx
from specjax.models.attention import BLOCK_SLOTS, attend, cpu_attend
from specjax.models.base import PRECISIONS, LinenModel
from specjax.models.check import check_model
from specjax.models.config import TransformerConfig
from specjax.models.drafts import (
    BlockDraft,
    BlockDraftConfig,
    CandidateSelector,
    Correction,
    Eagle3,
    Eagle3Config,
    MarkovHead,
    PrefixGRU,
    SharedParams,
    Slot,
    block_axes,
    by_row,
    draft_logits,
    eagle3_axes,
    eagle3_shapes,
    embedding_of,
    head_of,
    initial_block,
    on_target,
    read_block,
    stage_context,
)
from specjax.models.families import FAMILIES, Config, Family, Tensor, check_fields
from specjax.models.language_model import OFF, LanguageModel
from specjax.models.layers import look_up
from specjax.models.medusa import MedusaHeads, initial_medusa, medusa_hidden, medusa_logits
from specjax.models.products import cpu_dot_general, dot_general, float32_dot_general
from specjax.models.quantised import (
    Int8,
    for_several_devices,
    int8_dot_general,
    quantise,
    quantised_form,
)
from specjax.models.rope import Rope
from specjax.models.transformer import Transformer, head_matrix

__all__ = [
    "BLOCK_SLOTS",
    "FAMILIES",
    "OFF",
    "PRECISIONS",
    "BlockDraft",
    "BlockDraftConfig",
    "CandidateSelector",
    "Config",
    "Correction",
    "Eagle3",
    "Eagle3Config",
    "Family",
    "Int8",
    "LanguageModel",
    "LinenModel",
    "MarkovHead",
    "MedusaHeads",
    "PrefixGRU",
    "Rope",
    "SharedParams",
    "Slot",
    "Tensor",
    "Transformer",
    "TransformerConfig",
    "attend",
    "block_axes",
    "by_row",
    "check_fields",
    "check_model",
    "cpu_attend",
    "cpu_dot_general",
    "dot_general",
    "draft_logits",
    "eagle3_axes",
    "eagle3_shapes",
    "embedding_of",
    "float32_dot_general",
    "for_several_devices",
    "from_function",
    "from_linen",
    "from_nnx",
    "head_matrix",
    "head_of",
    "initial_block",
    "initial_medusa",
    "int8_dot_general",
    "look_up",
    "medusa_hidden",
    "medusa_logits",
    "on_target",
    "quantise",
    "quantised_form",
    "read_block",
    "stage_context",
]
