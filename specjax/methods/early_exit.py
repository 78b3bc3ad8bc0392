"""`EarlyExitSource`: drafts with the first layers of the target and the target's own head."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import settle, within
from specjax.caches import KVCache
from specjax.contract import Context, Loaded, Lookahead, Model, Source
from specjax.methods.draft_model import read_staged
from specjax.models import LinenModel, TransformerConfig
from specjax.proposers import Chain
from specjax.types import Block, Proposal, Weights


@dataclasses.dataclass(frozen=True)
class EarlyExitSource(Source[Weights, KVCache | tuple[()], KVCache]):
    """The target without its last layers, in the target's own cache.

    Its parameters are the target's: the layers, the final norm and the head.  It stages its drafts
    after the committed tokens of the target's KV cache, and the next pass of the target overwrites
    them.  So it reads no prompt, and it never has to catch up with committed tokens.

    Any target works, but one that was trained with losses at its inner layers drafts better.

    Reference: Elhoushi et al. 2024 (LayerSkip), arXiv 2404.16710, section 4.3: self-speculative
    decoding.
    """

    target: Model
    exit_layer: int
    shares_cache = True

    def __post_init__(self) -> None:
        config = self.target.module.config if isinstance(self.target, LinenModel) else None
        if not isinstance(config, TransformerConfig):
            kind = type(
                self.target.module if isinstance(self.target, LinenModel) else self.target
            ).__name__
            raise ValueError(
                f"an early exit needs a target over specjax.Transformer, and not over {kind}"
            )
        settle(
            (
                any(config.has_state(i) for i in range(config.num_layers)),
                "an early exit shares the target's cache of keys and values, and this target has "
                "layers with a recurrent state: use another proposer",
            )
        )
        most = config.num_layers
        note = f", since the target has {most} layers"
        within("exit_layer", self.exit_layer, 1, most - 1, note)
        self.declare(vocab_size=self.target.vocab_size)

    @property
    def model(self) -> LinenModel:
        """The target without its last layers."""
        assert isinstance(self.target, LinenModel)  # checked by __post_init__
        config = self.target.module.config.truncated(self.exit_layer)
        return dataclasses.replace(self.target, module=self.target.module.clone(config=config))

    @property
    def _num_leaves(self) -> int:
        """The keys and values in the cache that the first layers have for themselves."""
        assert isinstance(self.target, LinenModel)
        return len(self.target.module.config.truncated(self.exit_layer).owners)

    def bind(self, target: Loaded, draft: Loaded | None) -> Weights:
        if self.target != target.model:
            raise ValueError(
                f"the early exit was made for another target than {target.name}; "
                "pass target.model to it"
            )
        return cast(Weights, target.params)

    def init(
        self, params: Weights, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> tuple[()]:
        return ()

    def begin(
        self, params: Weights, state: KVCache | tuple[()], context: Context
    ) -> tuple[KVCache, KVCache, Array]:
        assert isinstance(state, KVCache)  # the target's
        layers = slice(self._num_leaves)
        first = dataclasses.replace(state, keys=state.keys[layers], values=state.values[layers])
        return state, *self.extend(params, first, context.pending)

    def extend(self, params: Weights, reading: KVCache, tokens: Array) -> tuple[KVCache, Array]:
        at = jnp.zeros_like(tokens)[:, None]
        cache, logits = read_staged(self.model, params, reading, tokens[:, None], at)
        return cache.commit(jnp.ones_like(reading.length)), logits[:, 0]

    def read_tree(
        self, params: Weights, reading: KVCache, tokens: Array, at: Array, depth: Array, mask: Array
    ) -> tuple[KVCache, Array]:
        return read_staged(self.model, params, reading, tokens, at, depth, mask)

    def end(
        self, params: Weights, state: KVCache | tuple[()], reading: KVCache, proposal: Proposal
    ) -> KVCache:
        assert isinstance(state, KVCache)  # the target's
        # Take the buffers of the first layers from the reading.  Take everything else from the
        # target's cache, including its length.
        keys, values = (
            first + every[self._num_leaves :]
            for first, every in ((reading.keys, state.keys), (reading.values, state.values))
        )
        return dataclasses.replace(state, keys=keys, values=values)

    def observe(
        self, params: Weights, state: KVCache | tuple[()], block: Block
    ) -> KVCache | tuple[()]:
        return state


def EarlyExit(
    target: Model, exit_layer: int, num_drafts: int = 4, confidence_threshold: float = 0.0
) -> Chain:
    """Drafts with the target's first layers: `Chain(EarlyExitSource(target, exit_layer), ...)`.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> specjax.EarlyExit(target.model, exit_layer=1, num_drafts=4).max_depth
      4
    """
    return Chain(EarlyExitSource(target, exit_layer), num_drafts, confidence_threshold)
