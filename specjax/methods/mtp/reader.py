"""Reads the MTP layer in a target's own folder, or in a folder that holds only that layer.

The names around the decoder layer are those of `specjax.models.MTP`, and its own tensors have the
names of the target's family.  A copy of the target's embedding or head in the file is not read.
"""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from specjax.files import CONFIG, listed, named, read_config
from specjax.methods.drafter import Drafter
from specjax.methods.mtp.network import MtpConfig
from specjax.methods.mtp.rows import network_rows, network_shapes
from specjax.methods.mtp.source import MtpSource
from specjax.methods.mtp.writer import MTP_LAYOUTS
from specjax.methods.published import (
    Description,
    Format,
    Table,
    Tensors,
    folder_of,
    is_over,
    read_drafter,
    sizes_of,
)
from specjax.models import (
    FAMILIES,
    MTP,
    Config,
    Family,
    LanguageModel,
    MtpNames,
    TransformerConfig,
    mtp_layers,
    mtp_layout,
)
from specjax.parallel import Rules
from specjax.proposers import Chain

NUM_DRAFTS = 3
"""The depth of the drafts by default."""

_NAMES = [
    re.compile(
        re.escape(getattr(own, part)).replace(r"\{k\}", r"\d+").replace(r"\{layer\}", r"\d+")
    )
    for own in MTP.values()
    for part in ("project", "embedding_norm", "hidden_norm")
]


class _Parts(NamedTuple):
    """The components of a folder, read only from its configuration and headers."""

    network: MtpConfig
    family: Family
    layout: str
    names: MtpNames
    layers: int  # of the target


def _matches(config: Config, tensors: Tensors) -> bool:
    del config
    return any(known.fullmatch(name) for name in tensors for known in _NAMES)


def _parts(folder: pathlib.Path, tensors: Tensors, target: LanguageModel | None) -> _Parts:
    """Reads the components.

    Raises:
      ValueError: the folder is that of another target, or its layers are not supported.
    """
    _, _, config = read_config(folder)
    if target is not None:
        _check_target(folder, config, target)
    found = mtp_layout(tensors, config.num_layers)
    if found is None:
        first = MTP["deepseek"].name("project", config.num_layers, 0)
        raise ValueError(
            f"the MTP layer in {folder} is not the one after the {config.num_layers} layers of its "
            f"config.json, whose matrix would be {first}: download the folder again"
        )
    layout, count = found
    if count > 1:
        raise ValueError(
            f"{folder} has {count} MTP layers, one for each depth; specjax reads folders with one, "
            "which drafts every depth: pass a drafter of another kind"
        )
    names = MTP[layout]
    with named(folder / CONFIG):
        layers = mtp_layers(config, names.is_dense)
    module = None if target is None else target.model.module
    forms = {} if module is None else {"attend": module.attend, "dot_general": module.dot_general}
    network = MtpConfig(
        layers, hidden_first=names.hidden_first, has_norm=names.norm is not None, **forms
    )
    return _Parts(network, FAMILIES[config.family], layout, names, config.num_layers)


def _check_target(folder: pathlib.Path, config: TransformerConfig, target: LanguageModel) -> None:
    """Raises ValueError unless the folder is that of a target of the same sizes."""
    theirs = sizes_of(target, folder.name)
    ours = config.hidden_size, config.vocab_size, config.num_layers
    if ours != theirs:
        names = ("hidden size", "vocabulary", "number of layers")
        faults = [
            f"the {name} is {one}, and that of {target.name} {other}"
            for name, one, other in zip(names, ours, theirs, strict=True)
            if one != other
        ]
        raise ValueError(
            f"{folder} has the MTP layer of another target than {target.name}:\n  "
            f"{listed(faults)}\npass the target that it belongs to; a whole model is loaded with "
            "specjax.load, and passed as draft="
        )


def _table(parts: _Parts, tensors: Tensors) -> Table:
    """Locates the parameters in the folder."""
    names, layers = parts.names, parts.layers
    rows = network_rows(parts.network, parts.family, names, layers, tensors)
    others = tuple(part.format(layer=layers, k=0) for part in names.others)
    block = names.name("block", layers, 0)
    around = {row.name for row in rows if not row.name.startswith(block)}
    stem = "mtp." if names.project.startswith("mtp.") else block
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if (name.startswith((stem, block)) or name in around)
        and not name.startswith(others or ("\0",))
        and not name.endswith((*parts.family.ignored, "rotary_emb.inv_freq"))
    }
    return Table(rows, network_shapes(parts.network), stored, None)


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    del config
    parts = _parts(folder, tensors, target)
    last = target.model.num_taps - 1
    source = MtpSource(parts.network, target.model.vocab_size, (last,))
    table = _table(parts, tensors)
    shares = ("embedding", "head")
    return read_drafter(folder, Chain(source, NUM_DRAFTS), source, table, target, rules, shares)


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    del config
    folder = folder_of(tensors)
    parts = _parts(folder, tensors, target)
    table = _table(parts, tensors)
    table.check(folder)
    layers = parts.network.layers
    kind = f"{layers.num_experts} experts" if layers.is_sparse(0) else "an MLP"
    return Description(
        method="multi-token prediction",
        packaging=parts.layout,
        taps=(),  # its last hidden state
        num_drafts=NUM_DRAFTS,
        shares=("embedding", "head"),
        details=(f"one decoder layer with {kind}, hidden size {layers.hidden_size}",),
        tensors=tuple(table.stored),
    )


MTP_FORMAT = Format(_matches, _read, _describe, is_over(MtpSource), MTP_LAYOUTS)
