"""`Model`: a language model as a pure function, and `Loaded`: a model with its weights."""

from __future__ import annotations

import abc
from typing import Generic, Protocol

from jax import Array

from specjax.contract.declared import Part
from specjax.contract.variables import CacheT, ParamsT
from specjax.types import ArrayTree, ModelOutput


class Model(Part, Generic[ParamsT, CacheT]):
    """A causal language model."""

    vocab_size: int
    max_positions: int
    reads_trees: bool  # True if `apply` applies `mask`, and the cache commits paths
    sparse: bool = False  # True if a token uses some of the weights, such as a few experts
    one_cpu: bool = False  # True if all arrays are on one CPU, if they are on a CPU
    triton: bool = False  # True if all arrays are on one NVIDIA GPU for which XLA compiles Triton
    num_taps: int = 0  # `taps` may hold 0 ... num_taps - 1; 0: the model offers no inner layers

    @abc.abstractmethod
    def init_cache(self, batch: int, size: int) -> CacheT:
        """Returns an empty `Cache` for `batch` rows with `size` slots each."""

    @abc.abstractmethod
    def apply(
        self,
        params: ParamsT,
        tokens: Array,
        positions: Array,
        cache: CacheT | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput[CacheT]:
        """Runs one forward pass over `tokens` [B, N] at `positions` [B, N].

        Token n attends to the committed tokens of its row, and to each of the N tokens m for which
        `mask[b, n, m]` is True (None: causal).  The N tokens are staged in slots length ...
        length + N - 1 of the cache, whose length does not change.  Without a mask positions ascend
        up to the last token, and those behind it are padding: what is computed for them means
        nothing.

        With `taps`, `ModelOutput.features` [B, N, sum E] holds the hidden states (the residual
        stream) after those layers, concatenated in the order of `taps`: 0 is the embedding, 1 the
        output of the first layer.  A `Transformer` of L layers also has L + 1: the output of the
        last one after the final norm.
        """


class Loaded(Protocol):
    """A loaded model, as `specjax.load` returns it."""

    @property
    def model(self) -> Model:
        """The network without its weights."""
        ...

    @property
    def params(self) -> ArrayTree:
        """The weights of the model."""
        ...

    @property
    def name(self) -> str:
        """The name of the model in messages and reports."""
        ...
