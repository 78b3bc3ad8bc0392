"""`MtpSource`: the layer of multi-token prediction of a target's own folder."""

from __future__ import annotations

import dataclasses

from specjax.contract import Source
from specjax.methods.eagle3 import Eagle3State, EagleParams, PairReading, PairSource
from specjax.methods.mtp.network import MtpConfig
from specjax.methods.published import PublishedDrafter
from specjax.proposers import Chain


@dataclasses.dataclass(frozen=True)
class MtpSource(PairSource[MtpConfig], Source[EagleParams, Eagle3State, PairReading]):
    """A `PairSource` whose features are the target's last hidden states, after its final norm.

    One layer drafts every depth: the output of a depth is the hidden state of the next one.

    Reference: DeepSeek-AI 2024 (DeepSeek V3), arXiv 2412.19437, section 2.2.
    """

    network: MtpConfig
    vocab_size: int  # the target's
    taps: tuple[int, ...]  # the last of the target's


def with_switches(
    drafter: PublishedDrafter, feeds_normed: bool, zeroes_first: bool
) -> PublishedDrafter:
    """Returns a drafter of chains over an `MtpSource` with these switches of `MtpConfig`."""
    source = drafter.source
    assert isinstance(source, MtpSource)
    network = dataclasses.replace(
        source.network, feeds_normed=feeds_normed, zeroes_first=zeroes_first
    )
    changed = dataclasses.replace(source, network=network)
    proposer = Chain(changed, drafter.proposer.max_depth)
    return dataclasses.replace(drafter, proposer=proposer, source=changed)
