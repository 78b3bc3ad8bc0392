"""Measures the seconds of a step by the number of tokens that the target reads of each row."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax._internal.checks import within
from specjax.contract import ArrayTree
from specjax.decoding import Decoder
from specjax.measure import Sample, Timed, medians, take_turns
from specjax.methods import Drafter
from specjax.models import LanguageModel
from specjax.parallel import mesh_of, row_parts
from specjax.proposers import CostAware, CostAwareParams
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.types import Params

_STEPS, _PROMPT = 16, 32


class _Width(Timed):
    """Forces steps in which the target reads `width` tokens of each row.

    All other widths get a cost without bound, so the one program of all widths takes this one.
    """

    def __init__(
        self,
        decoder: Decoder,
        target: ArrayTree,
        inner: ArrayTree,
        rows: int,
        width: int,
        temperature: float,
    ) -> None:
        super().__init__(f"{width} nodes", 1)
        self._decoder, self._rows, self._temperature = decoder, rows, temperature
        assert isinstance(decoder.proposer, CostAware)
        seconds = [1.0 if other == width else np.inf for other in decoder.proposer.widths]
        self._params = Params(target, CostAwareParams(inner, jnp.array(seconds)))

    def run(self, item: int) -> Sample:
        seconds = step_seconds(
            self._decoder, self._params, self._rows, _PROMPT, _STEPS, self._temperature
        )
        return Sample(seconds)


def step_seconds(
    decoder: Decoder, params: Params, rows: int, length: int, steps: int, temperature: float = 0.0
) -> float:
    """Returns the mean seconds of the first `steps` steps after random prompts [rows, length].

    The decoder's capacity holds all drafts of these steps, and it has no EOS.
    """
    prompts = np.random.default_rng(0).integers(
        0, decoder.target.vocab_size, (rows, length), np.int32
    )
    state = decoder.prefill(
        params,
        prompts,
        np.full(rows, length, np.int32),
        limit=np.full(rows, decoder.capacity, np.int32),
        sampling=Sampling.create(rows, temperature=temperature),
        key=jax.random.split(make_key(0), rows),
    )
    jax.block_until_ready(state)
    started = time.perf_counter()
    jax.block_until_ready(decoder.run(params, state, steps))
    return (time.perf_counter() - started) / steps


def step_costs(
    target: LanguageModel,
    drafter: Drafter,
    widths: Sequence[int],
    *,
    batch: int = 1,
    rounds: int = 5,
    temperature: float = 0.0,
) -> dict[int, float]:
    """Measures the seconds of a whole step (draft, verify, commit), for `specjax.cost_aware`.

    All widths are in one program, which is compiled once, and take turns.  A sample that other
    processes disturbed is dropped.

    Args:
      target: the model.
      drafter: a drafter of trees for it.
      widths: numbers of nodes that the target reads of each row, the root included; the greatest
        is that of the drafter.
      batch: rows.
      rounds: samples of each width.
      temperature: of all rows; above 0 every draft needs noise, which takes time.

    Returns:
      The median seconds of each width; a wider step never counts as cheaper than a narrower one.

    Raises:
      ValueError: widths that the drafter does not have, or a drafter of another target.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> numbers = {"depth": 2, "width": 2, "num_nodes": 4}
      >>> tree = specjax.make_drafter(target, draft, specjax.DynamicTree, **numbers)
      >>> sorted(specjax.step_costs(target, tree, widths=(2, 4), rounds=1))  # nodes: seconds
      [2, 4]
    """
    proposer = CostAware(drafter.proposer, tuple(widths))
    for name, value in (("batch", batch), ("rounds", rounds)):
        within(name, value, 1)
    rows = -(-batch // row_parts(mesh_of(target.params))) * row_parts(mesh_of(target.params))
    room = _PROMPT + (_STEPS + 1) * (proposer.max_depth + 1)
    most = target.model.max_positions + 1
    if room > most:
        raise ValueError(
            f"{target.name} reads {most - 1} tokens, and a measurement needs {room - 1}: pass a "
            "drafter of less depth"
        )
    decoder = Decoder(target.model, proposer, Match(), (), max(room, proposer.num_nodes))
    inner = drafter.arrays(target, rows)
    entries = [
        _Width(decoder, target.params, inner, rows, width, temperature) for width in proposer.widths
    ]
    entries[0].run_first()
    take_turns(entries, rounds)
    for entry in entries:
        while not entry.seconds[
            0
        ]:  # every sample was disturbed: a disturbed one is better than none
            entry.seconds[0].append(entry.run(0).seconds)
    found = np.maximum.accumulate(medians([entry.seconds[0] for entry in entries]))
    return dict(zip(proposer.widths, found.tolist(), strict=True))
