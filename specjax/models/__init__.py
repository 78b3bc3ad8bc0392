"""Models: one transformer, the model families that it covers, and adapters for your own models."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily
from specjax._internal.moved import forward

if TYPE_CHECKING:
    from specjax.models.adapters import from_function, from_linen, from_nnx
    from specjax.models.attention import (
        BLOCK_SLOTS,
        attend,
        attend_on,
        cpu_attend,
        gpu_attend,
    )
    from specjax.models.base import PRECISIONS, LinenModel
    from specjax.models.check import check_model
    from specjax.models.config import Mixer, TransformerConfig
    from specjax.models.exact_states import with_exact_states
    from specjax.models.families import (
        FAMILIES,
        FUSED,
        MTP,
        NESTED,
        Config,
        Family,
        MtpNames,
        Nested,
        Tensor,
        check_fields,
        mtp_beginnings,
        mtp_layers,
        mtp_layout,
        splits_layers,
    )
    from specjax.models.feed_forward import MLP, Stacks, grouped, in_tiles
    from specjax.models.int8 import (
        Int8,
        cpu_int8_dot_general,
        gpu_int8_dot_general,
        int8_dot_general,
        int8_form,
    )
    from specjax.models.language_model import OFF, LanguageModel
    from specjax.models.layers import (
        Dense,
        Norm,
        look_up,
        named_param,
        on_target,
        residual_scale,
    )
    from specjax.models.mixers import Attention, AttentionSizes, Latent, LatentAttention
    from specjax.models.observed import Ran, run_layer
    from specjax.models.packed import Packed, holds_packed, is_packed
    from specjax.models.products import (
        cpu_dot_general,
        dot_general,
        dot_general_on,
        float32_dot_general,
        gpu_dot_general,
    )
    from specjax.models.quantised import (
        for_several_devices,
        quantise,
        quantised_form,
        round_activations,
        rounded_weights,
        rounding_form,
    )
    from specjax.models.rope import Rope, rotate
    from specjax.models.router import Router, route
    from specjax.models.transformer import (
        Head,
        Layer,
        Tables,
        Transformer,
        head_matrix,
        run_layers,
        shapes_of,
    )
    from specjax.models.whole_layers import (
        form_of_layers,
        reads_bfloat16,
        run_whole_layers,
        together_or_apart,
    )

_moved = forward(
    __name__,
    methods=(
        "BlockDraft", "BlockDraftConfig", "CandidateSelector", "Correction", "Eagle3",
        "Eagle3Config", "MarkovHead", "MedusaHeads", "PrefixGRU", "SharedParams", "Slot",
        "block_axes", "by_row", "draft_logits", "eagle3_axes", "eagle3_shapes", "embedding_of",
        "head_of", "initial_block", "initial_medusa", "medusa_hidden", "medusa_logits",
        "read_block", "stage_context",
    ),
)  # fmt: skip

__getattr__ = lazily(__name__, __file__, _moved)

__all__ = [
    "BLOCK_SLOTS",
    "FAMILIES",
    "FUSED",
    "MLP",
    "MTP",
    "NESTED",
    "OFF",
    "PRECISIONS",
    "Attention",
    "AttentionSizes",
    "Config",
    "Dense",
    "Family",
    "Head",
    "Int8",
    "LanguageModel",
    "Latent",
    "LatentAttention",
    "Layer",
    "LinenModel",
    "Mixer",
    "MtpNames",
    "Nested",
    "Norm",
    "Packed",
    "Ran",
    "Rope",
    "Router",
    "Stacks",
    "Tables",
    "Tensor",
    "Transformer",
    "TransformerConfig",
    "attend",
    "attend_on",
    "check_fields",
    "check_model",
    "cpu_attend",
    "cpu_dot_general",
    "cpu_int8_dot_general",
    "dot_general",
    "dot_general_on",
    "float32_dot_general",
    "for_several_devices",
    "form_of_layers",
    "from_function",
    "from_linen",
    "from_nnx",
    "gpu_attend",
    "gpu_dot_general",
    "gpu_int8_dot_general",
    "grouped",
    "head_matrix",
    "holds_packed",
    "in_tiles",
    "int8_dot_general",
    "int8_form",
    "is_packed",
    "look_up",
    "mtp_beginnings",
    "mtp_layers",
    "mtp_layout",
    "named_param",
    "on_target",
    "quantise",
    "quantised_form",
    "reads_bfloat16",
    "residual_scale",
    "rotate",
    "round_activations",
    "rounded_weights",
    "rounding_form",
    "route",
    "run_layer",
    "run_layers",
    "run_whole_layers",
    "shapes_of",
    "splits_layers",
    "together_or_apart",
    "with_exact_states",
]
