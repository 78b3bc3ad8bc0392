"""Steps of training as a plain PyTorch loop takes them: what `train.bench` stands beside.  Needs torch, transformers.

The usual loop: whole logits, autocast, the fused cross-entropy and divergence of PyTorch, AdamW over float32 masters,
clipping.  What is learned, and from what, is as in `train.distill` with forward KL and in `train.medusa` version 2.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

Run = Callable[[np.ndarray, int], np.ndarray]
"""Tokens [B, T + 1] and a number of steps -> their losses; all work is done when it returns."""


def distill(
    target: pathlib.Path,
    draft: pathlib.Path,
    dtype: str,
    precision: str,
    rate: float,
    compiled: bool,
) -> Run:
    """Forward KL from a frozen target; `dtype` of its weights, `precision` of the products."""
    import torch
    from torch.nn import functional

    teacher, student = _load(target, dtype, compiled), _load(draft, "float32", compiled)
    teacher.requires_grad_(False)

    def loss(ids: Any) -> Any:
        with torch.no_grad():
            wanted = functional.log_softmax(teacher(ids[:, :-1]).logits.float(), -1)
        found = functional.log_softmax(student(ids[:, :-1]).logits.float(), -1)
        return functional.kl_div(found, wanted, log_target=True, reduction="sum") / (
            found.shape[0] * found.shape[1]
        )

    return _loop(loss, list(student.parameters()), precision, rate, 0.1)


def medusa(
    target: pathlib.Path,
    num_heads: int,
    decay: float,
    dtype: str,
    precision: str,
    rate: float,
    compiled: bool,
) -> Run:
    """Cross-entropy of heads that share the linear map of a frozen target."""
    import torch
    from torch.nn import functional

    model = _load(target, dtype, compiled)
    model.requires_grad_(False)
    size, device = model.config.hidden_size, next(model.parameters()).device
    blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(num_heads)).to(device)
    for leaf in blocks.parameters():
        torch.nn.init.zeros_(leaf)

    def loss(ids: Any) -> Any:
        with torch.no_grad():
            hidden = model.model(ids[:, :-1]).last_hidden_state
        total = torch.zeros((), device=device)
        for k, block in enumerate(blocks):
            here = hidden[:, : -1 - k]
            logits = model.lm_head(here + functional.silu(block(here))).float()
            labels = ids[:, 2 + k :].reshape(-1)
            total = total + decay**k * functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), labels
            )
        return total

    return _loop(loss, list(blocks.parameters()), precision, rate, 0.0)


def _load(folder: pathlib.Path, dtype: str, compiled: bool) -> Any:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    model = model.to(device)
    if compiled:
        model.forward = torch.compile(model.forward)
    return model


def _loop(
    loss: Callable[[Any], Any], leaves: list[Any], precision: str, rate: float, decay: float
) -> Run:
    import torch

    device = leaves[0].device
    optimizer = torch.optim.AdamW(leaves, rate, betas=(0.9, 0.95), weight_decay=decay)

    def run(tokens: np.ndarray, steps: int) -> np.ndarray:
        ids, found = torch.from_numpy(tokens).long().to(device), []
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                value = loss(ids)
            value.backward()
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.detach())
        return torch.stack(found).cpu().numpy()

    return run
