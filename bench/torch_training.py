"""Training steps of a plain PyTorch loop, which `bench.training` compares with.

Needs torch and transformers.  It is the usual loop: full logits, autocast, PyTorch's fused
cross-entropy and KL divergence, AdamW over float32 masters, clipping.  The models learn the same as
in `train.distill` with forward KL and in `train.medusa` version 2.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Run = Callable[[np.ndarray, int], np.ndarray]
"""Tokens [B, T + 1] and a number of steps -> the losses.  All work is done when it returns."""


def distill(
    target: pathlib.Path,
    draft: pathlib.Path,
    dtype: str,
    precision: str,
    rate: float,
    compiled: bool,
) -> Run:
    """Forward KL from a frozen target.  `dtype` is of its weights, `precision` of the products."""
    import torch
    from torch.nn import functional

    teacher, student = _load(target, dtype, compiled), _load(draft, "float32", compiled)
    teacher.requires_grad_(False)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p = functional.log_softmax(teacher(ids[:, :-1]).logits.float(), -1)
        q = functional.log_softmax(student(ids[:, :-1]).logits.float(), -1)
        total = functional.kl_div(q, p, log_target=True, reduction="sum")
        return total / (q.shape[0] * q.shape[1])

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
    """Cross-entropy of heads that share the output matrix of a frozen target."""
    import torch
    from torch.nn import functional

    model = _load(target, dtype, compiled)
    model.requires_grad_(False)
    size, device = model.config.hidden_size, next(model.parameters()).device
    blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(num_heads)).to(device)
    for leaf in blocks.parameters():
        torch.nn.init.zeros_(leaf)

    def loss(ids: torch.Tensor) -> torch.Tensor:
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
    """A transformers model; the classes of the families share no useful type."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    families: Any = transformers.AutoModelForCausalLM
    model = families.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    if compiled:
        model.forward = torch.compile(model.forward)
    return model


def _loop(
    loss: Callable[[torch.Tensor], torch.Tensor],
    leaves: list[torch.nn.Parameter],
    precision: str,
    rate: float,
    decay: float,
) -> Run:
    """Steps of AdamW on `leaves`, from their state now."""
    import torch

    device = leaves[0].device
    optimizer = torch.optim.AdamW(leaves, rate, betas=(0.9, 0.95), weight_decay=decay)

    def run(tokens: np.ndarray, steps: int) -> np.ndarray:
        ids, losses = torch.from_numpy(tokens).long().to(device), []
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                value = loss(ids)
            value.backward()
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        return torch.stack(losses).cpu().numpy()

    return run
