"""Reads the MTP layers in a target's own folder, or in a folder that holds only these layers.

The names around the decoder layer are those of `specjax.models.MTP`, and its own tensors have the
names of the target's family.  A copy of the target's embedding or head in the file is not read.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any, NamedTuple, cast

from specjax.contract import Proposer, Source
from specjax.files import CONFIG, listed, named, read_config
from specjax.methods.drafter import Drafter
from specjax.methods.mtp.network import MtpConfig
from specjax.methods.mtp.rows import network_rows, network_shapes
from specjax.methods.mtp.several import MtpLayersSource
from specjax.methods.mtp.source import MtpSource
from specjax.methods.mtp.writer import MTP_LAYOUTS
from specjax.methods.published import (
    Description,
    Format,
    PublishedDrafter,
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
"""The depth of the drafts by default, or the number of the layers if that is more."""

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
    depths: int  # the number of MTP layers

    def source(self, vocab_size: int, taps: tuple[int, ...]) -> MtpSource | MtpLayersSource:
        """Returns the source of these layers."""
        if self.depths == 1:
            return MtpSource(self.network, vocab_size, taps)
        return MtpLayersSource(self.network, vocab_size, taps, self.depths)


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
    names = MTP[layout]
    with named(folder / CONFIG):
        layers = mtp_layers(config, names.is_dense)
    module = None if target is None else target.model.module
    forms = {} if module is None else {"attend": module.attend, "dot_general": module.dot_general}
    network = MtpConfig(
        layers, hidden_first=names.hidden_first, has_norm=names.norm is not None, **forms
    )
    return _Parts(network, FAMILIES[config.family], layout, names, config.num_layers, count)


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
    names, layers, every = parts.names, parts.layers, range(parts.depths)
    rows = network_rows(parts.network, parts.family, names, layers, tensors, parts.depths)
    others = tuple(part.format(layer=layers + k, k=k) for part in names.others for k in every)
    blocks = tuple(names.name("block", layers, k) for k in every)
    around = {row.name for row in rows if not row.name.startswith(blocks)}
    stems = ("mtp.",) if names.project.startswith("mtp.") else blocks
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if (name.startswith((*stems, *blocks)) or name in around)
        and not name.startswith(others or ("\0",))
        and not name.endswith((*parts.family.ignored, "rotary_emb.inv_freq"))
    }
    return Table(rows, network_shapes(parts.network, parts.depths), stored, None)


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    del config
    parts = _parts(folder, tensors, target)
    last = target.model.num_taps - 1
    source = parts.source(target.model.vocab_size, (last,))
    table = _table(parts, tensors)
    shares = ("embedding", "head")
    proposer = _chain(source, max(NUM_DRAFTS, parts.depths))
    return read_drafter(folder, proposer, source, table, target, rules, shares)


def _chain(source: MtpSource | MtpLayersSource, depth: int) -> Proposer:
    return Chain(cast(Source[Any, Any, Any], source), depth)


def with_switches(
    drafter: PublishedDrafter,
    feeds_normed: bool,
    zeroes_first: bool,
    head_tokens: int | None = None,
) -> PublishedDrafter:
    """Returns a drafter of chains over MTP layers with these switches of it and its network."""
    source = drafter.source
    assert isinstance(source, MtpSource | MtpLayersSource)
    network = dataclasses.replace(
        source.network, feeds_normed=feeds_normed, zeroes_first=zeroes_first
    )
    changed = dataclasses.replace(source, network=network, head_tokens=head_tokens)
    proposer = _chain(changed, drafter.proposer.max_depth)
    switched = {
        "feeds_normed=False": not feeds_normed,
        "zeroes_first=True": zeroes_first,
        f"head_tokens={head_tokens}": head_tokens is not None,
    }
    name = " ".join([drafter.name, *(words for words, is_on in switched.items() if is_on)])
    return dataclasses.replace(drafter, proposer=proposer, source=changed, name=name)


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    del config
    folder = folder_of(tensors)
    parts = _parts(folder, tensors, target)
    table = _table(parts, tensors)
    table.check(folder)
    layers = parts.network.layers
    kind = f"{layers.num_experts} experts" if layers.is_sparse(0) else "an MLP"
    many = "one decoder layer" if parts.depths == 1 else f"{parts.depths} decoder layers"
    return Description(
        method="multi-token prediction",
        packaging=parts.layout,
        taps=(),  # its last hidden state
        num_drafts=max(NUM_DRAFTS, parts.depths),
        shares=("embedding", "head"),
        details=(f"{many} with {kind}, hidden size {layers.hidden_size}",),
        tensors=tuple(table.stored),
    )


MTP_FORMAT = Format(_matches, _read, _describe, is_over(MtpSource, MtpLayersSource), MTP_LAYOUTS)
