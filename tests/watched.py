"""The toy target, which notes how many tokens each of its passes reads."""

import dataclasses
from typing import Any

from jax.experimental import io_callback
from toys import TRANSFORMERS as toys

from specjax.contract import Model


@dataclasses.dataclass(frozen=True)
class Watched(Model):
    """`widths` grows when a pass runs, and `traced` when one is traced."""

    inner: Any
    widths: list = dataclasses.field(default_factory=list, compare=False)
    traced: list = dataclasses.field(default_factory=list, compare=False)
    vocab_size = toys.VOCAB
    max_positions = 64
    reads_trees = True

    def init_cache(self, batch, size):
        return self.inner.init_cache(batch, size)

    def apply(self, params, tokens, positions, cache=None, mask=None, taps=()):
        width = tokens.shape[1]
        self.traced.append(width)
        # In order: a debug callback may be dropped on a busy machine.
        io_callback(lambda: self.widths.append(width), None, ordered=True)
        return self.inner.apply(params, tokens, positions, cache, mask, taps)
