"""A draft model whose layers attend to the last tokens only, for long texts."""

from __future__ import annotations

import dataclasses

from specjax._internal.checks import typed, whole
from specjax.models import LanguageModel, LinenModel, Transformer


def window_draft(draft: LanguageModel, window: int) -> LanguageModel:
    """Returns a draft model whose layers attend to the last `window` tokens only.

    It has the same weights.  Its cache keeps so many tokens in a ring, and its passes read no more,
    so in a long text its drafts cost what they cost in a short one.  Their acceptance may fall, and
    the target's text stays the same.  Layers with a smaller window of their own keep it, and
    recurrent layers have none.

    A target may draft for itself in a window (`draft=window_draft(target, 512)`): the arrays are
    the same, so only the ring needs memory.  That pays where keys and values outweigh the weights.

    Args:
      draft: as `specjax.load` returns it; it is not changed.
      window: tokens, the newest included; at least 1.

    Raises:
      ValueError: a window that is no such number, or a draft that is no specjax Transformer.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> near = specjax.window_draft(draft, 64)
      >>> near.model.module.config.windows
      (64,)
    """
    typed("what specjax.load(folder) returns", LanguageModel, draft=draft)
    window = whole("draft_window", window, 1, 2**31 - 1, "a whole number of tokens, at least 1")
    network = draft.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        raise ValueError(
            f"{draft.name} is a {type(network).__name__}; only a specjax Transformer, as "
            "specjax.load returns, can be given a window here: leave draft_window= out"
        )
    config = network.module.config
    windows = tuple(
        min(config.window_of(layer) or window, window) if config.attends(layer) else None
        for layer in range(config.num_layers)
    )
    module = network.module.clone(config=dataclasses.replace(config, windows=windows))
    return dataclasses.replace(draft, model=dataclasses.replace(network, module=module))
