"""Reads a block draft (DFlash, DSpark or Domino), whatever corrects it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
from flax.traverse_util import flatten_dict

from specjax._internal.checks import within
from specjax.files import CONFIG, named
from specjax.methods.block.config import (
    Fields,
    read_config,
    read_layer_config,
    read_taps,
    taps_as_trained,
)
from specjax.methods.block.correction import Correction
from specjax.methods.block.network import BlockDraft, BlockDraftConfig, initial_block
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.published import (
    EMBEDDING,
    HEAD,
    TABLES,
    Description,
    PublishedDrafter,
    Table,
    Tensors,
    check_features,
    check_rows,
    check_taps,
    check_target,
    check_width,
    dense_rows,
    folder_of,
    layer_prefixes,
    layer_rows,
    read_drafter,
    read_vocabulary,
    reads_pairs,
    repeats,
    sizes_of,
    window_lines,
)
from specjax.models import Config, LanguageModel, Tensor
from specjax.parallel import Rules
from specjax.proposers import ChoiceTree

_RENAMED = {"logit_head.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Prefixes of tensor names in older and other exports, and their replacements."""

_METHODS = ("dflash", "dspark", "domino")


@dataclasses.dataclass(frozen=True)
class Method:
    """The fields that the block drafts of one method have in common."""

    name: str  # as labels in configurations have it, in lower case
    # The slot that predicts the token after the anchor, unless the configuration says.
    first_slot: Callable[[Config], int]
    # From the fields, the names of the tensors, the sizes of the layers, V and U.
    correction: Callable[[Fields, set[str], BlockDraftConfig, int, int], Correction | None]
    # The tensors of a correction; their paths are those of `Correction.shapes`.
    rows: Callable[[Correction], list[Tensor]]


class Plan(NamedTuple):
    """A block draft, read from its configuration and headers."""

    source: BlockDraftSource
    table: Table
    shares: tuple[str, ...]  # of the target's "embedding" and "head"


def renamed(tensors: Tensors) -> Tensors:
    """Returns the tensors by the names that the tables have."""
    made = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        made[name] = tensor
    return made


def is_block_draft(tensors: Tensors) -> bool:
    """Returns whether these tensors are the layers of a block draft, of which one may be missing.

    A whole language model has layers as well, but neither `fc` nor `hidden_norm`.
    """
    plain = renamed(tensors)
    fuses = "fc.weight" in plain or "hidden_norm.weight" in plain
    return fuses and bool(layer_prefixes(plain)) and not reads_pairs(plain)


def labels_of(config: Config) -> set[str]:
    """Returns the methods that a configuration names."""
    fields = Fields(config)
    labels = [
        *(config.get("architectures") or []),
        fields.get("speculators_model_type"),
        fields.get("projector_type"),
    ]
    return {name for name in _METHODS if any(name in str(label).lower() for label in labels)}


def read_block_draft(
    folder: pathlib.Path,
    config: Config,
    tensors: Tensors,
    target: LanguageModel,
    rules: Rules,
    method: Method,
) -> PublishedDrafter:
    """Reads the drafter in a folder; the arguments are those of `Format.read`, and the method.

    Raises:
      ValueError: with every mismatch with the configuration or the target.
    """
    plan = plan_block_draft(folder, config, tensors, target, method)
    said = labels_of(config)
    if said and method.name not in said:
        warnings.warn(
            f"{folder}: config.json says {' and '.join(sorted(said))}, and the tensors show "
            f"{method.name}: the tensors count",
            stacklevel=5,
        )
    proposer = ChoiceTree(plan.source)
    return read_drafter(folder, proposer, plan.source, plan.table, target, rules, plan.shares)


