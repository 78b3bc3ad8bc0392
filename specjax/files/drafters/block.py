"""Reads a block draft (DFlash and its kind), whatever corrects it."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from specjax.drafters import PublishedDrafter, sizes_of
from specjax.files.drafters.block_config import Fields, read_config, read_taps
from specjax.files.drafters.format import Description, Tensors
from specjax.files.drafters.layers import dense_rows, layer_rows
from specjax.files.drafters.placing import read_placed
from specjax.files.drafters.tables import EMBEDDING, HEAD, TABLES, repeats
from specjax.files.drafters.vocabulary import check_rows, read_vocabulary
from specjax.models import (
    BlockDraft,
    BlockDraftConfig,
    Config,
    Correction,
    LanguageModel,
    Tensor,
    initial_block,
)
from specjax.parallel import Rules
from specjax.proposers import BlockDraftSource, ChoiceTree

_RENAMED = {"logit_head.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Beginnings of names in older and other exports."""

_METHODS = ("dflash", "dspark", "domino")


@dataclasses.dataclass(frozen=True)
class Method:
    """What block drafts of one method have in common."""

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
    rows: list[Tensor]
    shapes: dict[tuple[str, ...], tuple[int, ...]]  # of each parameter
    stored: Tensors  # those that are read
    shares: tuple[str, ...]  # of the target's "embedding" and "head"
    to_draft: np.ndarray | None  # [V], of a reduced vocabulary


def renamed(tensors: Tensors) -> Tensors:
    """The tensors by the names that the tables have."""
    made = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        made[name] = tensor
    return made


def is_block_draft(names: set[str]) -> bool:
    """Have these tensors the layers of a block draft?"""
    plain = {name.removeprefix("encoder.") for name in names}
    has_norm = "hidden_norm.weight" in names or "encoder.output_norm_enc.weight" in names
    return "fc.weight" in plain and has_norm and "layers.0.hidden_norm.weight" not in names


def labels_of(config: Config) -> set[str]:
    """The methods that a configuration names."""
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
    """The drafter in a folder; the arguments are those of `Format.read`, and the method.

    Raises:
      ValueError: with everything that does not fit the configuration or the target.
    """
    plan = plan_block_draft(folder, config, tensors, target, method)
    said = labels_of(config)
    if said and method.name not in said:
        warnings.warn(
            f"{folder}: config.json says {' and '.join(sorted(said))}, and the tensors show "
            f"{method.name}: the tensors count",
            stacklevel=5,
        )
    parts = plan.rows, plan.shapes, plan.stored, plan.to_draft
    params = read_placed(folder, plan.source, *parts, target, rules)
    return PublishedDrafter(
        proposer=ChoiceTree(plan.source),
        params=params,
        name=folder.name,
        source=plan.source,
        shares=plan.shares,
        sizes=sizes_of(target, folder.name),
        rules=rules,
    )


def plan_block_draft(
    folder: pathlib.Path,
    config: Config,
    tensors: Tensors,
    target: LanguageModel,
    method: Method,
) -> Plan:
    """What `read_block_draft` will read.  Only tables that may be the target's are read.

    Raises:
      ValueError: as `read_block_draft`, but for tensors that are missing or of another shape.
    """
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{folder} holds mask_embedding.pt, which replaces a row of the embedding and is "
            "pickled: write its row into embed_tokens.weight of the safetensors file"
        )
    hidden_size, vocab_size, num_layers = sizes_of(target, folder.name)
    stored = renamed(tensors)
    known = read_vocabulary(folder, stored, vocab_size)
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
    names, fields = set(stored), Fields(config)
    try:
        taps = read_taps(fields, num_layers)
        assert taps is not None
        first = method.first_slot(config)
        block = read_config(folder, fields, stored, len(taps), first, hidden_size)
        corrects = method.correction(fields, names, block, vocab_size, units)
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    if max(taps) > num_layers:
        raise ValueError(
            f"{folder / 'config.json'}: the draft reads the outputs of the layers {list(taps)}, "
            f"and {target.name} has {num_layers}: pass the target that it was trained for"
        )
    net = BlockDraft(block)
    shapes = shapes_of(net, corrects)
    rows = block_rows(block) + ([] if corrects is None else method.rows(corrects))
    shares = _share(stored, target, known is not None)
    size = block.layers.hidden_size
    if shares and size != hidden_size:
        raise ValueError(
            f"{folder} has hidden size {size} and no {' or '.join(shares)} of its own, and "
            f"{target.name} has hidden size {hidden_size}: pass the target that it was trained for"
        )
    embedded = vocab_size
    if "embedding" not in shares:
        embedded = stored[EMBEDDING.name].shape[0]
        check_rows(folder, EMBEDDING.name, embedded, target, vocab_size)
        shapes["embedding",] = embedded, size
        rows.append(EMBEDDING)
    if "head" not in shares:
        shapes["head", "kernel"] = size, units
        rows.append(HEAD)
    if block.mask_token >= embedded:
        raise ValueError(
            f"{folder}: mask_token_id is {block.mask_token}, and the embedding has {embedded} "
            "rows: pass the target that the drafter was trained for"
        )
    for part in shares:
        stored.pop(TABLES[part].name, None)
    source = BlockDraftSource(net, vocab_size, taps, corrects)
    return Plan(source, rows, shapes, stored, shares, known)


def describe_block_draft(
    config: Config, tensors: Tensors, target: LanguageModel | None, name: str, method: Method
) -> Description:
    """What the folder of a block draft says about itself."""
    fields, names = Fields(config), set(renamed(tensors))
    from_anchor = fields.flag("sample_from_anchor", method.first_slot(config) == 0)
    size = fields.count("block_size", 8 if fields.is_speculators else 16)
    nested = "SpecForge or z-lab" if fields.nested else "DeepSpec"
    return Description(
        method=name,
        packaging="speculators" if fields.is_speculators else nested,
        taps=read_taps(fields, None if target is None else sizes_of(target, name)[2]),
        num_drafts=size if from_anchor else size - 1,
        shares=tuple(part for part, row in TABLES.items() if row.name not in names),
        details=(f"one pass fills a block of {size} slots",),
    )


def shapes_of(
    net: BlockDraft, correction: Correction | None
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shape of each parameter of the layers and of the correction."""
    made = jax.eval_shape(lambda key: initial_block(net, key), jax.random.key(0))
    leaves = cast(dict[tuple[str, ...], jax.ShapeDtypeStruct], flatten_dict(made))
    shapes = {("draft", *path): leaf.shape for path, leaf in leaves.items()}
    if correction is not None:
        shapes |= {("correction", *path): shape for path, shape in correction.shapes().items()}
    return shapes


def block_rows(block: BlockDraftConfig) -> list[Tensor]:
    """The tensors of the layers."""
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
    """The tables of the target that the draft uses: those that its folder lacks or repeats."""
    return tuple(
        part
        for part, row in TABLES.items()
        if row.name not in stored
        or (not (is_reduced and part == "head") and repeats(stored[row.name], part, target))
    )
