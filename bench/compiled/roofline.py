"""The least time that a step can take on a chip, by its bytes, operations and sums over chips.

No TPU has been measured.  A step takes longer than this, since no program reaches a chip's peaks
and since every step has parts that wait for one another.  What is compared, a step with drafts and
one without, leaves out the same.

Reference: Williams, Waterman and Patterson 2009, "Roofline", CACM 52(4), figure 1.
"""

from __future__ import annotations

from typing import Any

from bench.compiled.chips import Chip

HOP_SECONDS = 1e-6
"""Of a message between two neighbouring chips, as JAX's "How to scale your model" gives it
(jax-ml.github.io/scaling-book, chapter "How to think about TPUs")."""


def least_seconds(cell: dict[str, Any], chip: Chip) -> float:
    """Of one step of a cell of the report, on `chip` instead of the one it was compiled for."""
    moved, chips = cell["bytes_per_step"], cell["chips"]
    in_memory = sum(size for kind, size in moved.items() if kind != "collectives")
    computing = cell["flops"] / chip.flops + cell["int8_operations"] / chip.int8
    busy = max(in_memory / chip.bandwidth, computing)
    if chips == 1:
        return busy
    number = sum(entry["count"] for entry in cell["collectives"])
    # An all-reduce over a ring sends every byte nearly twice, in 2 (n - 1) messages.
    sent = 2 * (chips - 1) / chips * moved["collectives"]
    return busy + sent / chip.links + number * 2 * (chips - 1) * HOP_SECONDS


def tokens_per_step(lookahead: int, alpha: float) -> float:
    """Expected new tokens of a step with a chain of drafts, each right with probability `alpha`.

    (1 - alpha^(gamma + 1)) / (1 - alpha) for a lookahead gamma
    (Leviathan et al. 2022, arXiv 2211.17192, equation 1).
    """
    return sum(alpha**depth for depth in range(lookahead + 1))


_NAMES = ("size", "dtype", "drafter", "chips", "batch", "capacity")


def table(cells: list[dict[str, Any]], chips: list[Chip], alphas: tuple[float, ...]) -> str:
    """Least milliseconds of a step on each chip, and for chains the speed-up over no drafts.

    The speed-ups are those of the first chip, at each acceptance rate.
    """
    columns = [f"{chip.name}, ms" for chip in chips]
    columns += [f"speed-up at {alpha:g}" for alpha in alphas]
    lines = [f"| {' | '.join([*_NAMES, *columns])} |", "|" + "---|" * (len(_NAMES) + len(columns))]
    about = ("size", "dtype", "chips", "batch", "capacity", "filled")
    plain = {tuple(c[name] for name in about): c for c in cells if c["drafter"] == "none"}
    for cell in cells:
        base = plain.get(tuple(cell[name] for name in about))
        entries = [f"{1000 * least_seconds(cell, chip):.2f}" for chip in chips]
        if base is None or not cell["lookahead"]:
            entries += [""] * len(alphas)
        else:
            longer = least_seconds(cell, chips[0]) / least_seconds(base, chips[0])
            gains = (tokens_per_step(cell["lookahead"], alpha) / longer for alpha in alphas)
            entries += [f"{gain:.2f}" for gain in gains]
        head = [cell[name] for name in _NAMES]
        lines.append(f"| {' | '.join(map(str, [*head, *entries]))} |")
    return "\n".join(lines)
