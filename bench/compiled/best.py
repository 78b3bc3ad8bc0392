"""The drafter and the number of chips with which a model decodes fastest, by the roofline."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from bench.compiled.cells import Cell
from bench.compiled.chips import Chip
from bench.compiled.roofline import least_seconds, tokens_per_step

_ABOUT = ("size", "dtype", "batch", "capacity", "filled")
_COLUMNS = (
    "size", "dtype", "batch", "capacity", "chip", "fastest text", "tokens/s of a row", "times none",
    "most text per chip", "tokens/s per chip", "times none",
)  # fmt: skip


def tokens_per_second(cell: Cell, chip: Chip, alphas: Mapping[str, float]) -> float | None:
    """Of one row, if drafts are accepted with the rate that `alphas` expects of the drafter.

    None without such a rate, for trees, and for what does not fit into the memory of `chip`.
    """
    if cell["argument_bytes"] + cell["scratch_bytes"] > chip.memory or cell["lookahead"] is None:
        return None
    if cell["lookahead"] and cell["drafter"] not in alphas:
        return None
    tokens = tokens_per_step(cell["lookahead"], alphas.get(cell["drafter"], 0.0))
    return tokens / least_seconds(cell, chip)


def best(cells: Sequence[Cell], chips: Sequence[Chip], alphas: Mapping[str, float]) -> str:
    """A table: for each model, batch and chip the fastest case, and that with most text per chip.

    Args:
      cells: of the report; "chips" of a cell is the size of its mesh on any chip.
      chips: for which the times are predicted, from the same bytes.
      alphas: drafter -> expected acceptance rate.
    """
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell[name] for name in _ABOUT), []).append(cell)
    for (about, group), chip in itertools.product(groups.items(), chips):
        rates = [
            (rate, cell)
            for cell in group
            if (rate := tokens_per_second(cell, chip, alphas)) is not None
        ]
        named = [*map(str, about[:4]), chip.name]
        if not rates:
            lines.append(f"| {' | '.join([*named, 'fits on none of these meshes'])} | | | | | |")
            continue

        def shown(found: tuple[float, Cell], share: float, rates: list = rates) -> list[str]:
            rate, cell = found
            plain = [r for r, c in rates if c["drafter"] == "none" and c["chips"] == cell["chips"]]
            gain = f"{rate / plain[0]:.2f}" if plain else ""
            return [f"{cell['drafter']}, {cell['chips']} chips", f"{rate * share:.0f}", gain]

        fastest = max(rates, key=lambda found: found[0])
        cheapest = max(rates, key=lambda found: found[0] / found[1]["chips"])
        share = cheapest[1]["batch"] / cheapest[1]["chips"]
        entries = [*named, *shown(fastest, 1.0), *shown(cheapest, share)]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)
