"""Small drafters of every kind and form that `save_drafter` writes, for the target of
`published_target.py`.  Their numbers depend on the names of the parameters alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import published
from flax.traverse_util import unflatten_dict
from published_target import target

from specjax import BlockDraftSource, Chain, ChoiceTree, Eagle3Source, PEagleSource
from specjax.methods import (
    BlockDraft,
    BlockDraftConfig,
    CandidateSelector,
    Eagle3Config,
    MarkovHead,
    PrefixGRU,
    PublishedDrafter,
    sizes_of,
)
from specjax.methods.block.reader import shapes_of
from specjax.methods.eagle3.rows import network_shapes
from specjax.models import TransformerConfig
from specjax.models.rope import Rope

SIZE, VOCAB, REDUCED = published.HIDDEN, published.VOCAB, 12
TOKENS = np.arange(REDUCED) * 2 + 3
"""Those of the target that a reduced vocabulary has."""

LLAMA = TransformerConfig(
    vocab_size=VOCAB,
    hidden_size=SIZE,
    mlp_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    rope=Rope(500.0),
)
QWEN3 = dataclasses.replace(LLAMA, qk_norm="head", family="qwen3", norm_eps=1e-6)
QWEN3_2 = dataclasses.replace(QWEN3, num_layers=2)
SLIDING = dataclasses.replace(QWEN3_2, windows=(6, None))

_HEAD = Eagle3Config(LLAMA, 3, SIZE)
_BLOCK = BlockDraftConfig(QWEN3_2, 2 * SIZE, 4, 27)
_FROM_ANCHOR = dataclasses.replace(_BLOCK, first_slot=0)
_CONVOLVED = dataclasses.replace(_BLOCK, conv_size=2, conv_group=4)


def _eagle3(layers: TransformerConfig = LLAMA, taps: tuple[int, ...] = (1, 2, 4), **switches: bool):
    network = dataclasses.replace(_HEAD, layers=layers, num_taps=len(taps), **switches)
    return Eagle3Source(network, VOCAB, taps)


def _peagle(taps: tuple[int, ...] = (1, 2, 4), depth: int = 3, **switches: bool) -> PEagleSource:
    layers = dataclasses.replace(LLAMA, num_layers=2)
    network = dataclasses.replace(_HEAD, layers=layers, num_taps=len(taps), **switches)
    return PEagleSource(network, VOCAB, 7, depth, taps)


def _block(config: BlockDraftConfig = _BLOCK, correction: Any = None) -> BlockDraftSource:
    return BlockDraftSource(BlockDraft(config), VOCAB, (1, 3), correction)


def _dspark(kind: str, confidence: str | None, units: int = VOCAB, first: int = 0):
    head = MarkovHead(SIZE, VOCAB, units, 6, kind, confidence)
    return _block(dataclasses.replace(_BLOCK, first_slot=first), head)


_SELECTOR = CandidateSelector(SIZE, VOCAB, VOCAB, 6, 5)
_GRU = PrefixGRU(SIZE, VOCAB, VOCAB, state_size=7, inner_size=6, uncorrected=1)

SOURCES: dict[str, tuple[Any, str]] = {
    "eagle3": (_eagle3(), "shared"),
    "eagle3, own": (_eagle3(), "own"),
    "eagle3, reduced": (_eagle3(), "reduced"),
    "eagle3, a norm each": (_eagle3(fc_norm=True), "reduced"),
    "eagle3.1": (_eagle3(fc_norm=True, feeds_normed=True), "reduced"),
    "eagle3, two layers": (
        _eagle3(QWEN3_2, (0, 1, 3, 4), norm_before_residual=True, norm_before_fc=True),
        "reduced",
    ),
    "eagle3.1, qwen3": (_eagle3(QWEN3, (2, 3), fc_norm=True, feeds_normed=True), "own"),
    "peagle": (_peagle(), "shared"),
    "peagle, own": (_peagle(depth=4, norm_before_residual=True), "own"),
    "peagle, reduced": (_peagle((2, 3, 4)), "reduced"),
    "peagle, two taps": (_peagle((0, 4), fc_norm=True), "reduced"),
    "dflash": (_block(), "shared"),
    "dflash, own": (_block(), "own"),
    "dflash, reduced": (_block(), "reduced"),
    "dflash, windows": (
        _block(dataclasses.replace(_BLOCK, layers=SLIDING, causal=(True, False))),
        "shared",
    ),
    "dflash, windows both ways": (_block(dataclasses.replace(_BLOCK, layers=SLIDING)), "shared"),
    "dflash, windows at the anchor": (
        _block(
            dataclasses.replace(_BLOCK, layers=SLIDING, causal=(True, False), anchored_windows=True)
        ),
        "shared",
    ),
    "dflash, scaled": (
        _block(
            dataclasses.replace(_BLOCK, embedding_scale=1.5, output_scale=0.7, logit_softcap=2.0)
        ),
        "shared",
    ),
    "dflash, from the anchor": (_block(_FROM_ANCHOR), "reduced"),
    "jetspec": (_block(dataclasses.replace(_BLOCK, causal=(True, True))), "shared"),
    "dflash2": (_block(_CONVOLVED, _SELECTOR), "shared"),
    "dspark": (_dspark("vanilla", "both"), "shared"),
    "dspark, gated": (_dspark("gated", "hidden"), "shared"),
    "dspark, rnn": (_dspark("rnn", None), "shared"),
    "dspark, own": (_dspark("rnn", "both"), "own"),
    "dspark, reduced": (_dspark("gated", "both", REDUCED), "reduced"),
    "dspark, from slot 1": (_dspark("vanilla", None, REDUCED, first=1), "reduced"),
    "domino": (_block(_FROM_ANCHOR, _GRU), "shared"),
    "domino, from slot 1": (_block(_BLOCK, _GRU), "shared"),
}
"""Name -> source, and whether its tables are the target's, its own, or its own and reduced."""


def make(name: str) -> PublishedDrafter:
    source, form = SOURCES[name]
    units = REDUCED if form == "reduced" else VOCAB
    if isinstance(source, BlockDraftSource):
        proposer, shapes = ChoiceTree(source), shapes_of(source.net, source.correction)
    else:
        shapes = network_shapes(source.network)
        proposer = ChoiceTree(source) if isinstance(source, PEagleSource) else Chain(source, 3)
        if isinstance(source, PEagleSource):
            shapes["mask_hidden",] = (len(source.taps) * SIZE,)
    if form == "own":
        shapes["embedding",] = (VOCAB, SIZE)
    if form != "shared":
        shapes["head", "kernel"] = (SIZE, units)
    params = unflatten_dict({path: jnp.asarray(_numbers(path, x)) for path, x in shapes.items()})
    if form == "reduced":
        table = np.full(VOCAB, -1, np.int32)
        table[TOKENS] = np.arange(REDUCED)
        params["to_draft"] = jnp.asarray(table)
    shares = {"shared": ("embedding", "head"), "own": (), "reduced": ("embedding",)}[form]
    return PublishedDrafter(
        proposer=proposer,
        params=params,
        name=name,
        source=source,
        shares=shares,
        sizes=sizes_of(target(), name),
    )


def _numbers(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 2^-10, so that no machine rounds them in another way."""
    scale = None if len(shape) == 1 or path == ("embedding",) else 2.5 / shape[0] ** 0.5
    name = ".".join(path)
    # The weights of norms are near 1.
    name += "norm.weight" if path[-1] == "weight" else "embed_tokens" if len(path) == 1 else ""
    return np.round(1024 * published.numbers(name, shape, scale)).astype(np.float32) / 1024
