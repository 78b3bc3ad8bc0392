"""Pairs of models to measure: folders, or random weights of a given size; the same for specjax and transformers."""

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
from specjax.models import FAMILIES

# hidden, MLP, layers, heads, key heads; the target, then its draft.
SIZES = {
    "tiny": ((64, 176, 2, 4, 2), (32, 88, 1, 2, 2)),
    "15m": ((256, 704, 12, 4, 4), (128, 352, 2, 2, 2)),
    "110m": ((768, 2048, 12, 12, 12), (256, 704, 4, 4, 4)),
    "850m": ((1536, 4096, 26, 16, 16), (512, 1408, 6, 8, 8)),
    "1b": ((2048, 8192, 16, 32, 8), (768, 2048, 8, 12, 4)),
    "8b": ((4096, 14336, 32, 32, 8), (2048, 8192, 16, 32, 8)),
}


ROLES = ("target", "draft")


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights in both libraries."""

    target: LanguageModel
    draft: LanguageModel | None
    peer: Callable[
        [str], Any
    ]  # of a role: transformers' model, on torch's accelerator where it has one


def from_folders(target: pathlib.Path, draft: pathlib.Path | None, dtype: str) -> Pair:
    """Each library loads its own; transformers' are loaded when they are first asked for."""

    @functools.cache
    def peer(role: str) -> Any:
        import torch
        import transformers

        folder = {"target": target, "draft": draft}[role]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype)
        )
        return model.eval().to(_torch_device())

    return Pair(specjax.load(target, dtype), specjax.load(draft, dtype) if draft else None, peer)


def random_folders(
    size: str, vocab_size: int, folder: pathlib.Path, dtype: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """Folders of a random target and draft of Llama's kind, made where they are not there yet."""
    found = []
    for role, config in zip(ROLES, _configs(size, vocab_size), strict=True):
        place = folder / f"{size}-{vocab_size}-{dtype}-{role}"
        found.append(place)
        if (place / "model.safetensors").exists():
            continue
        model = LinenModel(Transformer(config), jnp.dtype(dtype))
        params = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(len(found))))
        specjax.save(LanguageModel(model, params, None, (), place.name), place)
    return found[0], found[1]


def random_on_device(size: str, vocab_size: int, dtype: str) -> Pair:
    """Random weights without a file, which 8B in bfloat16 would take minutes to write and to read.

    transformers draws them where it runs, and specjax takes them over by DLPack and turns them there: both hold the
    same numbers, each in its own memory.
    """
    import torch
    import transformers

    peers, ours = {}, []
    for seed, (role, config) in enumerate(zip(ROLES, _configs(size, vocab_size), strict=True)):
        torch.manual_seed(seed)
        with torch.device(_torch_device()):
            settings = transformers.LlamaConfig(**FAMILIES["llama"].write_config(config))
            drawn: Any = transformers.AutoModelForCausalLM.from_config(
                settings, dtype=getattr(torch, dtype)
            )
        peers[role] = drawn.eval().requires_grad_(False)
        tensors = dict(drawn.named_parameters())
        params = {}
        for row in FAMILIES["llama"].tensors(config):
            leaf = jnp.from_dlpack(tensors[row.name].detach())
            params[row.path] = jnp.array(leaf.T if row.transpose else leaf, copy=True)
        model = LinenModel(Transformer(config), jnp.dtype(dtype))
        ours.append(LanguageModel(model, unflatten_dict(params), None, (), f"{size} {role}"))
    return Pair(ours[0], ours[1], peers.__getitem__)


def _configs(size: str, vocab_size: int) -> list[TransformerConfig]:
    return [
        TransformerConfig(
            vocab_size=vocab_size, hidden_size=hidden, mlp_size=mlp, num_layers=layers, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=hidden // heads, max_positions=8192, tied_embeddings=True,
            init_scale=hidden**-0.5,
        )
        for hidden, mlp, layers, heads, kv_heads in SIZES[size]
    ]  # fmt: skip


def _torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
