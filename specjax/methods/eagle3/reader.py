"""Reads EAGLE-3 heads in the layouts of the authors, SpecForge, ModelOpt, speculators and DeepSpec.

The layouts differ in the names of the layers and in where the configuration has its fields.  The
components of a head are taken from its tensors:

    midlayer.* or layers.0.*      q, k and v read 2 E numbers: an embedding and a feature
    layers.1.* and further        ordinary decoder layers
    fc, norm                      from n layers of the target to E; before the head's matrix.
                                  Heads that read the target's last state have no fc
    input_norm or fc_norm.{k}     norms before fc
    embed_tokens, lm_head         missing: those of the target are used
    d2t, t2d                      a reduced vocabulary

tests/product/test_eagle3_published.py compares the numbers with those of speculators and SpecForge.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from typing import NamedTuple

from specjax._internal.fields import FLAG, Kind, check, one_of
from specjax.contract import Proposer, Source
from specjax.files import CONFIG, named
from specjax.methods.drafter import Drafter
from specjax.methods.eagle3.network import Eagle3Config
from specjax.methods.eagle3.rows import network_rows, network_shapes
from specjax.methods.eagle3.source import Eagle3Source
from specjax.methods.eagle3.taps import (
    default_taps,
    is_model_opt,
    read_taps,
    reads_last_state,
)
from specjax.methods.eagle3.writer import EAGLE3_LAYOUTS
from specjax.methods.published import (
    EMBEDDING,
    HEAD,
    TABLES,
    Description,
    Format,
    Table,
    Tensors,
    check_features,
    check_rows,
    check_taps,
    check_target,
    check_width,
    folder_of,
    is_over,
    layer_prefixes,
    read_drafter,
    read_layers,
    read_vocabulary,
    reads_pairs,
    repeats,
    sizes_of,
    window_lines,
)
from specjax.models import Config, LanguageModel, Tensor, TransformerConfig
from specjax.parallel import Rules, devices_of
from specjax.proposers import Chain, DynamicTree

_MAPS = ("d2t", "t2d")
_UNREAD = ("rotary_emb.inv_freq",)
_DEPTH, _WIDTH, _NODES = 8, 10, 60
"""The authors' tree: the root's children, 7 expansions of the 10 best nodes, 60 nodes in all."""

_FEW = 3
"""The drafts of a chain on a CPU, where a pass over 60 nodes takes longer than it saves."""

_PLAIN = "the authors' or SpecForge's"

_EXPECTED: dict[str, Kind] = {
    f"eagle_config.{name}": one_of((supported,))
    for name, supported in {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }.items()
}
"""Switches of ModelOpt, each with the only value that specjax supports."""
_EXPECTED["eagle_config.use_aux_hidden_state"] = FLAG

_SWITCHES: dict[str, Kind] = dict.fromkeys(
    ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"), FLAG
)
"""Fields that are true or false."""


class Parts(NamedTuple):
    """The components of a head, read only from its configuration and headers."""

    network: Eagle3Config
    prefixes: list[str]  # of the names of each layer
    taps: tuple[int, ...] | None  # None: they depend on the target
    shares: tuple[str, ...]


def read_parts(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel | None
) -> Parts:
    """Reads the components of a folder.  Without a target its sizes are not checked.

    Raises:
      ValueError: settings that are not supported, or that do not fit the tensors or the target.
    """
    _refuse_switches(folder, config)
    prefixes = layer_prefixes(tensors)
    inner = config.get("transformer_layer_config", config)
    reads_fields = (
        "speculators_model_type" in config and inner.get("model_type", "llama") == "llama"
    )
    like = "fields" if reads_fields else None
    layers = read_layers(folder, inner, tensors, prefixes, like)
    # Its head is never its embedding, whatever the configuration says.
    layers = dataclasses.replace(layers, tied_embeddings=False)
    of_last = reads_last_state(config)
    taps = None if of_last else read_taps(folder, config)
    if target is not None:
        hidden, _, depth = sizes_of(target, folder.name)
        check_target(folder, config, _layers_of(config, layers), target)
        if of_last:
            taps = (depth + 1,)
        else:
            taps = default_taps(folder, depth) if taps is None else taps
            with named(folder / CONFIG):
                check_taps(taps, depth, target.name)
    else:
        hidden = config.get("target_hidden_size") or layers.hidden_size
    count = 1 if of_last else 3 if taps is None else len(taps)
    if of_last and hidden != layers.hidden_size:
        raise ValueError(
            f"{folder}: hidden size {layers.hidden_size}, and a head with use_aux_hidden_state="
            f"false reads the last state of its target, whose hidden size is {hidden}: pass the "
            "target that the head was trained for"
        )
    check_features(folder, tensors, layers.hidden_size, count, hidden)
    shares = tuple(part for part, row in TABLES.items() if row.name not in tensors)
    if target is not None:
        check_width(folder, shares, layers.hidden_size, target)
    shown = {
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": any(name.startswith("fc_norm.") for name in tensors),
    }
    for name, seen in shown.items():
        # A norm of the configuration that has no tensor is refused by name when it is read.
        if seen and not bool(config.get(name)):
            warnings.warn(
                f"{folder}: config.json says {name}={config.get(name)}, and the tensors show "
                f"{seen}: the tensors count",
                stacklevel=5,
            )
    module = None if target is None else target.model.module
    forms = {} if module is None else {"attend": module.attend, "dot_general": module.dot_general}
    network = Eagle3Config(
        layers=layers,
        num_taps=count,
        target_size=hidden,
        fuses=not of_last,
        norm_before_residual=bool(config.get("norm_before_residual")),
        feeds_normed=_feeds_normed(folder, config),
        **{name: seen or bool(config.get(name)) for name, seen in shown.items()},
        **forms,
    )
    return Parts(network, prefixes, taps, shares)


def without_copies(
    folder: pathlib.Path, parts: Parts, tensors: Tensors, target: LanguageModel
) -> Parts:
    """Returns the components, sharing the tables of the target that the folder repeats."""
    reduced = read_vocabulary(folder, tensors, target) is not None
    shares = tuple(
        part
        for part, row in TABLES.items()
        if part in parts.shares
        or (not (reduced and part == "head") and repeats(tensors[row.name], part, target))
    )
    return parts._replace(shares=shares)


def own_table(
    folder: pathlib.Path,
    parts: Parts,
    tensors: Tensors,
    target: LanguageModel,
    extra: tuple[Tensor, ...] = (),
    shapes: dict[tuple[str, ...], tuple[int, ...]] | None = None,
) -> Table:
    """Locates the head's own parameters; `extra` rows and their `shapes` are read as well.

    Raises:
      ValueError: tensors of another target.
    """
    vocab_size, size = target.model.vocab_size, parts.network.layers.hidden_size
    known = read_vocabulary(folder, tensors, target)
    wanted = network_shapes(parts.network)
    rows = [*network_rows(parts.network, parts.prefixes), *extra]
    unread = [row.name for part, row in TABLES.items() if part in parts.shares]
    if "embedding" not in parts.shares:
        count = tensors["embed_tokens.weight"].shape[0]
        check_rows(folder, "embed_tokens.weight", count, target, vocab_size)
        rows.append(EMBEDDING)
        wanted["embedding",] = (count, size)
    if "head" not in parts.shares or known is not None:
        count = tensors["d2t" if known is not None else "lm_head.weight"].shape[0]
        if known is None:
            check_rows(folder, "lm_head.weight", count, target, vocab_size)
        rows.append(HEAD)
        wanted["head", "kernel"] = (size, count)
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in (*_MAPS, *unread) and not name.endswith(_UNREAD)
    }
    wanted |= shapes or {}
    return Table(rows, wanted, stored, known)


def proposal_depth(config: Config) -> int | None:
    """Returns the number of drafts that a configuration asks for, or None."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    for number in (methods[0].get("speculative_tokens"), config.get("ttt_length")):
        if type(number) is int and number >= 1:
            return number
    return None


