"""How EAGLE-3 and P-EAGLE heads are written.

official      EAGLE-3, one layer `midlayer.*`    the authors, SpecForge, SGLang, vLLM
specforge     P-EAGLE, layers `layers.{i}.*`     SpecForge, with fields as in "official"
speculators   both, layers `layers.{i}.*`        speculators, vLLM
"""

from __future__ import annotations

from specjax.drafters import PublishedDrafter
from specjax.files.drafters.eagle3_rows import mask_row, network_rows, network_shapes
from specjax.files.drafters.format import Export, Layout
from specjax.files.drafters.layers import unwritable, write_layers
from specjax.files.drafters.speculators import speculators_config
from specjax.files.drafters.tables import num_units, table_faults, with_tables
from specjax.files.drafters.taps import write_taps
from specjax.models import Config, Eagle3Config, LanguageModel
from specjax.proposers import Eagle3Source, PEagleSource

_TAPS = 3  # of the layouts whose code has a fixed number


def _source(drafter: PublishedDrafter) -> Eagle3Source | PEagleSource:
    assert isinstance(drafter.source, Eagle3Source | PEagleSource)  # `Format.makes`
    return drafter.source


def _faults(drafter: PublishedDrafter, found: dict[str, bool]) -> list[str]:
    """What no layout can hold, and the words in `found` that are true."""
    layers, taps = _source(drafter).network.layers, _source(drafter).taps
    windows = ["has layers with windows"] if layers.windows else []
    normed = "reads the target's last state after the final norm"
    found = {**found, normed: drafter.sizes[2] + 1 in taps}
    words = [words for words, true in found.items() if true]
    return [*(windows or unwritable(layers)), *table_faults(drafter), *words]


def _flat_faults(c: Eagle3Config) -> dict[str, bool]:
    biases = c.layers.qkv_bias or c.layers.out_bias or c.layers.mlp_bias
    return {
        f"reads {c.num_taps} layers of the target instead of {_TAPS}": c.num_taps != _TAPS,
        "norms queries and keys": c.layers.qk_norm is not None,
        "has biases": biases,
        "norms all features together (norm_before_fc)": c.norm_before_fc,
    }


def _official_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    c = _source(drafter).network
    found = {
        f"has {c.layers.num_layers} layers instead of 1": c.layers.num_layers > 1,
        "adds the normed feature (norm_before_residual)": c.norm_before_residual,
    }
    return _faults(drafter, {**_flat_faults(c), **found})


def _specforge_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    c = _source(drafter).network
    found = {
        "norms each feature (fc_norm)": c.fc_norm,
        "has a scaled rope": c.layers.rope is not None and c.layers.rope.kind != "default",
    }
    return _faults(drafter, {**_flat_faults(c), **found})


def _speculators_faults(drafter: PublishedDrafter, target: LanguageModel) -> list[str]:
    c = _source(drafter).network
    sizes = c.layers.hidden_size, c.target_size
    found = {
        f"has hidden size {sizes[0]} for a target of {sizes[1]}": sizes[0] != sizes[1],
        "has biases before the attention alone": c.layers.qkv_bias and not c.layers.out_bias,
        "norms the features twice (norm_before_fc and fc_norm)": c.norm_before_fc and c.fc_norm,
    }
    return _faults(drafter, found)


def _flat(drafter: PublishedDrafter, architecture: str) -> Config:
    """The configuration of the authors and of SpecForge."""
    source = _source(drafter)
    c, config = source.network, {"architectures": [architecture]}
    config |= write_layers(c.layers, source.vocab_size)
    config |= {"draft_vocab_size": num_units(drafter), **write_taps(source.taps, nested=True)}
    # With this field the authors' code takes the embedding from the head's own file.
    own = "embedding" not in drafter.shares
    return config | ({"target_hidden_size": c.target_size} if own else {})


def _official(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    c, config = _source(drafter).network, _flat(drafter, "LlamaForCausalLMEagle3")
    # SpecForge's training takes "norm_output": false for "no norm before the head".
    config |= {"fc_norm": True} if c.fc_norm else {}
    config |= {"norm_output": True} if c.feeds_normed else {}
    export = Export(config, network_rows(c, ["midlayer."]), network_shapes(c), drafter.params, {})
    size = c.layers.hidden_size
    return with_tables(export, drafter, target, size, repeats=("head",), maps=True)


def _stacked(drafter: PublishedDrafter, target: LanguageModel, config: Config) -> Export:
    """Layers that are numbered, and both tables."""
    c = _source(drafter).network
    rows = network_rows(c, [f"layers.{i}." for i in range(c.layers.num_layers)])
    shapes = network_shapes(c)
    if isinstance(drafter.source, PEagleSource):
        row = mask_row(c)
        rows.append(row)
        shapes[row.path] = (c.num_taps * c.target_size,)
    export = Export(config, rows, shapes, drafter.params, {})
    both = "embedding", "head"
    maps = "speculators_model_type" not in config
    return with_tables(export, drafter, target, c.layers.hidden_size, repeats=both, maps=maps)


def _specforge(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    source, config = _source(drafter), _flat(drafter, "PEagleDraftModel")
    assert isinstance(source, PEagleSource)
    config |= {"norm_before_residual": source.network.norm_before_residual}
    # SpecForge has both numbers among the options of a training run.
    config |= {"mask_token_id": source.mask_token, "ttt_length": source.depth}
    return _stacked(drafter, target, config)


def _speculators(drafter: PublishedDrafter, target: LanguageModel) -> Export:
    source = _source(drafter)
    c, kind, architecture, depth = source.network, "eagle3", "Eagle3", drafter.proposer.max_depth
    fields = {
        "draft_vocab_size": num_units(drafter),
        **write_taps(source.taps, nested=False),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.feeds_normed,
    }
    if isinstance(source, PEagleSource):
        kind, architecture, depth = "peagle", "PEagle", source.depth
        fields["mask_token_id"] = source.mask_token
    fields = {"architectures": [f"{architecture}DraftModel"], **fields}
    layers = write_layers(c.layers, source.vocab_size)
    # The package loads no EAGLE-3 head without the configuration of its verifier.
    config = speculators_config(kind, target, depth, layers, fields, verifier=target.name)
    return _stacked(drafter, target, config)


SPECULATORS = Layout(_speculators_faults, _speculators)
EAGLE3_LAYOUTS = {
    "official": Layout(_official_faults, _official),
    "speculators": SPECULATORS,
}
PEAGLE_LAYOUTS = {
    "speculators": SPECULATORS,
    "specforge": Layout(_specforge_faults, _specforge),
}