def plan_block_draft(
    folder: pathlib.Path,
    config: Config,
    tensors: Tensors,
    target: LanguageModel,
    method: Method,
) -> Plan:
    """Plans `read_block_draft`.  Only tables that may be the target's are read.

    Raises:
      ValueError: as `read_block_draft`, but for tensors that are missing or of another shape.
    """
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{folder} holds mask_embedding.pt, which replaces a row of the embedding and is "
            "pickled: write its row into embed_tokens.weight of the safetensors file"
        )
    hidden_size, vocab_size, num_layers = sizes_of(target, folder.name)
    stored, fields = renamed(tensors), Fields(config)
    known = read_vocabulary(folder, stored, target)
    # The rows of the draft's head: its vocabulary may be reduced, or padded to another size.
    units = stored["lm_head.weight"].shape[0] if "lm_head.weight" in stored else vocab_size
    if known is None:
        check_rows(folder, "lm_head.weight", units, target, vocab_size)
    elif "lm_head.weight" not in stored or units != stored["d2t"].shape[0]:
        raise ValueError(
            f"{folder}: d2t maps a reduced vocabulary of {stored['d2t'].shape[0]} tokens, and "
            "lm_head.weight is missing or of another size: download the folder again"
        )
    stored = {name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    names = set(stored)
    with named(folder / CONFIG):
        taps = read_taps(fields, num_layers)
        assert taps is not None
        check_taps(taps, num_layers, target.name)
        first = method.first_slot(config)
        block = read_config(folder, fields, stored, len(taps), first, hidden_size)
    # speculators leaves out the vocabulary that transformers' class has by default.
    sizes = {"vocab_size": block.layers.vocab_size} if fields.is_speculators else config
    check_target(folder, {**config, **fields.nested}, sizes, target)
    with named(folder / CONFIG):
        corrects = method.correction(fields, names, block, vocab_size, units)
    if (trained := taps_as_trained(fields, taps, num_layers)) != taps:
        warnings.warn(
            f"{folder} reads the last layer of {target.name} (target_layer_ids {num_layers - 1}). "
            "It is read after the final norm, as z-lab's package reads it; if the drafter was "
            f"trained on the output before the norm, write aux_hidden_state_layer_ids={list(taps)} "
            "instead",
            stacklevel=6,
        )
    taps = trained
    module = None if target is None else target.model.module
    forms = {} if module is None else {"attend": module.attend, "dot_general": module.dot_general}
    net = BlockDraft(block, **forms)
    shapes = shapes_of(net, corrects)
    rows = block_rows(block) + ([] if corrects is None else method.rows(corrects))
    shares = _share(stored, target, known is not None)
    size = block.layers.hidden_size
    check_features(folder, stored, size, len(taps), hidden_size)
    check_width(folder, shares, size, target)
    embedded = vocab_size
    if "embedding" not in shares:
        embedded = stored[EMBEDDING.name].shape[0]
        check_rows(folder, EMBEDDING.name, embedded, target, vocab_size)
        shapes["embedding",] = embedded, size
        rows.append(EMBEDDING)
    if "head" not in shares:
        shapes["head", "kernel"] = size, units
        rows.append(HEAD)
    with named(folder / CONFIG):
        rest = ", the rows of the embedding: pass the target that the drafter was trained for"
        within("mask_token_id", block.mask_token, 0, embedded - 1, rest)
    for part in shares:
        stored.pop(TABLES[part].name, None)
    source = BlockDraftSource(net, vocab_size, taps, corrects)
    return Plan(source, Table(rows, shapes, stored, known), shares)


def describe_block_draft(
    config: Config, tensors: Tensors, target: LanguageModel | None, name: str, method: Method
) -> Description:
    """Describes the folder of a block draft, from its configuration and headers."""
    fields, names, folder = Fields(config), renamed(tensors), folder_of(tensors)
    from_anchor = fields.flag("sample_from_anchor", method.first_slot(config) == 0)
    size = fields.count("block_size", 8 if fields.is_speculators else 16)
    nested = "SpecForge or z-lab" if fields.nested else "DeepSpec"
    if target is None:
        depth, taps = fields.get("num_target_layers"), read_taps(fields, None)
        if taps is not None and isinstance(depth, int):
            taps = taps_as_trained(fields, taps, depth)
        layers = read_layer_config(folder, fields, names)
        lines = window_lines(layers, fields.is_speculators)
    else:
        plan = plan_block_draft(folder, config, tensors, target, method)
        plan.table.check(folder)
        block, taps = plan.source.net.config, plan.source.taps
        lines = window_lines(block.layers, block.anchored_windows)
    return Description(
        method=name,
        packaging="speculators" if fields.is_speculators else nested,
        taps=taps,
        num_drafts=size if from_anchor else size - 1,
        shares=tuple(part for part, row in TABLES.items() if row.name not in names),
        details=(f"one pass fills a block of {size} slots", *lines),
    )


def shapes_of(
    net: BlockDraft, correction: Correction | None
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of each parameter of the layers and of the correction."""
    shapes = dict(_traced(net.config))
    if correction is not None:
        shapes |= {("correction", *path): shape for path, shape in correction.shapes().items()}
    return shapes


@functools.lru_cache(maxsize=8)
def _traced(c: BlockDraftConfig) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """Traces the shapes of the layers, which takes a fraction of a second."""
    made = jax.eval_shape(lambda key: initial_block(BlockDraft(c), key), jax.random.key(0))
    leaves = cast(dict[tuple[str, ...], jax.ShapeDtypeStruct], flatten_dict(made))
    return tuple((("draft", *path), leaf.shape) for path, leaf in leaves.items())


def block_rows(block: BlockDraftConfig) -> list[Tensor]:
    """Returns the tensors of the layers."""
    rows = [
        *dense_rows("fc", ("draft", "fc")),
        Tensor("hidden_norm.weight", ("draft", "hidden_norm", "weight")),
        Tensor("norm.weight", ("draft", "norm", "weight")),
    ]
    for i in range(block.layers.num_layers):
        theirs, ours = f"layers.{i}.", ("draft", f"layer_{i}")
        rows += layer_rows(block.layers, theirs, ours)
        rows.append(Tensor(f"{theirs}input_layernorm.weight", (*ours, "attention_norm", "weight")))
        for part in ("attention_conv", "mlp_conv") if block.conv_size else ():
            rows.append(Tensor(f"{theirs}{part}.base_kernel", (*ours, part, "base")))
            rows += dense_rows(f"{theirs}{part}.kernel_projection", (*ours, part, "projection"))
    return rows


def _share(stored: Tensors, target: LanguageModel, is_reduced: bool) -> tuple[str, ...]:
    """Returns the target's tables that the draft uses: those that its folder lacks or repeats."""
    return tuple(
        part
        for part, row in TABLES.items()
        if row.name not in stored
        or (not (is_reduced and part == "head") and repeats(stored[row.name], part, target))
    )