def packaging_of(config: Config) -> str:
    """Names the project whose layout a configuration has."""
    if "speculators_model_type" in config:
        return "speculators"
    if is_model_opt(config):
        return "NVIDIA ModelOpt"
    if "target_layer_ids" in config:
        return "DeepSpec"
    return _PLAIN


def details_of(config: Config, parts: Parts, tensors: Tensors) -> tuple[str, ...]:
    """Returns further lines of a description."""
    c, network = parts.network.layers, parts.network
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "feeds_normed")
    used = [name for name in switches if vars(network)[name]] + ["q/k norm"] * bool(c.qk_norm)
    lines = [
        f"{c.num_layers} decoder layer{'s' * (c.num_layers > 1)}, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads of {c.head_dim}, {c.num_kv_heads} key heads"
    ]
    lines += window_lines(c)
    lines += [f"switches: {', '.join(used)}"] if used else []
    if "d2t" in tensors:
        lines.append(f"proposes {tensors['d2t'].shape[0]} of the target's tokens")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    trained = verifier.get("name_or_path") or config.get("target_model_name_or_path")
    return (*lines, f"trained for {trained}") if trained else tuple(lines)


def is_parallel(config: Config, tensors: Tensors) -> bool:
    """Returns whether these are the tensors of P-EAGLE, of which one may be missing."""
    labels = [*(config.get("architectures") or []), config.get("speculators_model_type")]
    return "mask_hidden" in tensors or any("peagle" in str(label).lower() for label in labels)


