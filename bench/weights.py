"""Pairs of models to measure, from folders or with random weights, for both libraries."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

import specjax
from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.models import FAMILIES, attend_on

# Hidden size, MLP size, layers, heads, key heads; of the target, then of its draft.
SIZES = {
    "tiny": ((64, 176, 2, 4, 2), (32, 88, 1, 2, 2)),
    "15m": ((256, 704, 12, 4, 4), (128, 352, 2, 2, 2)),
    "110m": ((768, 2048, 12, 12, 12), (256, 704, 4, 4, 4)),
    "850m": ((1536, 4096, 26, 16, 16), (512, 1408, 6, 8, 8)),
    "1b": ((2048, 8192, 16, 32, 8), (768, 2048, 8, 12, 4)),
    "8b": ((4096, 14336, 32, 32, 8), (2048, 8192, 16, 32, 8)),
}

ROLES = ("target", "draft")

TorchModel = Any
"""A transformers model; transformers' types do not cover the attributes that are used here."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights in both libraries."""

    target: LanguageModel
    draft: LanguageModel | None
    peer: Callable[[str], TorchModel]  # of a role; on torch's accelerator if there is one
    folders: tuple[pathlib.Path, pathlib.Path | None] | None = None  # None if nothing is written


def from_folders(target: pathlib.Path, draft: pathlib.Path | None, dtype: str) -> Pair:
    """Each library loads the folders; transformers loads a model when it is first needed."""

    @functools.cache
    def peer(role: str) -> TorchModel:
        import torch
        import transformers

        folder = {"target": target, "draft": draft}[role]
        model: TorchModel = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype)
        )
        return model.eval().to(_torch_device())

    models = specjax.load(target, dtype), specjax.load(draft, dtype) if draft else None
    return Pair(*models, peer, (target, draft))


def random_folders(
    size: str, vocab_size: int, folder: pathlib.Path, dtype: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """Folders of a random Llama target and its draft; they are made if they do not exist."""
    folders = []
    for role, config in zip(ROLES, _configs(size, vocab_size), strict=True):
        path = folder / f"{size}-{vocab_size}-{dtype}-{role}"
        folders.append(path)
        if (path / "model.safetensors").exists():
            continue
        model = LinenModel(Transformer(config), jnp.dtype(dtype))
        params = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(len(folders))))
        specjax.save(LanguageModel(model, params, None, (), path.name), path)
    return folders[0], folders[1]


def random_on_device(size: str, vocab_size: int, dtype: str) -> Pair:
    """Random weights without files, because 8B in bfloat16 would take minutes to write and read.

    transformers draws them on its device; specjax takes them over by DLPack and transposes them
    there.  Both hold the same numbers, each in its own memory.
    """
    import torch
    import transformers

    peers: dict[str, TorchModel] = {}
    ours: list[LanguageModel] = []
    for seed, (role, config) in enumerate(zip(ROLES, _configs(size, vocab_size), strict=True)):
        torch.manual_seed(seed)
        with torch.device(_torch_device()):
            settings = transformers.LlamaConfig(**FAMILIES["llama"].write_config(config))
            drawn: TorchModel = transformers.AutoModelForCausalLM.from_config(
                settings, dtype=getattr(torch, dtype)
            )
        peers[role] = drawn.eval().requires_grad_(False)
        tensors = dict(drawn.named_parameters())
        params = {}
        for row in FAMILIES["llama"].tensors(config):
            leaf = jnp.from_dlpack(tensors[row.name].detach())
            params[row.path] = jnp.array(leaf.T if row.transpose else leaf, copy=True)
        network = Transformer(config, attend=attend_on(jax.devices()[0]))
        model = LinenModel(network, jnp.dtype(dtype))
        ours.append(LanguageModel(model, unflatten_dict(params), None, (), f"{size} {role}"))
    return Pair(ours[0], ours[1], peers.__getitem__)


def _configs(size: str, vocab_size: int) -> list[TransformerConfig]:
    return [
        TransformerConfig(
            vocab_size=vocab_size, hidden_size=hidden, mlp_size=mlp, num_layers=layers,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads, max_positions=8192,
            tied_embeddings=True, init_scale=hidden**-0.5,
        )
        for hidden, mlp, layers, heads, kv_heads in SIZES[size]
    ]  # fmt: skip


def _torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
