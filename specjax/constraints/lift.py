"""Lifts an automaton over bytes to the tokens of a vocabulary.

A token leads from a state to the state after its bytes.  All tokens are followed at once, from all
states, a byte at a time.  Prefixes of tokens that lead from every state to the same states are one
column, so each of the few different columns is followed by each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specjax.constraints.automaton import Automaton
from specjax.constraints.byte_automaton import Bytes
from specjax.types import ABSENT

_FORCED = 128  # the most forced bytes that are spelt


def lift(automaton: Bytes, written: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the class of each token [V] and the states after each class [S, C].

    Args:
      automaton: over bytes, S states.
      written: the bytes of each token; None for tokens without text.
    """
    # Bytes with equal columns, and a dead state that everything leads to.
    kinds, kind_of = np.unique(automaton.next, axis=1, return_inverse=True)
    kind_of = kind_of.ravel()
    states = len(automaton.next)
    table = np.vstack([kinds, np.full((1, kinds.shape[1]), states)]).astype(np.int32)
    table[table < 0] = states

    texts = [text or b"" for text in written]
    lengths = np.array([len(text) for text in texts])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    letters = kind_of[np.frombuffer(b"".join(texts), np.uint8)]
    columns = [np.arange(states, dtype=np.int32), np.full(states, states, np.int32)]
    numbers = {column.tobytes(): number for number, column in enumerate(columns)}
    moved: dict[int, int] = {}
    at = np.zeros(len(texts), np.int64)  # the column of each token's beginning
    for place in range(lengths.max(initial=0)):
        tokens = np.flatnonzero((lengths > place) & (at != 1))
        if not tokens.size:
            break
        pairs = at[tokens] * kinds.shape[1] + letters[starts[tokens] + place]
        unique, which = np.unique(pairs, return_inverse=True)
        reached = np.empty(len(unique), np.int64)
        for n, pair in enumerate(unique.tolist()):
            if pair not in moved:
                column = table[columns[pair // kinds.shape[1]], pair % kinds.shape[1]]
                moved[pair] = numbers.setdefault(column.tobytes(), len(columns))
                if moved[pair] == len(columns):
                    columns.append(column)
            reached[n] = moved[pair]
        at[tokens] = reached[which.ravel()]
    at[lengths == 0] = 1
    used, classes = np.unique(at, return_inverse=True)
    after = np.stack([columns[number] for number in used], axis=1)
    return classes.ravel().astype(np.int32), np.where(after == states, ABSENT, after)


def spelt(
    automaton: Bytes, written: Sequence[bytes | None], encode: Callable[[bytes], list[int]]
) -> np.ndarray:
    """Returns [S] the first token of the bytes that must follow each state, or -1.

    Args:
      automaton, written: as above.
      encode: maps a text to its tokens, as the tokenizer spells them.
    """
    single = {text: token for token, text in reversed(list(enumerate(written))) if text}
    longest = max(map(len, single), default=0)
    likely = np.full(len(automaton.next), ABSENT, np.int32)
    first: dict[bytes, int] = {}
    for state in range(len(likely)):
        text = automaton.forced(state, _FORCED)
        if not text:
            continue
        if text not in first:
            tokens = encode(text)
            if b"".join(written[token] or b"" for token in tokens) != text:
                # The longest token that begins the text.
                ends = range(min(longest, len(text)), 0, -1)
                tokens = [single[text[:end]] for end in ends if text[:end] in single]
            first[text] = tokens[0] if tokens else ABSENT
        likely[state] = first[text]
    return likely


def canonical(
    classes: np.ndarray, table: np.ndarray, likely: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns classes and states in which bytes that must follow are spelt only by `likely` tokens.

    Each text can still be emitted: these tokens spell a prefix of the bytes that must follow.
    """
    tokens = np.unique(likely[likely >= 0])
    own = np.full(len(classes), ABSENT)
    own[tokens] = table.shape[1] + np.arange(len(tokens))  # a class of its own for each
    table = np.concatenate([table, table[:, classes[tokens]]], axis=1)
    states = np.flatnonzero(likely >= 0)
    at = own[likely[states]]
    after = table[states, at]
    table[states] = ABSENT
    table[states, at] = after
    return np.where(own >= 0, own, classes).astype(np.int32), table


def reachable(automaton: Automaton) -> Automaton:
    """Removes the states inside of tokens, which no text reaches; few classes remain."""
    seen = np.zeros(len(automaton.next), bool)
    frontier = np.array([automaton.start])
    while frontier.size:
        seen[frontier] = True
        ways = np.unique(automaton.next[frontier])
        frontier = ways[(ways >= 0)]
        frontier = frontier[~seen[frontier]]
    kept = np.flatnonzero(seen)
    to = np.full(len(seen) + 1, ABSENT, np.int32)  # the last one is for ABSENT
    to[kept] = np.arange(len(kept))
    columns, merged = np.unique(to[automaton.next[kept]], axis=1, return_inverse=True)
    assert automaton.likely is not None
    return Automaton(
        merged.ravel()[automaton.classes],
        columns,
        automaton.accepting[kept],
        int(to[automaton.start]),
        automaton.likely[kept],
    )
