"""Folders of several models, of which one reads text: that one is loaded, by a family of its own.

`config.json` has the text model's configuration in a field, and the tensors have its names behind a
prefix, which transformers has changed more than once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from specjax._internal.fields import OBJECT, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.experts import ExpertNames, fused_experts, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_fields

_TEXT, _TIED = "text_config", "tie_word_embeddings"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PREFIXES = {
    "model.": ("model.language_model.", "language_model.model.", "model."),
    "lm_head.": ("language_model.lm_head.", "lm_head."),
}
_PARTS = (
    "visual.", "vision_tower.", "vision_model.", "vision_embedder.", "embed_vision.",
    "audio_tower.", "embed_audio.", "multi_modal_projector.",
)  # fmt: skip
_OTHERS = (*_PARTS, *(f"model.{part}" for part in _PARTS), "mtp.")
"""Beginnings of the names of what reads images and sounds, and of heads that draft."""


@dataclasses.dataclass(frozen=True)
class Nested:
    """A row of the table `specjax.models.NESTED`: a folder of several models."""

    architecture: str  # the class that transformers would load
    families: Mapping[str, str]  # the text model's model_type -> its row of FAMILIES
    defaults: Mapping[str, object] = dataclasses.field(
        default_factory=dict
    )  # of fields that its configuration omits
    tied: bool = False  # the default of tie_word_embeddings
    # Files have a matrix of all experts of a layer in one tensor, as [in, out] or [out, in].
    fused: bool = False

    def text(self, config: Config) -> Config:
        """Returns the configuration of the text model, as its family reads it.

        Args:
          config: the whole `config.json`.

        Raises:
          ValueError: the text model has no family here, or a field has a wrong type.
        """
        inner = config.get(_TEXT)
        if inner is None:  # early files have its fields beside the others
            inner = {name: value for name, value in config.items() if name != "vision_config"}
            inner["model_type"] = next(iter(self.families))
        OBJECT.of(_TEXT, inner)
        kind = inner.get("model_type", next(iter(self.families)))
        made = {**self.defaults, **inner}
        made["model_type"] = self.families[one_of(self.families).of(f"{_TEXT}: model_type", kind)]
        # The outer flag counts, as in transformers.
        tied = [c[_TIED] for c in (config, inner) if c.get(_TIED) is not None]
        made[_TIED] = tied[0] if tied else self.tied
        made |= {name: config[name] for name in _IDS if config.get(name) is not None}
        check_fields(made)
        return _plain_rope(made)

    def family(self, config: Config, families: Mapping[str, Family]) -> Family:
        """Returns the text model's family, which reads the whole configuration and these names."""
        inner = families[self.text(config)["model_type"]]
        if self.fused:
            tables = (functools.partial(_fused, inputs_first=first) for first in (False, True))
            named = dict(zip(("fused_tensors", "turned_tensors"), tables, strict=True))
            inner = dataclasses.replace(inner, fused=True, **named)
        return dataclasses.replace(
            inner,
            architecture=self.architecture,
            read_config=lambda config: inner.read_config(self.text(config)),
            prefixes=_PREFIXES,
            skipped=_OTHERS,
        )


def _plain_rope(config: Config) -> Config:
    """Returns the configuration without the parts of a rope that only images have.

    Each of the three positions of a text's token is its place in the text.
    """
    config = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict):
            rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
            for key in ("type", "rope_type"):
                if rope.get(key) == "mrope":
                    rope[key] = "default"
            config[name] = rope
    return config


_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
_GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8,
}  # fmt: skip
_QWEN2_5 = {
    "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6, "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}  # fmt: skip


def _fused(c: TransformerConfig, inputs_first: bool) -> list[Tensor]:
    """Returns the tensors, of which two hold all experts of a layer."""
    return fused_experts(sparse_tensors(c, ExpertNames()), c, inputs_first)


NESTED: dict[str, Nested] = {
    "gemma3": Nested(
        "Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}, _GEMMA3, tied=True
    ),
    "gemma4": Nested(
        "Gemma4ForConditionalGeneration", {"gemma4_text": "gemma4_text"}, _GEMMA4, tied=True
    ),
    "gemma4_unified": Nested(
        "Gemma4UnifiedForConditionalGeneration",
        {"gemma4_unified_text": "gemma4_unified_text"},
        _GEMMA4,
        tied=True,
    ),
    "llama4": Nested("Llama4ForConditionalGeneration", {"llama4_text": "llama4_text"}),
    "mistral3": Nested(
        "Mistral3ForConditionalGeneration",
        {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
        tied=True,
    ),
    "qwen2_5_vl": Nested(
        "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": "qwen2"}, _QWEN2_5
    ),
    "qwen3_5": Nested("Qwen3_5ForConditionalGeneration", {"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": Nested(
        "Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": "qwen3_5_moe_text"}
    ),
    "qwen3_vl": Nested(
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": "qwen3"},
        {"rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    "qwen3_vl_moe": Nested(
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        {"rope_theta": 5e5, "max_position_embeddings": 128000, "norm_topk_prob": True},
        fused=True,
    ),
}
"""The folder of each such `model_type` in config.json."""
