"""The configuration of the transformer: its sizes, and the switches in which families differ."""

from __future__ import annotations

import dataclasses

from specjax.models.rope import Rope

NORM_ORDERS = ("pre", "post", "sandwich", "after", "parallel")
"""Where a layer normalises around its two branches f (attention, then MLP):

pre       x + f(norm(x))
post      x + norm(f(x))
sandwich  x + norm(f(norm(x)))
after     norm(x + f(x))
parallel  x + attention(norm(x)) + mlp(norm(x)), each with a norm of its own
"""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Hashable, so that it can be a static argument of `jax.jit`.

    A setting that differs between layers is a tuple with one entry for each layer; an empty tuple
    means that all layers are alike.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    # Positions
    rope: Rope | None = dataclasses.field(default_factory=Rope)
    ropes: tuple[Rope | None, ...] = ()  # by layer, instead of `rope`
    # Learned positions: token t adds row offset + t of a table; None: no table.
    position_offset: int | None = None
    # Embedding and head
    embedding_size: int | None = None  # None: `hidden_size`; else embeddings are projected
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    logit_softcap: float | None = None  # c tanh(x / c)
    # Norms
    norm: str = "rms"  # or "layer"
    norm_offset: float = 0.0  # the factor is offset + weight
    norm_eps: float = 1e-5
    norm_order: str = "pre"
    final_norm: bool = True
    # Attention
    qkv_bias: bool = False
    out_bias: bool = False
    # RMS norm of queries and keys: over each "head", or over the "whole" projection.
    qk_norm: str | None = None
    query_scale: float | None = None  # by default head_dim ** -0.5
    attention_softcap: float | None = None
    windows: tuple[int | None, ...] = ()  # by layer: tokens that a token attends to, with itself
    # MLP
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    # Mixture of experts
    num_experts: int = 0
    experts_per_token: int = 2
    expert_size: int = 0
    normalise_experts: bool = True  # the chosen experts' weights sum to 1
    sparse: tuple[bool, ...] = ()  # by layer: whether it has experts
    init_scale: float = 0.02
    family: str = "llama"  # a row of models.FAMILIES

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}: grouped-query attention shares each key head "
                "among the same number of query heads"
            )
        for rope in {self.rope_of(i) for i in range(self.num_layers)}:
            if rope is not None and int(self.head_dim * rope.fraction) % 2:
                raise ValueError(
                    f"head_dim={self.head_dim} gives an odd number of rotated dimensions; rotary "
                    "embeddings rotate pairs"
                )
        for name in ("ropes", "windows", "sparse"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers"
                )
        if self.norm_order not in NORM_ORDERS:
            raise ValueError(
                f"norm_order={self.norm_order!r}; pass one of {', '.join(NORM_ORDERS)}"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}; it must lie in "
                f"[1, {self.num_experts}]"
            )

    def truncated(self, num_layers: int) -> TransformerConfig:
        """The configuration of the first `num_layers` layers alone."""
        own = {name: getattr(self, name)[:num_layers] for name in ("ropes", "windows", "sparse")}
        return dataclasses.replace(self, num_layers=num_layers, **own)

    def rope_of(self, layer: int) -> Rope | None:
        return self.ropes[layer] if self.ropes else self.rope

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        return self.num_experts > 0 and (not self.sparse or self.sparse[layer])
