"""`LanguageModel`: a model with its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from specjax.models.base import LinenModel
from specjax.models.packed import is_packed
from specjax.models.transformer import Transformer

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that decode greedily and change no logits."""


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its weights and its tokenizer, which `load` returns and `save` writes."""

    model: Any  # a contract.Model; from `load` it is a LinenModel
    params: Any
    tokenizer: tokenizers.Tokenizer | None = None
    eos: tuple[int, ...] = ()  # ids that end a text
    name: str = "model"  # of its folder, for messages
    # Sampling settings from the model's folder; {}: greedy.
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The contents of the files in its folder, by name, without the weights.
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    mtp: int = 0  # layers of multi-token prediction in its folder, which `specjax.load_mtp` reads
    folder: pathlib.Path | None = None  # that it was read from

    def __repr__(self) -> str:
        """Returns one line; a dataclass would print every weight."""
        types = sorted({leaf.dtype.name for leaf in jax.tree.leaves(self.params)})
        words = "no tokenizer" if self.tokenizer is None else "with a tokenizer"
        return (
            f"LanguageModel({self.name!r}, {self.num_params / 1e6:.3g}M parameters in "
            f"{', '.join(types)}, {self.model.vocab_size} tokens, "
            f"{self.model.max_positions} positions, {words})"
        )

    @property
    def num_params(self) -> int:
        """The number of parameters; the copy of a tied embedding counts once."""
        module = self.model.module if isinstance(self.model, LinenModel) else None
        twice = 0
        if isinstance(module, Transformer) and module.separate_head:
            table = self.params["embedding"]
            twice = (module.head_tokens or len(table)) * table.shape[1]
        return sum(leaf.size for leaf in jax.tree.leaves(self.params, is_leaf=is_packed)) - twice

    @property
    def keeps_bfloat16(self) -> bool:
        """Whether matrices are in bfloat16 and computed in float32, as `load` was asked to."""
        if getattr(self.model, "dtype", None) != jnp.float32:
            return False
        leaves = jax.tree.leaves(self.params, is_leaf=is_packed)
        return any(leaf.dtype == jnp.bfloat16 for leaf in leaves if not is_packed(leaf))

    def settings(self, **chosen: Any) -> dict[str, Any]:
        """Returns sampling settings: each from `chosen`, `defaults` or `OFF`, in this order."""
        return {
            **OFF,
            **self.defaults,
            **{name: value for name, value in chosen.items() if value is not None},
        }
