"""Constraints over the toy vocabulary, and what they mean, in plain Python."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import toy_models as toys
from toys import Toys

from specjax import Automaton

Spec = tuple[list[dict[int, int]], set[int]]
"""{token: next state} of each state, and the accepting states; 0 is the start."""


def spec_of(seed: int, states: int, density: float, vocab: int = toys.VOCAB) -> Spec:
    """A random automaton in which EOS is no text; its last state is accepting."""
    rng = np.random.default_rng(seed)
    ways = [
        {
            int(token): int(rng.integers(states))
            for token in rng.permutation(vocab)[: max(1, int(rng.poisson(density * vocab)))]
            if token != toys.EOS
        }
        for _ in range(states)
    ]
    for state in range(states - 1):  # every state leads on
        ways[state].setdefault(int(rng.integers(toys.EOS)), state + 1)
    return ways, {states - 1}


def fewest(spec: Spec) -> list[float]:
    """The fewest tokens from each state to an accepting one, by trying all lengths."""
    ways, accepting = spec
    found = [0.0 if state in accepting else np.inf for state in range(len(ways))]
    for _ in ways:
        found = [
            min([now, *(1 + found[after] for after in on.values())])
            for now, on in zip(found, ways, strict=True)
        ]
    return found


def most(spec: Spec) -> list[float]:
    """The most tokens that can follow each state and still be completed."""
    ways, _ = spec
    least = fewest(spec)
    found = [0.0] * len(ways)
    for turn in range(2 * len(ways) + 1):
        found = [
            max([0.0, *(1 + found[after] for after in on.values() if least[after] < np.inf)])
            for on in ways
        ]
        if turn == len(ways):
            once = found
    return [np.inf if later > before else before for before, later in zip(once, found, strict=True)]


def automaton(spec: Spec, vocab: int = toys.VOCAB) -> Automaton:
    return Automaton.of(spec[0], spec[1], vocab)


def allowed(
    spec: Spec, output: list[int], room: int, least: int = 0, eos: int = toys.EOS
) -> list[int]:
    """The tokens that may follow `output`; `room` is how many more a row may have."""
    ways, accepting = spec
    state = 0
    for token in output:
        state = ways[state][token]
    ends, starts = fewest(spec), most(spec)
    count = len(output)
    fit = [t for t, after in ways[state].items() if 1 + ends[after] <= room]
    wished = [t for t in fit if count + 1 + starts[ways[state][t]] >= least]
    if state in accepting and (count >= least or not wished):
        return [*wished, eos]
    return wished or fit


SPECS: list[Spec | None] = [
    None,
    # A token of six, two forced ones, a token of ten, and again.
    (
        [{t: 1 for t in range(6)}, {7: 2}, {8: 3}, {t: 0 for t in range(10, 20)}],
        {0},
    ),
    spec_of(3, 7, 0.3),
    # At most twelve tokens, of which every fourth is forced.
    (
        [
            {25: n + 1} if n % 4 == 3 else {(5 * n + k) % 22: n + 1 for k in range(7)}
            for n in range(12)
        ]
        + [{}],
        {4, 6, 11, 12},
    ),
]
"""What each row may write."""
LEAST = [0, 0, 4, 12]


def valid(spec: Spec | None, output: list[int], complete: bool = True) -> bool:
    """Is `output`, with its EOS, one of the texts?"""
    if spec is None:
        return True
    state, (ways, accepting) = 0, spec
    ended = bool(output) and output[-1] == toys.EOS
    for token in output[: len(output) - ended]:
        if token not in ways[state]:
            return False
        state = ways[state][token]
    return state in accepting or not complete


def process(
    row: int, text: list[int], logits: Any, specs: Any = None, least: Any = None
) -> np.ndarray:
    """The reference: the logits of a row after a text."""
    spec = (SPECS if specs is None else specs)[row]
    x = np.array(logits, np.float32)
    output = text[toys.LENGTHS[row] :]
    minimum = (LEAST if least is None else least)[row]
    if spec is None:
        x[[toys.EOS] if len(output) < minimum else []] = -np.inf
        return x
    kept = allowed(spec, output, int(toys.LIMITS[row]) - len(text), minimum)
    masked = np.full_like(x, -np.inf)
    masked[kept] = x[kept]
    return masked


@functools.cache
def naive(models: Toys) -> list[list[int]]:
    return models.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=process)
