"""Reads the assistants that Google publishes for Gemma 4 (`gemma4_assistant`).

Their layers have no keys and values: they read those of the target's last layer with a sliding
window, and of its last layer with full attention.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from specjax._internal.fields import FLAG, OBJECT, check, count, one_of
from specjax.files import CONFIG, listed, named
from specjax.methods.drafter import Drafter
from specjax.methods.gemma_assistant.network import OWNERS, AssistantConfig, assistant_shapes
from specjax.methods.gemma_assistant.source import AssistantSource
from specjax.methods.published import (
    Description,
    Format,
    Table,
    Tensors,
    dense_rows,
    folder_of,
    is_over,
    read_drafter,
    read_whole,
    sizes_of,
    without_weights,
)
from specjax.models import (
    FAMILIES,
    AttentionSizes,
    Config,
    LanguageModel,
    Tensor,
    TransformerConfig,
)
from specjax.parallel import Rules, mesh_of, replicate
from specjax.proposers import Chain

_KINDS = {
    "gemma4_assistant": ("gemma4_text", "gemma4_text"),
    "gemma4_unified_assistant": ("gemma4_unified_text", "gemma4_unified_text"),
}
"""model_type -> that of the text model in it by default, and of the target."""

_PROJECTIONS = ("pre_projection.weight", "post_projection.weight")
_ORDER = "masked_embedding.token_ordering"
_MOST = 2**20
NUM_DRAFTS = 4
"""The depth of the drafts by default."""


class _Parts(NamedTuple):
    """The components of a folder, read only from its configuration and headers."""

    network: AssistantConfig
    leaves: tuple[int, int]
    vocab_size: int


def _matches(config: Config, tensors: Tensors) -> bool:
    return config.get("model_type") in _KINDS or all(name in tensors for name in _PROJECTIONS)


def _own(folder: pathlib.Path, config: Config) -> tuple[TransformerConfig, Config]:
    """Reads the assistant's layers, as if they had keys of their own, and its other fields."""
    with named(folder / CONFIG):
        kind = one_of(_KINDS).of("model_type", config.get("model_type"))
        text = OBJECT.of("text_config", config.get("text_config"))
        text = {"model_type": _KINDS[kind][0], "hidden_size_per_layer_input": 0, **text}
        text["num_kv_shared_layers"] = 0
        inner = one_of((_KINDS[kind][0],)).of("text_config: model_type", text["model_type"])
        family = FAMILIES[inner]
        layers = family.read_config(text)
        check(config, {"use_ordered_embeddings": FLAG})
        fields = {
            "target_size": count(1, _MOST).read(config, "backbone_hidden_size", 1536),
            "num_clusters": None,
        }
        if config.get("use_ordered_embeddings"):
            clusters = count(1, layers.vocab_size).read(config, "num_centroids", 2048)
            best = count(1, clusters).read(config, "centroid_intermediate_top_k", 32)
            if layers.vocab_size % clusters:
                raise ValueError(
                    f"num_centroids is {clusters}, which does not divide the {layers.vocab_size} "
                    "tokens of text_config"
                )
            fields |= {"num_clusters": clusters, "clusters_read": best}
    return layers, fields


def _parts(folder: pathlib.Path, config: Config, target: LanguageModel) -> _Parts:
    """Reads the components.

    Raises:
      ValueError: the assistant is that of another target.
    """
    sizes_of(target, folder.name)  # refuses models that are not a Transformer
    own, fields = _own(folder, config)
    theirs: TransformerConfig = target.model.module.config
    owners = {
        kind: [i for i in theirs.owners if (theirs.window_of(i) is None) is (kind == "full")]
        for kind in ("sliding", "full")
    }
    faults = {
        f"the family is {theirs.family}": theirs.family != _KINDS[config["model_type"]][1],
        f"the hidden size is {theirs.hidden_size}, and backbone_hidden_size "
        f"{fields['target_size']}": theirs.hidden_size != fields["target_size"],
        f"the target has {theirs.vocab_size} tokens, and the assistant {own.vocab_size}": (
            theirs.vocab_size != own.vocab_size
        ),
        "it has no layer with a sliding window, or none without": not all(owners.values()),
    }
    last = {kind: found[-1] for kind, found in owners.items() if found}
    for layer in range(own.num_layers) if all(owners.values()) else ():
        window = own.window_of(layer)
        kind = "full" if window is None else "sliding"
        mine, its = own.slots_of(layer), theirs.slots_of(last[kind])
        faults |= {
            f"the keys of layer {layer} are {mine}, and those of the target {its} (heads, size)": (
                mine is None or its is None or mine[1] != its[1]
            ),
            f"the window of layer {layer} is {window}, and that of the target "
            f"{theirs.window_of(last[kind])}": window != theirs.window_of(last[kind]),
        }
    found = [words for words, true in faults.items() if true]
    if found:
        raise ValueError(
            f"{folder} is the assistant of another target than {target.name}:\n  {listed(found)}\n"
            "pass the target that it was trained for"
        )
    leaves = tuple(theirs.owners.index(last[kind]) for kind in ("sliding", "full"))
    layers = _over(own, theirs, (last["sliding"], last["full"]))
    network = AssistantConfig(layers, embedding_scale=theirs.embedding_scale, **fields)
    return _Parts(network, cast(tuple[int, int], leaves), own.vocab_size)


