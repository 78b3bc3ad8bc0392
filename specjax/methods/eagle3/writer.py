"""Writes EAGLE-3 heads; the functions that P-EAGLE heads share are public.

official      one layer `midlayer.*`    the authors, SpecForge, SGLang, vLLM
speculators   layers `layers.{i}.*`     speculators, vLLM
"""

from __future__ import annotations

from specjax.methods.eagle3.network import Eagle3Config
from specjax.methods.eagle3.rows import network_rows, network_shapes
from specjax.methods.eagle3.source import EagleSource
from specjax.methods.eagle3.taps import write_taps
from specjax.methods.published import (
    Export,
    Layout,
    PublishedDrafter,
    num_units,
    speculators_config,
    table_faults,
    unwritable,
    with_tables,
    write_layers,
)
from specjax.models import Config, LanguageModel, Tensor

_TAPS = 3  # of the layouts whose code has a fixed number


def source_of(drafter: PublishedDrafter) -> EagleSource[Eagle3Config]:
    """Returns the source of a drafter of one of both methods."""
    assert isinstance(drafter.source, EagleSource)  # `Format.makes`
    return drafter.source


def faults(drafter: PublishedDrafter, found: dict[str, bool]) -> list[str]:
    """Lists the properties that no layout can hold, and the keys of `found` that are true."""
    layers, taps = source_of(drafter).network.layers, source_of(drafter).taps
    windows = ["has layers with windows"] if layers.windows else []
    normed = "reads the target's last state after the final norm"
    last = source_of(drafter).network.fuses and drafter.sizes[2] + 1 in taps
    found = {**found, normed: last}
    words = [words for words, true in found.items() if true]
    return [*(windows or unwritable(layers)), *table_faults(drafter), *words]


def flat_faults(c: Eagle3Config) -> dict[str, bool]:
    """Returns the properties that the authors' configuration lacks, and whether each holds."""
    biases = c.layers.qkv_bias or c.layers.out_bias or c.layers.mlp_bias
    return {
        f"reads {c.num_taps} layers of the target instead of {_TAPS}": c.fuses
        and c.num_taps != _TAPS,
        "norms queries and keys": c.layers.qk_norm is not None,
        "has biases": biases,
        "norms all features together (norm_before_fc)": c.norm_before_fc,
    }


def _official_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    c = source_of(drafter).network
    found = {
        f"has {c.layers.num_layers} layers instead of 1": c.layers.num_layers > 1,
        "adds the normed feature (norm_before_residual)": c.norm_before_residual,
    }
    return faults(drafter, {**flat_faults(c), **found})


def speculators_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    """Lists the properties that the package speculators cannot hold."""
    c = source_of(drafter).network
    sizes = c.layers.hidden_size, c.target_size
    found = {
        f"has hidden size {sizes[0]} for a target of {sizes[1]}": sizes[0] != sizes[1],
        "reads the target's last state without fc": not c.fuses,
        "has biases before the attention alone": c.layers.qkv_bias and not c.layers.out_bias,
        "norms the features twice (norm_before_fc and fc_norm)": c.norm_before_fc and c.fc_norm,
    }
    return faults(drafter, found)


def flat_config(drafter: PublishedDrafter, architecture: str) -> Config:
    """Returns the configuration of the authors and of SpecForge."""
    source = source_of(drafter)
    c, config = source.network, {"architectures": [architecture]}
    config |= write_layers(c.layers, source.vocab_size)
    config |= {"draft_vocab_size": num_units(drafter), **_taps(source)}
    # With this field the authors' code takes the embedding from the head's own file.
    own = "embedding" not in drafter.shares
    return config | ({"target_hidden_size": c.target_size} if own else {})


def _taps(source: EagleSource) -> Config:
    """Returns the fields of the taps, in a configuration for all engines."""
    if not source.network.fuses:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    return write_taps(source.taps, nested=True)


def _official(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    c, config = source_of(drafter).network, flat_config(drafter, "LlamaForCausalLMEagle3")
    # SpecForge's training takes "norm_output": false for "no norm before the head".
    config |= {"fc_norm": True} if c.fc_norm else {}
    config |= {"norm_output": True} if c.feeds_normed else {}
    export = Export(config, network_rows(c, ["midlayer."]), network_shapes(c), drafter.params, {})
    size = c.layers.hidden_size
    return with_tables(export, drafter, target, size, repeats=("head",), maps=True)


def stacked(
    drafter: PublishedDrafter, target: LanguageModel, config: Config, more: tuple[Tensor, ...] = ()
) -> Export:
    """Returns the rows of numbered layers, both tables, and `more` rows as wide as all features."""
    c = source_of(drafter).network
    rows = network_rows(c, [f"layers.{i}." for i in range(c.layers.num_layers)])
    shapes = network_shapes(c)
    for row in more:
        rows.append(row)
        shapes[row.path] = (c.num_taps * c.target_size,)
    export = Export(config, rows, shapes, drafter.params, {})
    both = "embedding", "head"
    maps = "speculators_model_type" not in config
    return with_tables(export, drafter, target, c.layers.hidden_size, repeats=both, maps=maps)


def speculators_fields(
    drafter: PublishedDrafter, target: LanguageModel, kind: str, depth: int, fields: Config
) -> Config:
    """Returns the configuration of the package speculators, with the fields of a method first."""
    source = source_of(drafter)
    c = source.network
    fields = {
        **fields,
        "draft_vocab_size": num_units(drafter),
        **write_taps(source.taps, nested=False),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.feeds_normed,
    }
    layers = write_layers(c.layers, source.vocab_size)
    # The package loads no EAGLE-3 head without the configuration of its verifier.
    return speculators_config(kind, target, depth, layers, fields, verifier=target.name)


def _speculators(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    fields = {"architectures": ["Eagle3DraftModel"]}
    depth = drafter.proposer.max_depth
    config = speculators_fields(drafter, target, "eagle3", depth, fields)
    return stacked(drafter, target, config)


EAGLE3_LAYOUTS = {
    "official": Layout(_official_faults, _official),
    "speculators": Layout(speculators_faults, _speculators),
}
