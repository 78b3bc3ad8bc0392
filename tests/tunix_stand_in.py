"""The interface of google-tunix 0.1.7 that a rollout worker meets, for tests without tunix."""

from __future__ import annotations

import abc
import dataclasses
import sys
import types
from typing import Any

import pytest


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: list[Any]
    left_padded_prompt_tokens: Any
    logprobs: Any


@dataclasses.dataclass
class RolloutConfig:
    """Fields that a worker reads, with the defaults of tunix."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False


class BaseRollout(abc.ABC):
    @abc.abstractmethod
    def __init__(self, **kwargs): ...

    @abc.abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abc.abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


class Tokenizer:
    """What tunix's `TokenizerAdapter` offers, over a tokenizer of ours."""

    def __init__(self, tokenizer: Any, pad: int, eos: int, bos: int | None = None) -> None:
        self._tokenizer, self._ids = tokenizer, (pad, eos, bos)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(list(ids))

    def pad_id(self) -> int:
        return self._ids[0]

    def eos_id(self) -> int:
        return self._ids[1]

    def bos_id(self) -> int | None:
        return self._ids[2]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `import tunix.rl.rollout.base_rollout` find these classes."""
    names = ["tunix", "tunix.rl", "tunix.rl.rollout", "tunix.rl.rollout.base_rollout"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    last: Any = sys.modules[names[-1]]
    last.BaseRollout, last.RolloutConfig = BaseRollout, RolloutConfig
    last.RolloutOutput = RolloutOutput
