"""Models of transformers, and folders that transformers itself writes."""

from __future__ import annotations

import pathlib
from typing import Any

import folders
import torch
import transformers

transformers.utils.logging.disable_progress_bar()

THEIRS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families that transformers has under another name."""


def auto(family: str) -> Any:
    """The class that loads a family; Mistral 4 is listed as the text part of other models."""
    text = transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText if family == "mistral4" else text


def configured(family: str, **config: Any) -> transformers.PreTrainedConfig:
    """A configuration of transformers."""
    return transformers.AutoConfig.for_model(THEIRS.get(family, family), **config)


def random_llama(seed: int = 0, **config: Any) -> transformers.LlamaForCausalLM:
    """The random model of `folders.random_llama`, as a model of transformers."""
    made = folders.random_llama(seed, **config)
    known = {k: v for k, v in made.config.items() if k not in ("architectures", "dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**known)).eval()
    tensors = {name: torch.from_numpy(tensor) for name, tensor in made.tensors.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    return model


def write(
    model: transformers.PreTrainedModel, name: str, tokens: bool = True, **save: Any
) -> pathlib.Path:
    """Save with transformers, and our tokenizer beside it."""
    folder = folders.ROOT / name
    model.save_pretrained(folder, **save)
    if tokens:
        (folder / "tokenizer.json").write_bytes(folders.tokenizer_file().read_bytes())
    return folder
