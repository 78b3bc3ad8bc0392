"""`MtpSource`: the layer of multi-token prediction of a target's own folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax import Array

from specjax._internal.checks import within
from specjax.contract import Source
from specjax.methods.eagle3 import Eagle3State, EagleParams, PairReading, PairSource, draft_logits
from specjax.methods.mtp.network import MtpConfig
from specjax.methods.published import head_of
from specjax.models import Int8


@dataclasses.dataclass(frozen=True)
class MtpSource(PairSource[MtpConfig], Source[EagleParams, Eagle3State, PairReading]):
    """A `PairSource` whose features are the target's last hidden states, after its final norm.

    One layer drafts every depth: the output of a depth is the hidden state of the next one.

    With `head_tokens` it drafts only tokens with smaller ids, and reads only their columns of the
    target's output matrix, which may be larger than the layer.  The frequent tokens of a byte-pair
    vocabulary come first, since tokens are numbered as they were merged.

    Reference: DeepSeek-AI 2024 (DeepSeek V3), arXiv 2412.19437, section 2.2.
    """

    network: MtpConfig
    vocab_size: int  # the target's
    taps: tuple[int, ...]  # the last of the target's
    head_tokens: int | None = None  # None: all tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_tokens is not None:
            within("head_tokens", self.head_tokens, 1, self.vocab_size, ", the target's tokens")

    def _logits(self, params: EagleParams, normed: Array) -> Array:
        product = self.network.dot_general
        return head_logits(params, normed, self.vocab_size, self.head_tokens, product)


def head_logits(
    params: EagleParams,
    normed: Array,
    vocab_size: int,
    head_tokens: int | None,
    product: Callable[..., Array],
) -> Array:
    """Maps states [..., E] to float32 logits [..., V] of tokens with ids below `head_tokens`."""
    head, some = head_of(params), slice(head_tokens)
    is_int8 = isinstance(head, Int8)
    head = Int8(head.values[some], head.scale[some]) if is_int8 else head[:, some]
    return draft_logits(normed, head, vocab_size, product=product)