def _over(
    own: TransformerConfig, target: TransformerConfig, owners: tuple[int, int]
) -> TransformerConfig:
    """Returns the configuration of an assistant's layers, after the target's two."""

    def sizes(layer: int, shared: bool) -> AttentionSizes:
        found = target.slots_of(layer)
        assert found is not None
        return AttentionSizes(found[0], found[1], shared=shared)

    sliding, full = owners
    layers = range(own.num_layers)
    windows = (target.window_of(sliding), None, *(own.window_of(i) for i in layers))
    return dataclasses.replace(
        own,
        num_layers=OWNERS + own.num_layers,
        ropes=(target.rope_of(sliding), target.rope_of(full), *(own.rope_of(i) for i in layers)),
        windows=windows,
        mixers=tuple(
            sizes(full if window is None else sliding, shared=i >= OWNERS)
            for i, window in enumerate(windows)
        ),
    )


def _table(parts: _Parts, tensors: Tensors) -> Table:
    """Locates the parameters in the folder."""
    c = parts.network.layers
    family, rows = FAMILIES[c.family], []
    for row in family.tensors(c):
        layer = int(row.path[0].removeprefix("layer_")) if row.path[0].startswith("layer_") else -1
        if layer >= OWNERS:
            there = f"layers.{layer - OWNERS}."
            name = there + row.name.removeprefix(f"model.layers.{layer}.")
            path = ("network", f"layer_{layer - OWNERS}", *row.path[1:])
            rows.append(dataclasses.replace(row, name=name, path=path))
    rows.append(Tensor("norm.weight", ("network", "norm", "weight")))
    rows.append(Tensor("embed_tokens.weight", ("table",)))
    for name in _PROJECTIONS:
        stem = name.removesuffix(".weight")
        rows += dense_rows(stem, ("network", stem))
    if parts.network.num_clusters is not None:
        rows += dense_rows("masked_embedding.centroids", ("network", "centroids"))
    shapes = {**_traced(parts.network), ("table",): (parts.vocab_size, c.hidden_size)}
    # The head is tied to the table; a file may repeat it.
    unread = ("lm_head.weight", _ORDER)
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in unread and not name.endswith(family.ignored)
    }
    return Table(rows, shapes, stored, None)


@functools.lru_cache(maxsize=8)
def _traced(network: AssistantConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    flat = cast(dict[tuple[str, ...], jax.Array], flatten_dict(assistant_shapes(network)))
    return {("network", *path): leaf.shape for path, leaf in flat.items()}


def _order(folder: pathlib.Path, parts: _Parts, tensors: Tensors) -> np.ndarray:
    """Reads the tokens by cluster.  Raises ValueError unless each token is there once."""
    if _ORDER not in tensors:
        raise ValueError(f"{folder} lacks the tensor {_ORDER}: download the folder again")
    order = read_whole(folder, _ORDER, tensors[_ORDER])
    if not np.array_equal(np.sort(order), np.arange(parts.vocab_size)):
        raise ValueError(
            f"{folder}: {_ORDER} must have each of the {parts.vocab_size} tokens once: download "
            "the folder again"
        )
    return order.astype(np.int32)


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    parts = _parts(folder, config, target)
    last = target.model.num_taps - 1
    source = AssistantSource(parts.network, parts.vocab_size, parts.leaves, (last,))
    table = _table(parts, tensors)
    order = None
    if parts.network.num_clusters is not None and not without_weights(target):
        order = _order(folder, parts, tensors)
    made = read_drafter(
        folder, Chain(source, NUM_DRAFTS), source, table, target, rules, ("embedding",)
    )
    if order is None:
        return made
    at = replicate(jnp.asarray(order), mesh_of(target.params))
    return dataclasses.replace(made, params={**made.params, "order": at})


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    folder = folder_of(tensors)
    own, fields = _own(folder, config)
    taps = None
    if target is not None:
        parts = _parts(folder, config, target)
        _table(parts, tensors).check(folder)
        taps = (target.model.num_taps - 1,)
    head = "a head over all tokens"
    if fields["num_clusters"] is not None:
        head = (
            f"a head over the best {fields['clusters_read']} of {fields['num_clusters']} clusters"
        )
    return Description(
        method="assistant of Gemma 4",
        packaging="Google",
        taps=taps,
        num_drafts=NUM_DRAFTS,
        shares=("embedding",),
        details=(
            f"{own.num_layers} layers of hidden size {own.hidden_size} that read the target's "
            f"keys and values, {head}",
        ),
    )


ASSISTANT = Format(_matches, _read, _describe, is_over(AssistantSource), {})
