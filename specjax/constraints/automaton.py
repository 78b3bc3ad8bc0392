"""Automata over tokens: the state of a text determines which tokens may follow it.

    regular expression or schema, and a vocabulary -> Automaton, one, on the host
    B of them, each with its state                 -> Automata, on the device, axis 0 is the row

Tokens that lead from every state to the same states are of one *class*.  So a table of states and
classes, and the class of each token, define the automaton: 200 states of 120 classes are 94 KB.

A node's state follows from its row's state and the drafts on its path.  So every node has the mask
of its own text, and the emitted text does not depend on the drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.bit_masks import keep
from specjax._internal.checks import items, shown, whole
from specjax.types import ABSENT

ENDLESS = 2**30
"""The length, in tokens, of a text that may go on for ever; lengths can be added to it."""

_Host = Array | np.ndarray  # NumPy arrays on the host until `prefill`
_STATES, _CLASSES = (256, 4), (128, 2)
"""The sizes of tables: the least one, and the factor to the next.  Tables of two automata mostly
have the same size, and so use the same program.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """The texts that a row may emit, as an automaton over the tokens of a vocabulary.

    Only states from which a text can be completed are entered, even if the table has others.

    Attributes:
      classes: [V] int32, the class of each token.
      next: [S, C] int32, the state after a token of each class; -1 where it may not follow.
      accepting: [S] bool, the states in which a text is complete.  EOS may follow only there.
      start: the state of an empty text.
      likely: [S] int32, a token to draft in each state, or -1; by default the only token that may
        follow, where there is one.  It changes no text.
    """

    classes: np.ndarray
    next: np.ndarray
    accepting: np.ndarray
    start: int = 0
    likely: np.ndarray | None = None
    shortest: np.ndarray = dataclasses.field(init=False, repr=False)  # [S] tokens to complete it
    longest: np.ndarray = dataclasses.field(init=False, repr=False)  # [S] the most that can follow

    def __post_init__(self) -> None:
        table, classes = np.array(self.next, np.int32), np.array(self.classes, np.int32)
        accepting = np.array(self.accepting, bool)
        if table.ndim != 2 or classes.ndim != 1 or accepting.shape != (len(table),):
            raise ValueError(
                f"an automaton with classes {classes.shape}, next {table.shape} and accepting "
                f"{accepting.shape}; pass [tokens], [states, classes] and [states]"
            )
        states, kinds = table.shape
        whole("start", self.start, 0, states - 1, f"a state, in [0, {states - 1}]")
        for name, values, least, most in (
            ("classes", classes, 0, kinds - 1),
            ("next", table, ABSENT, states - 1),
        ):
            if values.size == 0 or values.min() < least or values.max() > most:
                raise ValueError(f"{name} of an automaton has a number outside [{least}, {most}]")
        # Padding of other classes has no token, and does not count as a way on.
        table[:, np.bincount(classes, minlength=kinds) == 0] = ABSENT
        shortest = fewest_steps(table, accepting)
        if shortest[self.start] == ENDLESS:
            raise ValueError("the automaton accepts no text: no accepting state can be reached")
        table[np.where(table < 0, ENDLESS, shortest[table]) == ENDLESS] = ABSENT
        likely = _only(table, classes, accepting) if self.likely is None else self.likely
        likely = np.array(likely, np.int32)
        if likely.shape != (states,) or likely.max() >= len(classes):
            raise ValueError(f"likely of an automaton is {shown(likely)}; pass [states] of tokens")
        for name, value in (
            ("classes", classes), ("next", table), ("accepting", accepting), ("likely", likely),
            ("shortest", shortest), ("longest", _longest(table)),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        transitions: Sequence[Mapping[int, int]],
        accepting: Iterable[int],
        vocab_size: int,
        start: int = 0,
    ) -> Self:
        """Makes an automaton from {token: next state} of each state, and the accepting states.

        Raises:
          ValueError: a token or a state that does not exist, or no text is accepted.

        Example:
          >>> evens = Automaton.of([{0: 1}, {0: 0}], accepting=[0], vocab_size=2)
        """
        listed = items(transitions)
        if not listed or not all(isinstance(ways, Mapping) for ways in listed):
            raise ValueError(
                f"transitions={shown(transitions)}; pass a list with {{token: next state}} of "
                "each state"
            )
        states, last = len(listed), vocab_size - 1
        table = np.full((states, vocab_size), ABSENT, np.int32)
        for state, ways in enumerate(listed):
            for token, after in ways.items():
                token = whole("a token of transitions", token, 0, last, f"in [0, {last}]")
                table[state, token] = whole(
                    "a state of transitions", after, 0, states - 1, f"in [0, {states - 1}]"
                )
        complete = np.zeros(states, bool)
        wanted = f"a state, in [0, {states - 1}]"
        complete[[whole("accepting", s, 0, states - 1, wanted) for s in accepting]] = True
        columns, classes = np.unique(table, axis=1, return_inverse=True)
        return cls(classes.ravel(), columns, complete, start)

    @property
    def vocab_size(self) -> int:
        """V, the size of the vocabulary."""
        return len(self.classes)

    def without(self, tokens: Iterable[int]) -> Automaton:
        """Returns the automaton of the texts without these tokens, which end a row.

        Raises:
          ValueError: no such text exists.
        """
        ends = [token for token in tokens if (self.next[:, self.classes[token]] >= 0).any()]
        if not ends:
            return self
        classes = self.classes.copy()
        classes[ends] = self.next.shape[1]
        never = np.full((len(self.next), 1), ABSENT, np.int32)
        likely = np.where(np.isin(self.likely, ends), ABSENT, self.likely)  # type: ignore[arg-type]
        table = np.concatenate([self.next, never], axis=1)
        return Automaton(classes, table, self.accepting, self.start, likely)


