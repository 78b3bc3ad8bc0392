"""The sequence of thunks of a program for a GPU, as XLA writes it.

A thunk is a kernel, a copy, a call of a library, a loop, a branch, or a CUDA graph of others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

GRAPH, LOOP, BRANCH = "kCommandBuffer", "kWhile", "kConditional"
CONTROL = {"root", LOOP, BRANCH, GRAPH, "kAsyncStart", "kAsyncDone", "kSequential"}
"""Thunks that launch nothing by themselves."""

_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<name>[\w.\-]*)")
_LABEL = re.compile(r"^(?P<indent> *)(?:No thunks\. *)?(?P<label>\w+):\s*$")


@dataclasses.dataclass
class Thunk:
    kind: str
    kernel: str
    blocks: int = 0  # of the kernel's grid
    instruction: str = ""  # of the optimised program
    label: str = ""  # of the part that is being read
    parts: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)

    def walk(self, captured: bool = False) -> Iterator[tuple[Thunk, bool]]:
        """Every thunk below, and whether it lies in a CUDA graph."""
        inside = captured or self.kind == GRAPH
        for part in self.parts.values():
            for thunk in part:
                yield thunk, inside
                yield from thunk.walk(inside)


def read_thunks(sequence: str, metadata: str) -> Thunk:
    """The root of the tree.

    Args:
      sequence: the file `thunk_sequence_after_thunk_passes.txt` of a dump.
      metadata: the file `thunk_metadata.txt`, which names the instruction of each thunk.
    """
    names = {
        int(number): name
        for name, number in re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
    }
    root = Thunk("root", "")
    stack, last = [(-1, root)], root
    for line in sequence.splitlines():
        if found := _THUNK.match(line):
            indent = len(found["indent"])
            while stack[-1][0] >= indent:
                stack.pop()
            owner = stack[-1][1]
            grid = re.search(r"grid: \[(\d+), (\d+), (\d+)\]", line)
            blocks = int(grid[1]) * int(grid[2]) * int(grid[3]) if grid else 0
            last = Thunk(found["kind"], found["name"], blocks, names.get(int(found["id"]), ""))
            owner.parts.setdefault(owner.label, []).append(last)
            stack.append((indent, last))
        elif found := _LABEL.match(line):
            if found["label"] == "condition":  # XLA writes it without its indent
                last.label = "condition"
                continue
            while stack[-1][0] >= len(found["indent"]):
                stack.pop()
            stack[-1][1].label = found["label"]
    return root
