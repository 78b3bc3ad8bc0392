"""The drafters that are compiled, with the shapes of their parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import specjax
from bench.compiled.sizes import Shapes
from specjax.contract import BlockSource, Proposer
from specjax.methods import (
    BlockDraft,
    BlockDraftConfig,
    BlockDraftSource,
    Correction,
    Eagle3Config,
    Eagle3Source,
    MarkovHead,
    MtpConfig,
    MtpSource,
    SharedParams,
    eagle3_shapes,
    initial_block,
    mtp_shapes,
)
from specjax.models import LinenModel, Transformer, TransformerConfig, mtp_layers
from specjax.proposers import BestFirst, Chain, ChoiceTree, StaticTree
from specjax.types import Arrays

_DRAFTED = 4
_EAGLE_VOCABULARY = 32000
_BLOCK_LAYERS, _TAPS = 5, 5
_RANK = 256


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A drafter without its numbers."""

    proposer: Proposer
    params: Arrays = None  # shapes
    draft: LinenModel | None = None  # the draft model, which can be split over chips


Maker = Callable[[Shapes, Shapes], Sketch]
"""From the shapes of a target and of a draft model."""


def _draft_model(target: Shapes, draft: Shapes) -> Sketch:
    proposer = specjax.DraftModel(draft.model, target.model.vocab_size, _DRAFTED)
    return Sketch(proposer, draft.params, draft.model)


def _draft_of(tokens: int) -> Maker:
    """The draft model with a part of its vocabulary."""

    def make(target: Shapes, draft: Shapes) -> Sketch:
        made: list[specjax.LanguageModel] = []

        def trimmed(params: Arrays) -> Arrays:
            whole = specjax.LanguageModel(draft.model, params)
            made.append(specjax.trim_vocabulary(whole, tokens))
            return made[0].params

        params = jax.eval_shape(trimmed, draft.params)
        return _draft_model(target, Shapes(draft.config, made[0].model, params))

    return make


def _tree(target: Shapes, draft: Shapes) -> Sketch:
    proposer = specjax.DraftTree(draft.model, target.model.vocab_size, (3, 2, 1))
    return Sketch(proposer, draft.params, draft.model)


def _tree_of_8(target: Shapes, draft: Shapes) -> Sketch:
    """Eight nodes with the root, three drafts deep."""
    proposer = specjax.DraftTree(draft.model, target.model.vocab_size, (1, 2, 2))
    return Sketch(proposer, draft.params, draft.model)


def _eagle3(target: Shapes, draft: Shapes) -> Sketch:
    """One layer of the target's shape, and a head of its own for 32 000 words."""
    config, size = _layers(target, 1, _EAGLE_VOCABULARY), target.model.vocab_size
    source = Eagle3Source(Eagle3Config(config, 3, config.hidden_size), size, _taps(target, 3))
    own = {"network": _like(eagle3_shapes(source.network), target)}
    own["head"] = {"kernel": _shape((config.hidden_size, _EAGLE_VOCABULARY), target)}
    own["to_draft"] = jax.ShapeDtypeStruct((size,), jnp.int32)
    return Sketch(Chain(source, _DRAFTED), _sharing(own, target, "embedding"))


def _block(target: Shapes, block_size: int, first_slot: int, correction: bool) -> Sketch:
    """Five layers of the target's shape that fill a block; the target's embedding and head."""
    c, size = _layers(target, _BLOCK_LAYERS, target.model.vocab_size), target.model.vocab_size
    config = BlockDraftConfig(c, _TAPS * c.hidden_size, block_size, 0, first_slot=first_slot)
    net = BlockDraft(config)
    own = {"draft": _like(jax.eval_shape(lambda: initial_block(net, jax.random.key(0))), target)}
    markov: Correction | None = None
    if correction:
        markov = MarkovHead(c.hidden_size, size, size, _RANK)
        own["correction"] = {}
        for (name,), shape in markov.shapes().items():
            own["correction"][name] = _shape(shape, target)
    source: BlockSource = BlockDraftSource(net, size, _taps(target, _TAPS), markov)
    return Sketch(ChoiceTree(source), _sharing(own, target, "embedding", "head"))


def _dflash(target: Shapes, draft: Shapes) -> Sketch:
    return _block(target, 16, 1, False)


def _dflash_tree(target: Shapes, draft: Shapes) -> Sketch:
    chain = _dflash(target, draft)
    assert isinstance(chain.proposer, ChoiceTree)
    return dataclasses.replace(chain, proposer=BestFirst(chain.proposer.source, 32))


def _dspark(target: Shapes, draft: Shapes) -> Sketch:
    return _block(target, 7, 0, True)


def _mtp(shape: Callable[[MtpSource], Proposer], head_tokens: int | None = None) -> Maker:
    """One layer like the target's last with attention; the target's embedding and head."""

    def make(target: Shapes, draft: Shapes) -> Sketch:
        module = target.model.module
        assert isinstance(module, Transformer)
        network = MtpConfig(mtp_layers(target.config), attend=module.attend)
        last = target.config.num_layers + 1
        source = MtpSource(network, target.model.vocab_size, (last,), head_tokens)
        own = {"network": _like(mtp_shapes(network), target)}
        return Sketch(shape(source), _sharing(own, target, "embedding", "head"))

    return make


def _self(selected: int) -> Maker:
    """The target with the last 512 tokens, and with so many chunks that its queries choose."""

    def make(target: Shapes, draft: Shapes) -> Sketch:
        proposer = specjax.NearSelf(target.model, 512, num_drafts=_DRAFTED, selected=selected)
        return Sketch(proposer, target.params)

    return make


DRAFTERS: dict[str, Maker] = {
    "none": lambda target, draft: Sketch(specjax.NoProposer()),
    "ngram": lambda target, draft: Sketch(specjax.NGram(_DRAFTED)),
    "draft": _draft_model,
    "draft-of-16k": _draft_of(2**14),
    "draft-of-32k": _draft_of(2**15),
    "tree": _tree,
    "tree-of-8": _tree_of_8,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "dflash-tree": _dflash_tree,
    "dspark": _dspark,
    **{f"mtp-{n}": _mtp(functools.partial(Chain, num_drafts=n)) for n in (1, 2, 3)},
    "self": _self(0),
    "self-of-16-chunks": _self(16),
    "mtp-1-of-64k": _mtp(functools.partial(Chain, num_drafts=1), 2**16),
    "mtp-tree-of-4": _mtp(functools.partial(StaticTree, branching=(2, 1))),
    "mtp-tree-of-8": _mtp(functools.partial(StaticTree, branching=(2, 1, 1, 1))),
}


def _sharing(own: Arrays, target: Shapes, *names: str) -> SharedParams:
    shared = {name: target.params[name] for name in names if name in target.params}
    return SharedParams(own, shared)


def _taps(target: Shapes, number: int) -> tuple[int, ...]:
    """Layers at equal distances, without the last one, whose output the target returns anyway."""
    return tuple(1 + at * (target.config.num_layers - 1) // number for at in range(number))


def _layers(target: Shapes, num_layers: int, vocab_size: int) -> TransformerConfig:
    config = target.config
    return dataclasses.replace(config, num_layers=num_layers, vocab_size=vocab_size)


def _like(shapes: Arrays, target: Shapes) -> Arrays:
    return jax.tree.map(lambda leaf: _shape(leaf.shape, target), shapes)


def _shape(shape: tuple[int, ...], target: Shapes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, target.model.dtype)
