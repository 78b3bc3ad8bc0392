"""Models of transformers, and folders that transformers itself writes."""

from __future__ import annotations

import pathlib
from typing import Any

import folders
import torch
import transformers

transformers.utils.logging.disable_progress_bar()


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
