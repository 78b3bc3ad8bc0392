"""`with_exact_states`: recurrent layers whose states have the same bits with and without drafts."""

from __future__ import annotations

import dataclasses

from specjax.models.base import LinenModel
from specjax.models.language_model import LanguageModel
from specjax.models.transformer import Transformer


def with_exact_states(model: LanguageModel) -> LanguageModel:
    """Returns `model` with states that are updated token by token, always in the same order.

    A gated delta net, Kimi delta attention or Mamba2 usually adds all accepted tokens of a pass to
    its state at once, which rounds otherwise than one token after the other.  With exact states
    the state after any accepted and rejected drafts has the bits of plain decoding at the same
    width (`NoProposer(num_nodes=N)`).  A pass over N tokens then takes N^2 updates of each state
    instead of a few products.

    A model without such layers is returned as it is.

    Raises:
      ValueError: the model is not a specjax Transformer.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> specjax.models.with_exact_states(target) is target  # it has attention only
      True
    """
    module = model.model.module if isinstance(model.model, LinenModel) else None
    if not isinstance(module, Transformer):
        raise ValueError(
            f"{model.name} is a {type(model.model).__name__}, and only a specjax Transformer has "
            "exact states: pass what specjax.load returns"
        )
    config = module.config
    if config.exact_states or not any(map(config.has_state, range(config.num_layers))):
        return model
    module = module.clone(config=dataclasses.replace(config, exact_states=True))
    return dataclasses.replace(model, model=dataclasses.replace(model.model, module=module))
