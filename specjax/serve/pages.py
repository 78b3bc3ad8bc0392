"""`PageStore`: who holds which page of the caches, and the prompts whose pages are kept.

    free        pages that nobody holds
    rows        each row holds the pages of its text
    tree        prompts by their beginnings: a node is a full page of a prompt that was read

    "You are a helpful ... " [page 4] - "assistant. Write ..." [page 7]
                                      - "assistant. Say ..."   [page 9]

Where a beginning cannot be cut out of a reading (recurrent states, rings of sliding windows), the
tree has snapshots at the ends of some pages, and a prompt goes on from the last one on its path:
those at the end of a prompt, and where a prompt left the path of an earlier one.

A page goes into the tree when its prompt has been read and every token of it is committed, so
nobody writes it any more, and all rows whose prompts begin alike may hold it.  Drafts and new
tokens never go into the tree: a decoding step rounds otherwise than the reading of a prompt, and a
text may not depend on who came before.  If pages run out, the leaves of the tree that were not used
for the longest time go, unless a row holds them.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

import numpy as np

_Root = tuple[str | None, frozenset[int]]
"""A `cache_salt`, and the drafters that have read the prompts."""


@dataclasses.dataclass(eq=False)
class _Node:
    """A page of a prompt in the tree."""

    page: int  # 0 in a root
    parent: _Node | None = None
    key: bytes = b""  # its tokens, and the `lag` tokens after them
    # Of a whole prompt through this page, from which a row can begin; with snapshots, the reading
    # that ends with this page, or None.
    reading: Any = None
    used: int = 0  # the time of its last use
    children: dict[bytes, _Node] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Known:
    """The beginning of a prompt whose pages are in the tree.

    With snapshots, `seen` is the number of pages up to which earlier prompts were the same, where a
    snapshot would help later ones.
    """

    pages: list[int]
    reading: Any
    seen: int = 0


class PageStore:
    """Counts the holders of each page, and finds prompts that begin alike."""

    def __init__(
        self, count: int, page: int, chunk: int = 1, lag: int = 0, snapshots: int | None = None
    ) -> None:
        """Makes a store in which all pages are free.

        Args:
          count: pages, without the page 0, which is nobody's.
          page: tokens of a page.
          chunk: prompts share a multiple of it: the tokens of a pass that reads prompts.
          lag: tokens after a page on which the drafters' keys and values in it depend.
          snapshots: the most that are kept; None: readings can be cut.
        """
        self.count, self.page, self.lag, self.snapshots = count, page, lag, snapshots
        self.step = math.lcm(page, chunk)
        self._free = list(range(count, 0, -1))
        self._holders = [0] * (count + 1)
        self._in_tree = [0] * (count + 1)
        self._roots: dict[_Root, _Node] = {}
        self._time = 0

    @property
    def free(self) -> int:
        """The number of pages that nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """The number of pages that `take` can give: the free ones, and those of the tree."""
        kept = zip(self._holders, self._in_tree, strict=True)
        return len(self._free) + sum(held == own > 0 for held, own in kept)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page)

    def take(self, count: int, spare: int = 0) -> list[int] | None:
        """Returns pages for a row, which holds them now.

        Args:
          spare: the pages that others may need soon.

        Returns:
          None if fewer than `count` and `spare` pages are available.
        """
        if count + spare > len(self._free):
            if count + spare > self.available:
                return None
            self._evict(max(0, count - len(self._free)))
        taken = [self._free.pop() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, pages: list[int]) -> None:
        """Adds a row to the holders of pages."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Takes a row from the holders of pages; those without a holder are free."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def find(self, salt: str | None, uses: frozenset[int], tokens: np.ndarray) -> Known | None:
        """Returns the longest known beginning of a prompt.

        At least one token is left to read, since a drafter may need the hidden state of the last.

        Args:
          salt: prompts of different salts share nothing.
          uses: the drafters that need their own keys and values of the prompt.
        """
        best: list[_Node] = []
        whole = max(0, len(tokens) - 2) // self.step * (self.step // self.page)
        for (salted, used), root in self._roots.items():
            if salted != salt or not uses <= used:
                continue
            path = self._path(root, tokens, whole)
            if len(path) > len(best):
                best = path
        if not best:
            return None
        for node in best:
            self._touch(node)
        seen = len(best)
        if self.snapshots is not None:
            while best and best[-1].reading is None:
                best.pop()
        pages = [node.page for node in best]
        return Known(pages, best[-1].reading if best else None, seen)

    def keep(
        self,
        salt: str | None,
        uses: frozenset[int],
        tokens: np.ndarray,
        pages: list[int],
        reading: Any,
    ) -> None:
        """Puts the full pages of a prompt that was read into the tree.

        Args:
          tokens: the prompt; its last token is pending, so it has no keys and values yet.
          pages: of the row.
          reading: of the prompt, or its snapshots by the number of their tokens.
        """
        node = self._roots.setdefault((salt, uses), _Node(0))
        for index in range(self.committed(len(tokens))):
            key = self._key(tokens, index)
            child = node.children.get(key)
            if child is None:
                child = _Node(pages[index], node, key)
                child.reading = reading if self.snapshots is None else None
                node.children[key] = child
                self.hold([child.page])
                self._in_tree[child.page] += 1
            node = child
            if self.snapshots is not None and node.reading is None:
                node.reading = reading.get((index + 1) * self.page)
            self._touch(node)
        if self.snapshots is not None:
            having = [node for node in self._nodes() if node.reading is not None]
            for node in sorted(having, key=lambda node: node.used)[: -self.snapshots]:
                node.reading = None

    def clear(self) -> None:
        """Takes all prompts out of the tree, as if none had been read."""
        for node in self._nodes():
            self._in_tree[node.page] -= 1
            self.release([node.page])
        self._roots.clear()

    def committed(self, tokens: int) -> int:
        """Returns how many pages of a prompt of `tokens` tokens nothing will write any more."""
        return max(0, tokens - 1 - self.lag) // self.page

    def shared(self, page: int) -> bool:
        """Returns whether a page is in the tree."""
        return self._in_tree[page] > 0

    def _key(self, tokens: np.ndarray, index: int) -> bytes:
        return tokens[index * self.page : (index + 1) * self.page + self.lag].tobytes()

    def _path(self, root: _Node, tokens: np.ndarray, most: int) -> list[_Node]:
        """Returns the nodes of a beginning, a multiple of `step` of its tokens."""
        node, path = root, []
        for index in range(min(most, self.committed(len(tokens)))):
            child = node.children.get(self._key(tokens, index))
            if child is None:
                break
            node = child
            path.append(node)
        each = self.step // self.page
        return path[: len(path) // each * each]

    def _touch(self, node: _Node) -> None:
        self._time += 1
        node.used = self._time

    def _nodes(self) -> list[_Node]:
        found, left = [], [node for root in self._roots.values() for node in root.children.values()]
        while left:
            node = left.pop()
            found.append(node)
            left += node.children.values()
        return found

    def _evict(self, count: int) -> None:
        """Frees at least `count` pages of the tree; the caller knows that there are as many."""
        heap: list[tuple[bool, int, int, _Node]] = []

        def add(node: _Node) -> None:
            # A page that a row holds is not freed, but may keep others in the tree.
            held = self._holders[node.page] > self._in_tree[node.page]
            heapq.heappush(heap, (held, node.used, id(node), node))

        for node in self._nodes():
            if not node.children:
                add(node)
        wanted = len(self._free) + count
        while len(self._free) < wanted:
            node = heapq.heappop(heap)[-1]
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self._in_tree[node.page] -= 1
            self.release([node.page])
            if parent.parent is not None and not parent.children:
                add(parent)
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]
