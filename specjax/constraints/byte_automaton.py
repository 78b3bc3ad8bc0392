"""Automata over bytes: the texts of an expression, a schema or a list, in UTF-8."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from specjax._internal.extras import need
from specjax.constraints.automaton import ENDLESS, fewest_steps
from specjax.text import ask
from specjax.types import ABSENT

_ROUNDS = 64  # of merging equal states


@dataclasses.dataclass(frozen=True, eq=False)
class Bytes:
    """The texts that are allowed, as an automaton over bytes.  State 0 is the start."""

    next: np.ndarray  # [S, 256] int32; -1 where a byte may not follow
    accepting: np.ndarray  # [S] bool

    @property
    def used(self) -> bytes:
        """The bytes that some text may contain."""
        return bytes(np.flatnonzero((self.next >= 0).any(0)).tolist())

    def example(self) -> bytes | None:
        """Returns a shortest text, or None if there is none."""
        before: dict[int, tuple[int, int]] = {}
        frontier, seen = [0], {0}
        while frontier:
            for state in frontier:
                if self.accepting[state]:
                    text = []
                    while state in before:
                        state, byte = before[state]
                        text.append(byte)
                    return bytes(reversed(text))
            reached = []
            for state in frontier:
                for byte in np.flatnonzero(self.next[state] >= 0).tolist():
                    after = int(self.next[state, byte])
                    if after not in seen:
                        seen.add(after)
                        before[after] = state, byte
                        reached.append(after)
            frontier = reached
        return None

    def forced(self, state: int, most: int) -> bytes:
        """Returns the bytes that must follow a state, at most `most` of them."""
        text = bytearray()
        while len(text) < most and not self.accepting[state]:
            ways = np.flatnonzero(self.next[state] >= 0)
            if len(ways) != 1:
                break
            text.append(int(ways[0]))
            state = int(self.next[state, ways[0]])
        return bytes(text)


def trimmed(automaton: Bytes) -> Bytes:
    """Removes the bytes after which no text can be completed."""
    kinds, kind_of = np.unique(automaton.next, axis=1, return_inverse=True)
    lost = fewest_steps(kinds, automaton.accepting) == ENDLESS
    kinds = np.where((kinds < 0) | lost[kinds], ABSENT, kinds)
    return Bytes(kinds[:, kind_of.ravel()], automaton.accepting)


def merged(automaton: Bytes) -> Bytes:
    """Merges states that are equal: they accept alike, and every byte leads to the same state."""
    table, accepting = automaton.next, automaton.accepting
    for _ in range(_ROUNDS):
        rows = np.concatenate([table, accepting[:, None]], axis=1).astype(np.int32)
        # The first of equal states stays, so state 0 does.
        known: dict[bytes, int] = {}
        to = np.array([known.setdefault(row.tobytes(), len(known)) for row in rows])
        if len(known) == len(table):
            break
        kept = np.unique(to, return_index=True)[1]
        table, accepting = table[kept], accepting[kept]
        table = np.where(table < 0, ABSENT, to[table]).astype(np.int32)
    return Bytes(table, accepting)


def of_texts(texts: Iterable[str]) -> Bytes:
    """Makes the automaton of these texts: a tree of their prefixes, with equal endings merged."""
    table, accepting = [[ABSENT] * 256], [False]
    for text in texts:
        state = 0
        for byte in text.encode():
            if table[state][byte] < 0:
                table[state][byte] = len(table)
                table.append([ABSENT] * 256)
                accepting.append(False)
            state = table[state][byte]
        accepting[state] = True
    return merged(Bytes(np.array(table, np.int32), np.array(accepting)))


def ascii_digits(expression: str) -> str:
    """Returns an expression in which \\d is one of 0 to 9, and not any of Unicode's 700 digits."""
    return re.sub(r"\\(.)", lambda m: "[0-9]" if m[1] == "d" else m[0], expression, flags=re.DOTALL)


def absent_from(expression: str) -> str:
    r"""Returns U+0000 if no text of an expression has it, or "" if its elements do not show that:
    it has ".", a complement, or an escape other than those of a few kinds of characters.
    """
    parts, depth = re.findall(r"\\.|\[[\^:]?|.", expression, flags=re.DOTALL), 0
    for part in parts:
        depth = max(0, depth + (part == "[") - (part == "]"))
        if (part == "." and not depth) or re.fullmatch(r"\0|\[[\^:]|\\[^dfnrstvw\W]", part):
            return ""
    return "\0"


@functools.lru_cache(maxsize=64)
def _asked(request: str, subject: str) -> dict[str, Any]:
    need("outlines_core", subject, "constrain")
    refusals = {
        "refused": "cannot be compiled: {}; it must be a regular expression of Rust's regex, "
        "without look-around, back-references and \\b",
        "many": "needs more than {} states: bound its repetitions, or make them unbounded "
        "(* instead of {{0,1000}})",
    }
    return ask("expressions", subject, "write a smaller one", request.encode(), refusals)


def of_expression(subject: str, expression: str, absent: str = "") -> Bytes:
    """Compiles an expression in the syntax of Rust's `regex` with outlines_core.

    Args:
      subject: for messages.
      expression: the expression that the texts match, from their first to their last character.
      absent: a character that is in none of the texts, if one is known.  With it the compiler does
        not search for texts that begin later, which can take exponentially many states.

    Raises:
      ValueError: outlines_core is missing or refuses it, it has too many states, or compiling takes
        too long or too much memory.  It is compiled in a process with limits.
    """
    request = {"expression": expression, "absent": absent}
    answer = _asked(json.dumps(request), subject)
    if not answer["states"]:
        return of_texts(())
    table = np.frombuffer(base64.b64decode(answer["table"]), np.dtype("<i2")).reshape(-1, 256)
    table = np.vstack([table, np.full((1, 256), ABSENT)]).astype(np.int32)  # of state -1
    ended = np.zeros(len(table), bool)
    ended[answer["ended"]] = True
    # A text is complete where its end may follow.
    after = np.arange(len(table))
    for byte in answer["end"].encode():
        after = table[after, byte]
    return merged(trimmed(Bytes(table[:-1], ended[after][:-1])))
