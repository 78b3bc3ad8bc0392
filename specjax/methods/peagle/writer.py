"""Writes P-EAGLE heads.

specforge     layers `layers.{i}.*`     SpecForge, with the fields of EAGLE-3's "official"
speculators   layers `layers.{i}.*`     speculators, vLLM
"""

from __future__ import annotations

from specjax.methods.eagle3 import (
    faults,
    flat_config,
    flat_faults,
    mask_row,
    source_of,
    speculators_faults,
    speculators_fields,
    stacked,
)
from specjax.methods.peagle.source import PEagleSource
from specjax.methods.published import Export, Layout, PublishedDrafter
from specjax.models import LanguageModel


def _own_source(drafter: PublishedDrafter) -> PEagleSource:
    assert isinstance(drafter.source, PEagleSource)  # `Format.makes`
    return drafter.source


def _specforge_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    c = source_of(drafter).network
    found = {
        "norms each feature (fc_norm)": c.fc_norm,
        "has a scaled rope": c.layers.rope is not None and c.layers.rope.kind != "default",
    }
    return faults(drafter, {**flat_faults(c), **found})


def _specforge(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    source, config = _own_source(drafter), flat_config(drafter, "PEagleDraftModel")
    config |= {"norm_before_residual": source.network.norm_before_residual}
    # SpecForge has both numbers among the options of a training run.
    config |= {"mask_token_id": source.mask_token, "ttt_length": source.depth}
    return stacked(drafter, target, config, (mask_row(source.network),))


def _speculators(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    source = _own_source(drafter)
    fields = {"architectures": ["PEagleDraftModel"], "mask_token_id": source.mask_token}
    config = speculators_fields(drafter, target, "peagle", source.depth, fields)
    return stacked(drafter, target, config, (mask_row(source.network),))


PEAGLE_LAYOUTS = {
    "speculators": Layout(speculators_faults, _speculators),
    "specforge": Layout(_specforge_faults, _specforge),
}
