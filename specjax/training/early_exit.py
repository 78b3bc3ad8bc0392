"""A draft that is the first layers of its target, of which only a norm for the exit is trained.

The layers and the output matrix are the target's own arrays, so they take no memory in training.
The proposer `early-exit` reads the target's parameters alone, so it cannot use the trained norm.
The model is written as an ordinary folder instead, which `--draft` takes: it drafts what the
early exit would draft with this norm, and has a KV cache of its own.
"""

from __future__ import annotations

from specjax.models import LanguageModel, LinenModel


def exit_of(
    draft: LinenModel, target: LanguageModel, layers: int
) -> tuple[LinenModel, tuple[str, ...]]:
    """The first layers of a target as a draft, and the names of what is trained: the final norm.

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
