"""Writes block drafts (DFlash, DSpark, Domino) in the layouts of four projects.

    z-lab         `dflash_config`                      dflash, SpecForge, vLLM, SGLang
    specforge     the same, with the heads' fields     SpecForge, vLLM, SGLang
    deepspec      all fields at the top level          DeepSpec, vLLM
    speculators   `transformer_layer_config`           speculators, vLLM

A method's own file names its layouts, and gives the fields of its correction.
"""

from __future__ import annotations

from collections.abc import Callable

from specjax.methods.block.config import write_taps
from specjax.methods.block.network import BlockDraft, BlockDraftConfig
from specjax.methods.block.reader import Method, block_rows, shapes_of
from specjax.methods.block.selector import CandidateSelector
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.drafter import Drafter
from specjax.methods.published import (
    Export,
    Layout,
    PublishedDrafter,
    is_reduced,
    num_units,
    on_hub,
    own_faults,
    speculators_config,
    table_faults,
    unwritable,
    with_tables,
    write_layers,
)
from specjax.models import Config, LanguageModel

OwnFields = Callable[[BlockDraftSource], Config]
"""A function that returns the fields of a method's correction."""

_OTHERS = "has causal layers that are not those with windows"
_SCALES = "scales its embeddings or logits"
_NUM_ANCHORS = 512  # a number of its training runs, which DeepSpec asks for when it loads


def makes(*corrections: type) -> Callable[[Drafter], bool]:
    """Returns `Format.makes` of block drafts with one of these corrections."""

    def check(drafter: Drafter) -> bool:
        source = drafter.source if isinstance(drafter, PublishedDrafter) else None
        return isinstance(source, BlockDraftSource) and isinstance(source.correction, corrections)

    return check


def nested_layout(
    method: Method, architecture: Callable[[BlockDraftSource], str], fields: OwnFields, plain: bool
) -> Layout:
    """Makes z-lab's or SpecForge's layout; `plain` ones lack windows, causal blocks and scales."""

    def own(source: BlockDraftSource) -> Config:
        c = source.net.config
        return {**fields(source), **_scales(c)}

    def faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
        source = _source(drafter)
        found = [*_faults(drafter, normed=True), *own_faults(drafter)]
        found += _slot_faults(source, method, own)
        if plain:
            return found + _plain_faults(source.net.config)
        c = source.net.config
        anchored = "has windows that stay with the block"
        return found + _true({_OTHERS: _is_causal(c) is None, anchored: c.anchored_windows})

    def export(drafter: PublishedDrafter, target: LanguageModel) -> Export:
        source = _source(drafter)
        config = {
            "architectures": [architecture(source)],
            **_layers(source),
            **(_is_causal(source.net.config) or {}),
            "block_size": source.net.config.block_size,
            "num_target_layers": drafter.sizes[2],
            "dflash_config": {
                "mask_token_id": source.net.config.mask_token,
                **write_taps("target_layer_ids", source.taps, drafter.sizes[2]),
                **own(source),
            },
        }
        return _export(drafter, target, method, config)

    return Layout(faults, export)


def flat_layout(method: Method, architecture: str, fields: OwnFields) -> Layout:
    """Makes DeepSpec's layout, with both tables."""

    def faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
        source = _source(drafter)
        reduced = _true({"has a reduced vocabulary": is_reduced(drafter)})
        slots = _slot_faults(source, method, fields)
        return [*_faults(drafter), *reduced, *slots, *_plain_faults(source.net.config)]

    def export(drafter: PublishedDrafter, target: LanguageModel) -> Export:
        source = _source(drafter)
        c = source.net.config
        config = {
            "architectures": [architecture],
            **_layers(source),
            "block_size": c.block_size,
            "mask_token_id": c.mask_token,
            **write_taps("target_layer_ids", source.taps, drafter.sizes[2]),
            "num_target_layers": drafter.sizes[2],
            "num_anchors": _NUM_ANCHORS,
            **fields(source),
        }
        return _export(drafter, target, method, config, repeats=("embedding", "head"))

    return Layout(faults, export)


