"""Drafts with the first layers of the target, of which only a norm for the exit is trained.

The layers and the output matrix are the target's own arrays, so they take no memory in training.
The proposer `early-exit` reads only the target's parameters, so it cannot use the trained norm.
The model is saved as an ordinary folder instead, which `--draft` takes: it drafts what the early
exit would draft with this norm, and has a KV cache of its own.
"""

from __future__ import annotations

from specjax.models import LanguageModel, LinenModel


def exit_of(
    draft: LinenModel, target: LanguageModel, layers: int
) -> tuple[LinenModel, tuple[str, ...]]:
    """Returns the first layers of a target as a draft, and the trained names: the final norm's.

    The layers and the output matrix are the target's own arrays, so they take no memory.

    Raises:
      ValueError: the target has no such layers before its last one, or no final norm.
    """
    network = target.model.module
    if layers >= network.config.num_layers:
        raise ValueError(
            f"--early-exit is {layers}; the target has {network.config.num_layers} layers: leave "
            "out at least the last one"
        )
    if not network.config.final_norm:
        raise ValueError(
            "--early-exit trains the norm before the output matrix, which this target lacks: pass "
            "--from-layers, which trains the layers"
        )
    module = draft.module.clone(transposed=network.transposed)
    return LinenModel(module), ("norm",)
