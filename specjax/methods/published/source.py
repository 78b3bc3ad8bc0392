"""`PublishedSource`: the base class of published drafters' sources."""

from __future__ import annotations

import abc
from typing import ClassVar, NoReturn

from specjax.contract import Loaded
from specjax.models import TransformerConfig
from specjax.parallel import Specs


class PublishedSource(abc.ABC):
    """A source with a network of a published folder, which reads hidden states of the target.

    This is the first base class, before `Source` or `BlockSource`.
    """

    vocab_size: int  # the target's
    taps: tuple[int, ...]  # the layers of the target that it reads
    takes_int8_head: ClassVar[bool] = False  # it multiplies with a head of the target in int8, too

    def bind(self, target: Loaded, draft: Loaded | None) -> NoReturn:
        raise ValueError(
            f"a {type(self).__name__} comes without its weights: pass what specjax.load_drafter "
            "returns as drafter="
        )

    @property
    @abc.abstractmethod
    def layers(self) -> TransformerConfig:
        """The configuration of the network's layers."""

    @abc.abstractmethod
    def axes(self) -> Specs:
        """Returns the logical axes of the network's parameters, by name in `SharedParams.own`.

        Returns:
          Trees of `PartitionSpec`, for `specjax.parallel.named_shardings`.  Those of the embedding
          and of the head are known, and are left out.
        """