def speculators_layout(
    method: Method, label: Callable[[BlockDraftSource], tuple[str, str]], fields: OwnFields
) -> Layout:
    """Makes speculators' layout, with both tables; `label` gives the kind and the architecture."""

    def faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
        c = _source(drafter).net.config
        found = {
            "has windows that move with the slot": bool(c.layers.windows) != c.anchored_windows,
            _OTHERS: any(c.causal) and _causal(c) != _sliding(c),
            _SCALES: bool(_scales(c)),
            "has a reduced vocabulary and convolutions": is_reduced(drafter) and c.conv_size > 0,
        }
        return [*_faults(drafter), *_true(found)]

    def export(drafter: PublishedDrafter, target: LanguageModel) -> Export:
        source = _source(drafter)
        c, (kind, architecture) = source.net.config, label(source)
        windows = {"sliding_window_non_causal": not any(c.causal)} if c.layers.windows else {}
        own = {
            "architectures": [architecture],
            "block_size": c.block_size,
            "mask_token_id": c.mask_token,
            **windows,
            **write_taps("aux_hidden_state_layer_ids", source.taps, drafter.sizes[2]),
            "draft_vocab_size": num_units(drafter),
            "sample_from_anchor": c.first_slot == 0,
            **fields(source),
        }
        # The package takes the embedding, and the head of a whole vocabulary, from a verifier.
        keeps = "embedding" in drafter.shares and ("head" in drafter.shares or is_reduced(drafter))
        verifier = on_hub(target) if keeps else None
        config = speculators_config(kind, target, c.num_drafts, _layers(source), own, verifier)
        return _export(drafter, target, method, config, repeats=("embedding", "head"))

    return Layout(faults, export)


def _source(drafter: PublishedDrafter) -> BlockDraftSource:
    assert isinstance(drafter.source, BlockDraftSource)  # `Format.makes`
    return drafter.source


def _true(found: dict[str, bool]) -> list[str]:
    """Returns the keys that are true."""
    return [words for words, true in found.items() if true]


def _faults(drafter: PublishedDrafter, normed: bool = False) -> list[str]:
    """Lists the properties of a drafter that no layout can hold, or that this one cannot.

    Args:
      drafter: to be written.
      normed: in the layout, the target's last layer means the state after the final norm.
    """
    source, (size, _, last) = _source(drafter), drafter.sizes
    c = source.net.config
    selects = isinstance(source.correction, CandidateSelector)
    found = {
        "has no norms of queries and keys": c.layers.qk_norm is None,
        f"has hidden size {c.layers.hidden_size} for a target of {size}": (
            c.layers.hidden_size != size
        ),
        "reads the target's last layer before the final norm": normed and last in source.taps,
        "reads the target's last state after the final norm": (
            not normed and last + 1 in source.taps
        ),
        "has convolutions or a candidate selector, not both": selects != (c.conv_size > 0),
    }
    return [*unwritable(c.layers), *table_faults(drafter), *_true(found)]


def _plain_faults(c: BlockDraftConfig) -> list[str]:
    found = {
        "has layers with windows": bool(c.layers.windows),
        "has causal layers": any(c.causal),
        _SCALES: bool(_scales(c)),
    }
    return _true(found)


def _slot_faults(source: BlockDraftSource, method: Method, fields: OwnFields) -> list[str]:
    """Lists a first slot that differs from the method's, for a layout without a field for it."""
    first = source.net.config.first_slot
    usual = method.first_slot({"dflash_config": fields(source)})
    return _true({f"drafts from slot {first} on instead of slot {usual}": first != usual})


def _layers(source: BlockDraftSource) -> Config:
    layers = source.net.config.layers
    kinds = {"layer_types": ["full_attention"] * layers.num_layers}
    return {**kinds, **write_layers(layers, source.vocab_size)}


def _scales(c: BlockDraftConfig) -> Config:
    """Returns the fields of factors that are not 1, and of a soft cap."""
    fields = {"input_embedding_scale": c.embedding_scale, "output_multiplier": c.output_scale}
    cap = {} if c.logit_softcap is None else {"final_logit_softcapping": c.logit_softcap}
    return {name: value for name, value in fields.items() if value != 1.0} | cap


def _sliding(c: BlockDraftConfig) -> tuple[bool, ...]:
    return tuple(c.layers.window_of(i) is not None for i in range(c.layers.num_layers))


def _causal(c: BlockDraftConfig) -> tuple[bool, ...]:
    return tuple(c.is_causal(i) for i in range(c.layers.num_layers))


def _is_causal(c: BlockDraftConfig) -> Config | None:
    """Returns z-lab's field; without it only layers with windows are causal.  None: none fits."""
    if _causal(c) == _sliding(c):
        return {}
    return {"is_causal": any(_causal(c))} if len(set(_causal(c))) == 1 else None


def _export(
    drafter: PublishedDrafter,
    target: LanguageModel,
    method: Method,
    config: Config,
    repeats: tuple[str, ...] = (),
) -> Export:
    source = _source(drafter)
    c, corrects = source.net.config, source.correction
    rows = block_rows(c) + ([] if corrects is None else method.rows(corrects))
    export = Export(config, rows, shapes_of(BlockDraft(c), corrects), drafter.params, {})
    return with_tables(export, drafter, target, c.layers.hidden_size, repeats=repeats)
