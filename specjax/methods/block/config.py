"""The configuration of a block draft, in the layouts of z-lab, SpecForge, DeepSpec, speculators.

    z-lab, SpecForge   {hidden_size, ..., "dflash_config": {mask_token_id, target_layer_ids, ...}}
    DeepSpec           {hidden_size, ..., mask_token_id, target_layer_ids, ...}
    speculators        {"transformer_layer_config": {hidden_size, ...}, mask_token_id, ...}

A field is looked up in the nested dictionary first, then at the top level.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings

from specjax._internal.fields import FLAG, check, count, one_of, real
from specjax.methods.block.network import BlockDraftConfig
from specjax.methods.published import Tensors, counted_taps, layer_prefixes, read_layers
from specjax.models import Config, TransformerConfig

_NESTED = ("dflash_config", "dspark_config")

_TAPS = {
    "aux_hidden_state_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 0,
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
}
"""Fields with layers of the target, and the number that is added to an id: some layouts count
layers from 0, others count their inputs.
"""

_LABELS = ("llama", "qwen2", "qwen3")

_REFUSED = {
    "attention_sink_bias": one_of((False,)),
    "is_neox_style": one_of((True,)),
    "use_swa": one_of((False,)),
}
"""Fields with the only value that is supported."""


class Fields:
    """The fields of a configuration, whatever its layout."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nested = {
            name: value
            for key in _NESTED
            if isinstance(config.get(key), dict)
            for name, value in config[key].items()
        }
        layers = config.get("transformer_layer_config")
        self.is_speculators = isinstance(layers, dict)
        self.layers: Config = layers if isinstance(layers, dict) else config

    def get(self, name: str, default: object = None) -> object:
        """Returns a field; null counts as missing."""
        for place in (self.nested, self.config):
            if place.get(name) is not None:
                return place[name]
        return default

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Returns a whole number.  Raises ValueError for another value, or if it is missing."""
        return count(least).of(name, self.get(name, default))

    def number(self, name: str, default: float) -> float:
        """Returns a number.  Raises ValueError for another value."""
        return float(real().of(name, self.get(name, default)))

    def flag(self, name: str, default: bool | None) -> bool | None:
        """Returns true, false, or the default.  Raises ValueError for another value."""
        value = self.get(name, default)
        return None if value is None else FLAG.of(name, value)


def read_config(
    folder: pathlib.Path,
    fields: Fields,
    tensors: Tensors,
    num_taps: int,
    first_slot: int,
    target_size: int,
) -> BlockDraftConfig:
    """Returns the sizes and switches of a block draft.

    The tensors decide where the configuration contradicts them.  `num_taps` counts the layers as
    `read_taps` does, and `target_size` is the hidden size of the target.
    """
    check({name: fields.get(name) for name in _REFUSED}, _REFUSED)
    layers = read_layer_config(folder, fields, tensors)
    size = fields.count("block_size", 8 if fields.is_speculators else 16)
    from_anchor = fields.flag("sample_from_anchor", None)
    if from_anchor is not None:
        first_slot = 0 if from_anchor else 1
    convolves = any("attention_conv." in name or "mlp_conv." in name for name in tensors)
    windows = [window for window in layers.windows if window is not None]
    if windows and not fields.is_speculators and min(windows) < size:
        warnings.warn(
            f"{folder}: its windows of {min(windows)} tokens are smaller than its blocks of {size} "
            "slots. They also hold inside a block, as z-lab serves such drafters; training by "
            "SpecForge shows each slot all slots before it",
            stacklevel=6,
        )
    cap = fields.number("final_logit_softcapping", 0.0)
    return BlockDraftConfig(
        layers=layers,
        feature_size=num_taps * target_size,
        block_size=size,
        mask_token=fields.count("mask_token_id", least=0),
        causal=_read_causal(fields, layers),
        anchored_windows=fields.is_speculators and bool(windows),
        first_slot=first_slot,
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_scale=fields.number("output_multiplier", 1.0),
        logit_softcap=cap if cap > 0 else None,
        conv_size=fields.count("conv_kernel_size", 2) if convolves else 0,
        conv_group=fields.count("conv_group_size", 16) if convolves else 1,
    )


def read_taps(fields: Fields, num_layers: int | None) -> tuple[int, ...] | None:
    """Returns the layers of the target that the draft reads: 0 is the embedding, i the i-th layer.

    Without a field they are evenly spaced over the target's `num_layers` layers, or None if that is
    None.

    Raises:
      ValueError: as `counted_taps`.
    """
    named = {name: ids for name in _TAPS if (ids := fields.get(name)) is not None}
    if (taps := counted_taps(named, _TAPS)) is not None:
        return taps
    if num_layers is None:
        return None
    count = int(fields.layers.get("num_hidden_layers", 1))
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


def taps_as_trained(fields: Fields, taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the taps on a target of L = `num_layers` layers: L + 1 is L after the final norm.

    z-lab takes the hidden states of transformers, whose last one went through that norm.  DeepSpec
    records the outputs of layers, and speculators the states before the norm.
    """
    if fields.nested.get("target_layer_ids") is None:
        return taps
    return tuple(num_layers + 1 if tap == num_layers else tap for tap in taps)


def write_taps(name: str, taps: tuple[int, ...], num_layers: int) -> Config:
    """Returns the field that `read_taps` reads; the target has `num_layers` layers."""
    # The state after the final norm, tap L + 1, has the number of the last layer.
    return {name: [min(tap, num_layers) - _TAPS[name] for tap in taps]}


def read_layer_config(folder: pathlib.Path, fields: Fields, tensors: Tensors) -> TransformerConfig:
    """Returns the sizes of the layers, and their windows."""
    kept = {name: value for name, value in fields.layers.items() if name != "tie_word_embeddings"}
    # Labels are wrong in published files, and the tensors show what a label could say.
    label = kept.get("model_type") if kept.get("model_type") in _LABELS else "qwen3"
    # Other packages than speculators use transformers' Qwen3Config, whatever the label says.
    like = "qwen3" if label != "llama" or not fields.is_speculators else "fields"
    kept["model_type"] = label
    layers = read_layers(folder, kept, tensors, layer_prefixes(tensors), like)
    return dataclasses.replace(layers, tied_embeddings=False)


def _read_causal(fields: Fields, layers: TransformerConfig) -> tuple[bool, ...]:
    """Returns by layer whether a slot attends only to slots before it."""
    count = layers.num_layers
    for name in ("is_causal", "causal", "causal_head"):
        value = fields.flag(name, None)
        if value is not None:
            return (value,) * count if value else ()
    slides = tuple(layers.window_of(i) is not None for i in range(count))
    if fields.is_speculators:
        both_ways = str(fields.get("speculators_model_type")) == "dflash2"
        if fields.flag("sliding_window_non_causal", both_ways):
            return ()
    elif kinds := fields.layers.get("layer_types"):
        # By their names, also where no window is read.
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    return slides if any(slides) else ()
