"""Models: a protocol, a Linen adapter, one transformer, and a table of the families that are read into it."""

from specjax.models.base import LinenModel
from specjax.models.family import Family, Tensor
from specjax.models.llama import LLAMA
from specjax.models.rope import Rope
from specjax.models.transformer import Transformer, TransformerConfig

FAMILIES: dict[str, Family] = {"llama": LLAMA}
"""`model_type` in config.json -> how to read it."""

__all__ = ["FAMILIES", "Family", "LinenModel", "Rope", "Tensor", "Transformer", "TransformerConfig"]