def fewest_steps(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Returns [S] the fewest steps from each state to an accepting one, or ENDLESS.

    Args:
      table: [S, C] int32, the states that follow; -1 for none.
      accepting: [S] bool.
    """
    found = np.where(accepting, 0, ENDLESS).astype(np.int32)
    left, steps = np.flatnonzero(~accepting), 0
    while left.size:
        steps += 1
        ways = table[left]
        reached = ((ways >= 0) & (found[ways] == steps - 1)).any(1)
        if not reached.any():
            break
        found[left[reached]] = steps
        left = left[~reached]
    return found


def _longest(table: np.ndarray) -> np.ndarray:
    """Returns [S] the most tokens after each state, or ENDLESS where there is a cycle."""
    found = np.full(len(table), ENDLESS, np.int32)
    left = np.arange(len(table))
    while left.size:
        ways = table[left]
        after = np.where(ways < 0, -1, found[ways]).max(1)
        known = after < ENDLESS
        if not known.any():
            break
        found[left[known]] = after[known] + 1
        left = left[~known]
    return found


def _only(table: np.ndarray, classes: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Returns [S] the only token that may follow each state, EOS included, or -1 if several may."""
    counts = np.bincount(classes, minlength=table.shape[1])
    single = ((table >= 0) * counts).sum(1) == 1
    token = np.zeros(table.shape[1], np.int32)
    token[classes] = np.arange(len(classes))
    way = (table >= 0).argmax(1)
    return np.where(single & ~accepting, token[way], ABSENT)


@struct.dataclass
class Automata:
    """The automata of B rows, and the state of each row.  Axis 0 of every leaf is the row.

    State 0 allows everything: it is the state of rows without an automaton, and after EOS.  Class 0
    is EOS.
    """

    classes: _Host  # [B, V] int32
    next: _Host  # [B, S, C] int32, with S and C padded: see `size_of`
    shortest: _Host  # [B, S] int32
    longest: _Host  # [B, S] int32
    likely: _Host  # [B, S] int32
    state: _Host  # [B] int32

    @classmethod
    def of_rows(
        cls,
        automata: Sequence[Automaton | None],
        vocab_size: int,
        size: tuple[int, int] | None = None,
    ) -> Automata:
        """Makes the automata of the rows, still on the host; None constrains nothing.

        Args:
          automata: of each row.
          vocab_size: V, of the target.
          size: S and C, if they must be larger than these automata need, so that a row with
            another automaton can be put into the batch.

        Raises:
          ValueError: an automaton of another vocabulary, or one that is larger than `size`.
        """
        needed = size_of(automata)
        states, kinds = needed if size is None else size
        if needed[0] > states or needed[1] > kinds:
            raise ValueError(
                f"automata of the size {needed} do not fit into the size {(states, kinds)}: "
                "raise constraint_size"
            )
        rows = len(automata)
        classes = np.ones((rows, vocab_size), np.int32)
        table = np.full((rows, states, kinds), ABSENT, np.int32)
        shortest, longest, likely = (np.zeros((rows, states), np.int32) for _ in range(3))
        start = np.zeros(rows, np.int32)
        table[:, 0], longest[:, 0], likely[:, 0] = 0, ENDLESS, ABSENT
        for row, one in enumerate(automata):
            if one is None:
                continue
            if one.vocab_size != vocab_size:
                raise ValueError(
                    f"the automaton of row {row} is for {one.vocab_size} tokens, and the target "
                    f"has {vocab_size}: compile it for this target"
                )
            classes[row] = one.classes + 1
            own = slice(1, len(one.next) + 1)
            table[row, own, 1 : one.next.shape[1] + 1] = np.where(one.next < 0, -1, one.next + 1)
            table[row, own, 0] = np.where(one.accepting, 0, ABSENT)
            shortest[row, own], longest[row, own] = one.shortest, one.longest
            assert one.likely is not None  # the automaton filled it in
            likely[row, own] = one.likely
            start[row] = one.start + 1
        return cls(classes, table, shortest, longest, likely, start)

    def begin(self, eos: Array) -> Automata:
        """Returns the automata with the rows' end tokens `eos` [B, ids] (padded with ABSENT)."""
        at = jnp.where(eos < 0, self.classes.shape[1], eos)
        classes = (
            jnp.asarray(self.classes).at[jnp.arange(len(eos))[:, None], at].set(0, mode="drop")
        )
        ends = jnp.where((eos >= 0).any(1)[:, None], self.next[:, :, 0], ABSENT)
        return dataclasses.replace(
            self, classes=classes, next=jnp.asarray(self.next).at[:, :, 0].set(ends)
        )

    def observe(self, emitted: Array, count: Array) -> Automata:
        """Returns the automata after the first `count` [B] of the tokens `emitted` [B, T]."""
        tokens = jnp.where(jnp.arange(emitted.shape[1]) < count[:, None], emitted, ABSENT)
        return dataclasses.replace(self, state=self.after(tokens[:, None])[:, 0])

    def after(self, path: Array) -> Array:
        """Maps [B, M, D] tokens, padded with ABSENT, to the [B, M] states after them."""

        def row(classes: _Host, table: _Host, start: _Host, path: Array) -> Array:
            kinds = classes[jnp.maximum(path, 0)]

            def step(state: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
                token, kind = at
                # Nothing is emitted after a token that may not follow.
                return jnp.where(token < 0, state, jnp.maximum(table[state, kind], 0)), None

            along = jnp.moveaxis(path, -1, 0), jnp.moveaxis(kinds, -1, 0)
            begun = jnp.broadcast_to(start, path.shape[:-1])
            return jax.lax.scan(step, begun, along, unroll=max(1, min(8, path.shape[-1])))[0]

        return jax.vmap(row)(self.classes, self.next, self.state, path)

    def allow(
        self, logits: Array, path: Array, length: Array, limit: Array, least: _Host | int
    ) -> Array:
        """Returns the logits [B, M, V] of M nodes, with -inf for tokens that may not follow.

        A token may follow if the text can be completed within the row's limit, and if it can still
        reach `least` tokens, where that is possible.  If other settings ban all tokens that may
        follow, these tokens are equally probable.

        Args:
          logits: float32, after each node.
          path: [B, M, D] tokens from below the root to each node, padded with ABSENT.
          length: [B] of the text up to the root.
          limit: [B] the row's greatest length.
          least: [B] or a number, the length of the text before which EOS is banned.
        """
        allowed = self._ways(path, length, limit, least)
        rows, nodes, kinds = allowed.shape
        # A bit a node, so that a class is looked up once a token and not once a token and node.
        words = -(-nodes // 32)
        bits = jnp.pad(allowed, ((0, 0), (0, 32 * words - nodes), (0, 0))).astype(jnp.uint32)
        shift = jnp.arange(32, dtype=jnp.uint32)[:, None]
        bits = (bits.reshape(rows, words, 32, kinds) << shift).sum(2, dtype=jnp.uint32)
        word = jax.vmap(lambda bits, classes: bits[:, classes])(bits, self.classes)
        kept = jnp.concatenate(
            [(word[:, at, None] >> shift[: nodes - 32 * at]) & 1 for at in range(words)], axis=1
        )
        return keep(logits, kept > 0)

    def _ways(self, path: Array, length: Array, limit: Array, least: _Host | int) -> Array:
        """Returns [B, M, C] bool: True if a token of each class may follow each node."""
        ways = _rows(self.next, self.after(path))
        least = jnp.broadcast_to(least, length.shape)[:, None, None]
        to = jnp.maximum(ways, 0)
        shortest, longest = (
            jax.vmap(lambda of, to: of[to])(x, to) for x in (self.shortest, self.longest)
        )
        here = (length[:, None] + (path >= 0).sum(-1, dtype=jnp.int32))[..., None]
        is_end = jnp.arange(ways.shape[-1]) == 0
        allowed = ways >= 0
        # A node beyond the limit has no way left; its tokens are not emitted, but its
        # probabilities have to be numbers.
        for wish in (
            here + 1 + shortest <= limit[:, None, None],
            jnp.where(is_end, here, here + 1 + longest) >= least,
        ):
            narrowed = allowed & wish
            allowed = jnp.where(narrowed.any(-1, keepdims=True), narrowed, allowed)
        return allowed | ~allowed.any(-1, keepdims=True)

    def drafts(self, depth: int, eos: Array) -> tuple[Array, Array]:
        """Returns the tokens that are likely to follow, up to the first state with a choice.

        Args:
          depth: D.
          eos: [B, ids], the tokens that end each row.

        Returns:
          Tokens [B, D] int32, and their number [B].
        """
        state, on, tokens = self.state, jnp.ones(len(eos), bool), []
        count = jnp.zeros(len(eos), jnp.int32)
        for _ in range(depth):
            likely, longest = (
                jnp.take_along_axis(x, state[:, None], axis=1)[:, 0]
                for x in (self.likely, self.longest)
            )
            token = jnp.where(longest == 0, eos[:, 0], likely)
            on = on & (token >= 0)
            count = count + on
            tokens.append(jnp.where(on, token, 0))
            state = dataclasses.replace(self, state=state).after(tokens[-1][:, None, None])[:, 0]
        return jnp.stack(tokens, axis=1).astype(jnp.int32), count


def _rows(x: _Host, index: Array) -> Array:
    """Gathers rows of [B, S, C] at the indices [B, M]: [B, M, C]."""
    return jax.vmap(lambda x, index: x[index])(x, index)


def size_of(automata: Sequence[Automaton | None]) -> tuple[int, int]:
    """Returns the padded numbers of states and classes, S and C, that hold these automata."""
    given = [one for one in automata if one is not None]
    states = max((len(one.next) + 1 for one in given), default=1)
    kinds = max((one.next.shape[1] + 1 for one in given), default=2)

    def padded(needed: int, size: int, factor: int) -> int:
        while size < needed:
            size *= factor
        return size

    return padded(states, *_STATES), padded(kinds, *_CLASSES)
