"""The configuration that all drafters of the package speculators have."""

from __future__ import annotations

import re

from specjax.models import FAMILIES, Config, LanguageModel

_VERSION = "0.9.0"  # whose layout this is
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def speculators_config(
    kind: str,
    target: LanguageModel,
    num_drafts: int,
    layers: Config,
    fields: Config,
    *,
    keeps_tables: bool = True,
) -> Config:
    """The configuration of a folder in this layout.

    Args:
      kind: the name of the method.
      target: which the package calls the verifier.
      num_drafts: of a step.
      layers: the configuration of the decoder layers.
      fields: of the method.
      keeps_tables: False if the package would replace tables of the folder by the verifier's.  It
        cannot do so if the verifier has no name.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    # The package looks a name up on the Hub, so the name of a folder would not be found.
    named = keeps_tables and _ON_HUB.fullmatch(target.name) is not None
    verifier = {
        "name_or_path": target.name if named else None,
        "architectures": [FAMILIES[target.model.module.config.family].architecture],
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
            "verifier": verifier,
        },
    }
