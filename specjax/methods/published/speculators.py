"""The configuration that all drafters of the package speculators have."""

from __future__ import annotations

import re

from specjax.models import FAMILIES, Config, LanguageModel

_VERSION = "0.9.0"  # whose layout this is
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def on_hub(target: LanguageModel) -> str | None:
    """Returns the target's name on the Hub, or None if its name is that of a folder."""
    return target.name if _ON_HUB.fullmatch(target.name) else None


def speculators_config(
    kind: str,
    target: LanguageModel,
    num_drafts: int,
    layers: Config,
    fields: Config,
    verifier: str | None,
) -> Config:
    """Returns the configuration of a folder in this layout.

    `kind` is the name of the method, `layers` the configuration of the decoder layers, and `fields`
    has those of the method.  From the `verifier`, the target's folder or name on the Hub, the
    package loads what it needs of the target; with None it loads nothing.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        **fields,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": method["proposal_type"],
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [FAMILIES[target.model.module.config.family].architecture],
            },
        },
    }
