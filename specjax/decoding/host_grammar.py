"""`Guided`: a decoder whose host computes, between two programs, the mask of each node.

    propose  ->  tokens of the tree  ->  masks, on the host  ->  verify, commit

An automaton is followed on the device.  A grammar needs a stack, so its matchers live on the host,
and a step is two programs with the host between them: the device waits while the masks are made,
and the host while the target verifies.  That is slower than `Decoder.run`, which is one program.
The masks of the roots are made while the proposer drafts.

The text of a row says all that its matcher has to know.  So the state between steps is the
decoder's own, and `run` and `stream` start matchers from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.bit_masks import words_of
from specjax._internal.jit_cache import programs, structure_of
from specjax.constraints import Matcher, Matchers
from specjax.decoding.decoder import Decoder
from specjax.parallel import constrain_like, layout, to_host
from specjax.processors import Processors
from specjax.types import DecodeState, Params, Proposal

_FOREVER = 2**31 - 1
_Layout = Any
"""What `parallel.layout` returns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Guided:
    """Decodes as `decoder` does, under matchers on the host.

    Attributes:
      decoder: decodes a step.
      begin: for each row, makes a matcher of an empty text; None for rows whose text is free.
      prompt_length: [B], where the output of each row begins.
    """

    decoder: Decoder
    begin: Sequence[Callable[[], Matcher] | None]
    prompt_length: np.ndarray

    def prefill(self, params: Params, *prompt: Any, **inputs: Any) -> DecodeState:
        """Reads the prompts as `Decoder.prefill` does."""
        return self.decoder.prefill(params, *prompt, **inputs)

    def run(
        self, params: Params, state: DecodeState, max_steps: int | Array = _FOREVER
    ) -> DecodeState:
        """Steps as `Decoder.run` does.

        Raises:
          ValueError: nothing may follow a text, or its matcher gave up.
        """
        return self._steps(params, state, self._matchers(state), int(max_steps))

    def stream(
        self, params: Params, state: DecodeState, steps_per_chunk: int = 8
    ) -> Generator[DecodeState, Array | np.ndarray | None, None]:
        """Yields states as `Decoder.stream` does, with the errors of `run`."""
        matchers = self._matchers(state)
        while not to_host(state.done).all():
            state = self._steps(params, state, matchers, steps_per_chunk)
            stop = yield state
            if stop is not None:
                state = dataclasses.replace(state, done=state.done | jnp.asarray(stop))

    def _matchers(self, state: DecodeState) -> Matchers:
        tokens, length, ends = to_host((state.tokens, state.length, state.eos))
        rows = [None if begin is None else begin() for begin in self.begin]
        made = Matchers(rows, ends, words_of(self.decoder.target.vocab_size))
        count = length - self.prompt_length
        output = np.zeros((len(rows), max(1, int(count.max()))), np.int32)
        for row, (start, end) in enumerate(zip(self.prompt_length, length, strict=True)):
            output[row, : end - start] = tokens[row, start:end]
        made.observe(output, count)
        return made

    def _steps(
        self, params: Params, state: DecodeState, matchers: Matchers, most: int
    ) -> DecodeState:
        at, nodes, done = layout(state), self.decoder.proposer.num_nodes, to_host(state.done)
        for _ in range(most):
            if done.all():
                break
            proposal, state = _propose(self.decoder, at, params, state)
            masks = matchers.roots(nodes, done)  # while the device drafts
            tokens, parent = to_host((proposal.tokens, proposal.parent))
            masks = matchers.tree(masks, tokens, parent, done)
            state, said = _verify(self.decoder, at, params, state, proposal, masks)
            emitted, count, done = to_host(said)
            matchers.observe(emitted, count)
        return state


def _kind(_: Params, state: DecodeState, *more: object) -> tuple[object, ...]:
    return state.tokens.shape, state.eos.shape, structure_of(state.processors)


@programs(static=2, shape=_kind, donate=(3,))
def _propose(
    decoder: Decoder, layout: _Layout, params: Params, state: DecodeState
) -> tuple[Proposal, DecodeState]:
    proposal, state = decoder.propose(params, state)
    return proposal, constrain_like(state, layout)


@programs(static=2, shape=_kind, donate=(3,))
def _verify(
    decoder: Decoder,
    layout: _Layout,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    masks: np.ndarray,
) -> tuple[DecodeState, tuple[Array, Array, Array]]:
    """Returns the state after the proposal, and for the host the tokens, their counts, and ends."""
    processors = Processors() if state.processors is None else state.processors
    masked = dataclasses.replace(
        state, processors=dataclasses.replace(processors, masks=jnp.asarray(masks))
    )
    verification = decoder.verify(params, masked, proposal)
    after, info = decoder.commit(params, masked, proposal, verification)
    processors = None
    if state.processors is not None:
        processors = dataclasses.replace(after.processors, masks=None)
    after = constrain_like(dataclasses.replace(after, processors=processors), layout)
    # Copies, since the next program reuses the buffers of the state.
    return after, (info.tokens, info.count, after.done | False)
