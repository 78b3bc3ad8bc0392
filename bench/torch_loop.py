"""A compiled PyTorch loop, as a careful user would write it for one pair of Llama models.

Its KV caches have a fixed size and stay in place.  One compiled step drafts, verifies and accepts
greedily; each row accepts its own number of tokens.  It reads the weights of transformers' models.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.contestants import Contestant, Imposition
from bench.weights import Pair, TorchModel


class Llama(nn.Module):
    """transformers' Llama with its weights, in as few operations as decoding needs."""

    cache: Tensor

    def __init__(self, model: TorchModel, rows: int, slots: int) -> None:
        super().__init__()
        c = model.config
        self.body, self.head, self.eps = model.model, model.lm_head, c.rms_norm_eps
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        shape = (
            c.num_hidden_layers,
            2,
            rows,
            self.kv_heads,
            slots,
            self.body.layers[0].self_attn.head_dim,
        )
        self.register_buffer(
            "cache", torch.zeros(shape, dtype=model.dtype, device=model.device), persistent=False
        )

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Read `tokens` [B, N] from positions `start` [B] on into the cache; logits [B, N, V]."""
        position = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        seen = torch.arange(self.cache.shape[4], device=tokens.device) <= position[..., None]
        x = self.body.embed_tokens(tokens)
        angles = position[..., None].float() * self.body.rotary_emb.inv_freq
        cos, sin = (
            f(torch.cat([angles, angles], -1)).to(x.dtype)[:, :, None]
            for f in (torch.cos, torch.sin)
        )
        for layer, memory in zip(self.body.layers, self.cache, strict=True):
            x = x + self._attend(
                layer.self_attn,
                self._norm(layer.input_layernorm, x),
                memory,
                position,
                seen,
                cos,
                sin,
            )
            y, mlp = self._norm(layer.post_attention_layernorm, x), layer.mlp
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        return self.head(self._norm(self.body.norm, x))

    def _attend(
        self,
        layer: TorchModel,
        x: Tensor,
        memory: Tensor,
        position: Tensor,
        seen: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        batch, width, _ = x.shape

        def rotate(y: Tensor) -> Tensor:
            left, right = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-right, left], -1) * sin

        query = rotate(layer.q_proj(x).view(batch, width, self.heads, -1))
        keys = rotate(layer.k_proj(x).view(batch, width, self.kv_heads, -1))
        values = layer.v_proj(x).view(batch, width, self.kv_heads, -1)
        row = torch.arange(batch, device=x.device)[:, None]
        memory[0][row, :, position], memory[1][row, :, position] = keys, values
        # Group the query heads by key head, so that no key is copied: [B, K, N x heads / K, D].
        query = (
            query.view(batch, width, self.kv_heads, -1, query.shape[-1])
            .transpose(1, 2)
            .flatten(2, 3)
        )
        scores = (query @ memory[0].transpose(2, 3)).float() / query.shape[-1] ** 0.5
        mask = seen.repeat_interleave(self.heads // self.kv_heads, dim=1)[:, None]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(x.dtype)
        mixed = (weights @ memory[1]).view(batch, self.kv_heads, width, -1, memory.shape[-1])
        return layer.o_proj(mixed.transpose(1, 2).reshape(batch, width, -1))

    def _norm(self, norm: TorchModel, x: Tensor) -> Tensor:
        y = x.float()
        return norm.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class Loop(nn.Module):
    """The text of one batch, and the compiled step that continues it."""

    text: Tensor
    length: Tensor
    drafts: Tensor
    imposed: Tensor
    right: Tensor

    def __init__(
        self,
        target: TorchModel,
        draft: TorchModel,
        num_drafts: int,
        rows: int,
        limit: int,
        script: Imposition | None,
    ) -> None:
        super().__init__()
        slots, device = limit + num_drafts + 1, target.device
        self.num_drafts, self.limit, self.vocab = num_drafts, limit, target.config.vocab_size
        self.target = Llama(target, rows, slots)
        self.draft = Llama(draft, rows, slots) if num_drafts else None
        self.scripted = script is not None
        imposed, right = script or (np.zeros((rows, 1)), np.zeros((rows, 1)))
        numbers = {
            "text": np.zeros((rows, slots)),
            "length": np.zeros(rows),
            "drafts": np.zeros((rows, num_drafts)),
        }
        for name, value in {**numbers, "imposed": imposed}.items():
            self.register_buffer(name, torch.from_numpy(value).long().to(device), persistent=False)
        self.register_buffer("right", torch.from_numpy(right).bool().to(device), persistent=False)
        mode = "reduce-overhead" if device.type == "cuda" else None
        self.step = torch.compile(self._step, mode=mode, fullgraph=True)

    def generate(self, prompts: Tensor) -> Tensor:
        """[B, limit]: the prompts [B, P], at least two tokens each, and their continuations."""
        text, length = self.text, self.length
        text.zero_()[:, : prompts.shape[1]] = prompts
        length.fill_(prompts.shape[1])
        for model in filter(None, (self.target, self.draft)):
            model(prompts[:, :-1], torch.zeros_like(length))
        # A step commits at most num_drafts + 1 tokens, so the first steps need no check.
        for _ in range(-(-(self.limit - prompts.shape[1]) // (self.num_drafts + 1))):
            self.step()
        while bool((length < self.limit).any()):
            self.step()
        return text[:, : self.limit]

    def _step(self) -> None:
        text, length = self.text, self.length
        pending = text.gather(1, length[:, None] - 1)
        nodes = torch.cat([pending, self._draft(text, length)], dim=1)
        best = self.target(nodes, length - 1).argmax(-1)
        accepted = (nodes[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1)
        # Tokens behind the new length are scratch.
        text.scatter_(1, length[:, None] + torch.arange(nodes.shape[1], device=nodes.device), best)
        length.copy_(torch.minimum(length + accepted + 1, torch.full_like(length, self.limit)))

    def _draft(self, text: Tensor, length: Tensor) -> Tensor:
        """[B, num_drafts]; the first pass reads two tokens.

        If all drafts were accepted, the draft model has not read the last one yet.
        """
        if self.draft is None:
            return self.drafts
        tokens, start = (
            text.gather(1, length[:, None] + torch.tensor([-2, -1], device=text.device)),
            length - 2,
        )
        for node in range(self.num_drafts):
            token = self.draft(tokens, start)[:, -1].argmax(-1)
            self.drafts[:, node] = token
            tokens, start = token[:, None], length + node
        if not self.scripted:
            return self.drafts
        position = length[:, None] + torch.arange(self.num_drafts, device=text.device)
        imposed = self.imposed.gather(1, position)
        return torch.where(self.right.gather(1, position), imposed, (imposed + 1) % self.vocab)


def loop(pair: Pair, num_drafts: int = 0, script: Imposition | None = None) -> Contestant:
    """Plain decoding if `num_drafts` is 0, else a chain of `num_drafts` from the draft."""
    made: dict[tuple[int, int], Loop] = {}

    def run(prompts: np.ndarray, new: int) -> np.ndarray:
        target, draft = pair.peer("target"), pair.peer("draft") if num_drafts else None
        rows, length = prompts.shape
        with torch.inference_mode():
            key = rows, length + new
            if key not in made:
                made[key] = Loop(target, draft, num_drafts, *key, script)
            ids = torch.from_numpy(prompts).long().to(target.device)
            return made[key].generate(ids)[:, length:].cpu().numpy()

    return Contestant("draft" if num_drafts else "plain", "torch loop", num_drafts, run)