def _matches(config: Config, tensors: Tensors) -> bool:
    return reads_pairs(tensors) and not is_parallel(config, tensors)


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    parts = without_copies(folder, read_parts(folder, config, tensors, target), tensors, target)
    assert parts.taps is not None  # the target is known
    source = Eagle3Source(parts.network, target.model.vocab_size, parts.taps)
    table = own_table(folder, parts, tensors, target)
    proposer = _shape(config, source, target)
    return read_drafter(folder, proposer, source, table, target, rules, parts.shares)


def _shape(config: Config, source: Source, target: LanguageModel) -> Proposer:
    """Returns the configuration's shape, or the authors' tree if the target reads trees.

    On a CPU it is a short chain in the place of that tree.
    """
    asked = proposal_depth(config)
    if asked is None and all(device.platform == "cpu" for device in devices_of(target.params)):
        asked = _FEW
    if asked is not None or not target.model.reads_trees:
        return Chain(source, asked or _DEPTH)
    width = min(_WIDTH, source.vocab_size)
    most = 1 + width + (_DEPTH - 1) * width**2
    return DynamicTree(source, _DEPTH, width, min(_NODES, most))


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    folder = folder_of(tensors)
    parts = read_parts(folder, config, tensors, target)
    if target is not None:
        own_table(folder, parts, tensors, target).check(folder)
    newer = parts.network.fc_norm or parts.network.feeds_normed
    return Description(
        method="EAGLE-3.1" if newer else "EAGLE-3",
        packaging=packaging_of(config),
        taps=parts.taps,
        num_drafts=proposal_depth(config) or _DEPTH,
        shares=parts.shares,
        details=details_of(config, parts, tensors),
    )


def _refuse_switches(folder: pathlib.Path, config: Config) -> None:
    """Raises ValueError for switches of another kind, or that are not supported."""
    inner = config.get("eagle_config") or {}
    with named(folder / CONFIG):
        check(config, _SWITCHES)
        check({f"eagle_config.{name}": value for name, value in inner.items()}, _EXPECTED)


def _feeds_normed(folder: pathlib.Path, config: Config) -> bool:
    """Returns `norm_output`: whether the state of a draft is fed back after the final norm.

    It has this meaning in speculators, vLLM and SGLang, and in SpecForge since September 2026.
    Before, SpecForge's training read it as "apply the norm before the head's matrix", with the
    default true, and always fed the state back before the norm.
    """
    feeds = bool(config.get("norm_output"))
    forged = packaging_of(config) == _PLAIN
    if feeds and forged:
        warnings.warn(
            f"{folder}: norm_output=true is read as it is served: drafts are fed back after the "
            "final norm (EAGLE-3.1). Training by SpecForge up to version 0.2.0 meant the norm "
            "before the head by it; if this head was trained so, remove norm_output from "
            "config.json",
            stacklevel=6,
        )
    return feeds


def _layers_of(config: Config, layers: TransformerConfig) -> Config:
    """Returns the given sizes; speculators leaves out the defaults of transformers' class."""
    if "speculators_model_type" in config:
        return {"vocab_size": layers.vocab_size}
    return config


EAGLE3 = Format(_matches, _read, _describe, is_over(Eagle3Source), EAGLE3_LAYOUTS)
