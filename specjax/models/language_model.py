"""A model with its weights and its tokenizer: what loaders return and `generate` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import tokenizers

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that leave the logits alone, and decode greedily."""


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its weights and its tokenizer: what `load` returns, `generate` takes and `save` writes."""

    model: Any  # types.Model; LinenModel where `load` made it
    params: Any
    tokenizer: tokenizers.Tokenizer | None = None
    eos: tuple[int, ...] = ()  # ids that end a text
    name: str = "model"  # of its folder, for messages
    defaults: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  # how it wants to be sampled; {}: greedy
    files: Mapping[str, bytes] = dataclasses.field(
        default_factory=dict, repr=False
    )  # of its folder, but for weights

    @property
    def num_params(self) -> int:
        """Parameters of the model; the copy of a tied embedding counts once."""
        module = getattr(self.model, "module", None)  # a model of one's own may have none
        twice = self.params["embedding"].size if getattr(module, "separate_head", False) else 0
        return sum(leaf.size for leaf in jax.tree.leaves(self.params)) - twice

    def settings(self, **given: Any) -> dict[str, Any]:
        """Temperature, filters and repetition penalty: what is given (not None), else the model's own, else greedy."""
        return {
            **OFF,
            **self.defaults,
            **{name: value for name, value in given.items() if value is not None},
        }
