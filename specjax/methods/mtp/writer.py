"""Writes MTP layers under the names of Qwen or of DeepSeek, in a folder that holds only the layer.

Its `config.json` is that of the target, so the tensors can also be added to the target's own files.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

from specjax.methods.mtp.network import MtpConfig
from specjax.methods.mtp.rows import network_rows, network_shapes
from specjax.methods.mtp.several import MtpLayersSource
from specjax.methods.mtp.source import MtpSource
from specjax.methods.published import Export, Layout, PublishedDrafter
from specjax.models import (
    FAMILIES,
    MTP,
    LanguageModel,
    TransformerConfig,
    mtp_layers,
    splits_layers,
)


def _faults(drafter: PublishedDrafter, target: LanguageModel, layout: str) -> list[str]:
    """Lists the properties of a drafter that a layout cannot hold."""
    own, names = _network(drafter), MTP[layout]
    config: TransformerConfig = target.model.module.config
    splits = splits_layers(config)
    faults = {
        "has its feed-forward part in a block of its own": splits and not names.mlp_block,
        "has attention and a feed-forward part in one block": bool(names.mlp_block and not splits),
        "has several layers": _count(drafter) > 1 and "{" not in names.project,
        "reads the hidden state before the embedding": own.hidden_first != names.hidden_first,
        "has no norm before the head": own.has_norm != (names.norm is not None),
    }
    found = [words for words, true in faults.items() if true]
    if mtp_layers(config, names.is_dense) != own.layers:
        found.append("has another decoder layer than the last one of the target")
    return found


def _export(drafter: PublishedDrafter, target: LanguageModel, layout: str) -> Export:
    own, names, count = _network(drafter), MTP[layout], _count(drafter)
    config: TransformerConfig = target.model.module.config
    family = FAMILIES[config.family]
    rows = [
        row if row.name.startswith("mtp.") else dataclasses.replace(row, name=f"model.{row.name}")
        for row in network_rows(own, family, names, config.num_layers, count=count)
    ]
    fields = {"architectures": [family.architecture], **family.write_config(config)}
    if names.mlp_block is not None:
        fields["mtp_hybrid_override_pattern"] = "*E" if own.layers.is_sparse(0) else "*-"
    shapes = network_shapes(own, count)
    return Export({**fields, names.field: count}, rows, shapes, drafter.params, {})


def _network(drafter: PublishedDrafter) -> MtpConfig:
    return cast(MtpSource | MtpLayersSource, drafter.source).network


def _count(drafter: PublishedDrafter) -> int:
    """Returns the number of layers."""
    source = drafter.source
    return source.num_layers if isinstance(source, MtpLayersSource) else 1


MTP_LAYOUTS = {
    layout: Layout(
        functools.partial(_faults, layout=layout), functools.partial(_export, layout=layout)
    )
    for layout in MTP
}
"""The publishers' layouts, by name."""
