"""Published drafters with random weights, for the cases that decode on several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.contract import BlockSource
from specjax.methods import (
    BlockDraft,
    BlockDraftConfig,
    BlockDraftSource,
    CandidateSelector,
    Correction,
    Eagle3Config,
    Eagle3Source,
    MarkovHead,
    PEagleSource,
    PrefixGRU,
    PublishedDrafter,
    PublishedSource,
    eagle3_shapes,
    initial_block,
    sizes_of,
)
from specjax.proposers import BestFirst, Chain, ChoiceTree, DynamicTree

TAPS, BLOCK, RANK = (1, 2), 4, 16


def drafters(target: specjax.LanguageModel, kv_heads: int) -> dict[str, PublishedDrafter]:
    """One of each kind, which shares the target's tables or has tables of its own."""
    config = target.model.module.config
    layers = dataclasses.replace(config, num_layers=1, num_kv_heads=kv_heads, windows=())
    size, vocab = layers.hidden_size, layers.vocab_size
    network = Eagle3Config(layers, len(TAPS), size)
    net = BlockDraft(BlockDraftConfig(layers, len(TAPS) * size, BLOCK, 0, first_slot=0))
    eagle, parallel = Eagle3Source(network, vocab, TAPS), PEagleSource(network, vocab, 0, 3, TAPS)

    def block(correction: Correction | None) -> BlockDraftSource:
        return BlockDraftSource(net, vocab, TAPS, correction)

    markov = MarkovHead(size, vocab, vocab, RANK, "gated", "both")
    made = {
        "eagle3 chain": Chain(eagle, 3),
        "eagle3 tree": DynamicTree(eagle, 2, 2, 5),
        "p-eagle": ChoiceTree(parallel),
        "dflash tree": BestFirst(block(None), 7),
        "dspark": ChoiceTree(block(markov)),
        "domino": ChoiceTree(block(PrefixGRU(size, vocab, vocab, 24, RANK))),
        "dflash-2 tree": BestFirst(block(CandidateSelector(size, vocab, vocab, RANK, 6)), 7),
    }
    return {
        name: PublishedDrafter(
            proposer=proposer,
            params=_weights(proposer.source, name),
            name=name,
            source=proposer.source,
            shares=() if name in OWN else ("embedding", "head"),
            sizes=sizes_of(target, name),
        )
        for name, proposer in made.items()
    }


OWN = ("eagle3 chain", "p-eagle")
"""With an embedding and a head of their own; that of the chain has half of the tokens."""


def _weights(source: PublishedSource, name: str) -> Any:
    layers = (source.net.config if isinstance(source, BlockDraftSource) else source.network).layers
    size, vocab = layers.hidden_size, layers.vocab_size
    if isinstance(source, BlockDraftSource):
        own = {"draft": jax.jit(lambda key: initial_block(source.net, key))(jax.random.key(1))}
        if source.correction is not None:
            own["correction"] = _random(source.correction.shapes())
        return own
    shapes = eagle3_shapes(source.network)
    leaves, structure = jax.tree.flatten(shapes)
    own = {"network": jax.tree.unflatten(structure, [_normal(x.shape, 0.2, n)
                                                     for n, x in enumerate(leaves)])}  # fmt: skip
    if name in OWN:
        kept = vocab // 2 if name == "eagle3 chain" else vocab
        own["embedding"] = _normal((vocab, size), 0.35)
        own["head"] = {"kernel": _normal((size, kept), 0.2)}
    if name == "eagle3 chain":
        table = np.full(vocab, -1, np.int32)
        table[::2] = np.arange(vocab // 2)
        own["to_draft"] = jnp.asarray(table)
    if isinstance(source, BlockSource):
        own["mask_hidden"] = _normal((len(TAPS) * size,), 0.5)
    return own


def _random(shapes: Any) -> Any:
    made: dict[str, Any] = {}
    for number, ((first, *rest), shape) in enumerate(shapes.items()):
        array = _normal(shape, 0.3, number)
        if rest:
            made.setdefault(first, {})[rest[0]] = array
        else:
            made[first] = array
    return made


def _normal(shape: tuple[int, ...], scale: float, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)
