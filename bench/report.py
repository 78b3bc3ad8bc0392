"""The rows of a report of `python -m bench`, and its table."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bench.command import Report
from bench.contestants import IN_FEW_BITS, ROUNDED
from bench.options import ReportOptions
from bench.timing import Timed
from specjax import LanguageModel
from specjax.measure import Interval, interval, medians, show

_DRAFTERS = {"draft": "draft alone"} | {
    name: alone
    for precision, rounded in ROUNDED.items()
    for name, alone in (
        (f"draft {precision}", f"draft {precision} alone"),
        (f"self-{precision}", rounded),
    )
}
"""Proposer -> the row of its draft's plain decoding.  Drafts of prompt lookup cost nothing."""


def rows_of(
    timed: list[Timed], target: LanguageModel, arguments: ReportOptions, top: dict[str, float]
) -> list[Report]:
    """One row for each contestant; the first is plain decoding, the base of all speed-ups."""
    batches = len(timed[0].tokens)
    count = batches * arguments.batch * arguments.new_tokens
    steps = {
        (t.contestant.name, t.contestant.num_drafts): t.step
        for t in timed
        if t.contestant.library == "specjax"
    }
    before = medians(timed[0].seconds) if timed[0].median else None
    floor = floor_seconds(target, arguments.dtype, top)
    reference = np.concatenate(timed[0].tokens)
    rows = []
    for t in timed:
        name, gamma = t.contestant.name, t.contestant.num_drafts
        is_ours = t.contestant.library == "specjax"
        median = t.median
        row: Report = {
            "library": t.contestant.library,
            "proposer": name,
            "num_drafts": gamma,
            "first_call_seconds": t.first,
            "samples": sum(map(len, t.seconds)),
            "seconds": t.seconds,
            "dropped": t.dropped,
            "spread": t.spread,
        }
        row |= t.acceptance()
        row["tokens_per_second"] = count / median if median else None
        speedup = interval(before, medians(t.seconds)) if before is not None and median else None
        row["speedup"] = speedup and speedup[0]
        row["speedup_interval"] = speedup and speedup[1:]
        if is_ours and median:
            row |= _beside_peers(t, timed)
        if is_ours and median and t.decoding and t.step:
            row["prefill_seconds"] = (median - t.decoding) / batches
            row["step_seconds"] = t.step
            row["share_of_bandwidth"] = floor / t.step if name == "plain" else None
        if is_ours and gamma and name not in IN_FEW_BITS:
            row["parts_over_step"] = parts_over_step(steps, name, gamma)
        others = {*_DRAFTERS.values(), *IN_FEW_BITS}  # they give other texts
        if not is_ours or name not in others:
            row["same_tokens"] = int((np.concatenate(t.tokens) == reference).all(1).sum())
        rows.append(row)
    return rows


def _beside_peers(mine: Timed, timed: Sequence[Timed]) -> Report:
    """The fastest peer that decodes in the same way, and how many times as fast `mine` is.

    A compiled peer counts as the same way, and so does a peer's plain decoding if target and draft
    are rounded.
    """
    name = mine.contestant.name
    way = IN_FEW_BITS.get(name, name), 0 if name in IN_FEW_BITS else mine.contestant.num_drafts
    peers = {
        t.median: t
        for t in timed
        if t.contestant.library != "specjax"
        and (t.contestant.name.removesuffix(" compiled"), t.contestant.num_drafts) == way
        and t.median
    }
    if not peers:
        return {}
    best = peers[min(peers)]
    return {"peer": best.contestant.library, "over_peer": ratio(best.seconds, mine.seconds)}


def ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Interval:
    """Median seconds over median seconds, with a 95 % interval.

    Args:
      above, below: the samples of each item.  The bootstrap draws items; of a single item, it draws
        samples.
    """
    found = interval(medians(above), medians(below))
    assert found is not None, "seconds are positive"
    if len(above) > 1:
        return found
    draw = np.random.default_rng(0)
    both = [
        np.median(draw.choice(samples[0], (2000, len(samples[0]))), axis=1)
        for samples in (above, below)
    ]
    low, high = np.quantile(both[0] / both[1], [0.025, 0.975])
    return found[0], float(low), float(high)


def floor_seconds(target: LanguageModel, dtype: str, top: dict[str, float]) -> float:
    """Seconds to read every weight once at the measured bandwidth."""
    return target.num_params * jnp.dtype(dtype).itemsize / (top["bandwidth"] * 1e9)


def parts_over_step(
    steps: dict[tuple[str, int], float | None], name: str, gamma: int
) -> float | None:
    """Seconds of a step's parts, each measured alone, over the seconds of the step.

    The parts are one step of plain decoding at gamma + 1 rows, and gamma steps of the draft's plain
    decoding.  Below 1 a step takes longer than its parts.  It can be above 1, because each part
    alone pays for a loop and a draw of its own, which a step pays for once, and because the figures
    are medians of different samples.

    Args:
      steps: (proposer, num_drafts) -> seconds of a step; None if no sample was clean.
      name: of the proposer.
      gamma: drafts per step.

    Returns:
      The ratio, or None if a part was not measured.
    """
    step, wide = steps.get((name, gamma)), steps.get((f"plain at {gamma + 1} rows", 0))
    alone = steps.get((_DRAFTERS[name], 0)) if name in _DRAFTERS else 0.0
    return None if step is None or wide is None or alone is None else (wide + gamma * alone) / step


_VERSIONS = ("torch", "transformers", "llama.cpp", "openvino")
_COLUMNS = {
    "library": ("library", ""),
    "proposer": ("proposer", ""),
    "drafts": ("num_drafts", ""),
    "alpha": ("alpha", ".2f"),
    "tau": ("tau", ".2f"),
    "tokens/s": ("tokens_per_second", ".1f"),
    "spread": ("spread", ".2f"),
    "x plain": ("speedup", ".2f"),
    "x best peer": ("over_peer", ".2f"),
    "best peer": ("peer", ""),
    "prefill, s": ("prefill_seconds", ".4f"),
    "s a step": ("step_seconds", ".5f"),
    "of bandwidth": ("share_of_bandwidth", ".2f"),
    "parts / step": ("parts_over_step", ".2f"),
    "same tokens": ("same_tokens", "d"),
    "first call, s": ("first_call_seconds", ".1f"),
}


def table(report: Report) -> str:
    """The report as Markdown."""
    asked, head, given = report["arguments"], report["machine"], report["prompts"]
    what = asked["size"] or asked["target"] or "the shipped pair"
    lines = [
        f"{what}, {report['parameters']['target'] / 1e6:.0f} M parameters, {asked['dtype']}, "
        f"batch {asked['batch']}, "
        f"{given['number']} {'real' if given['real'] else 'random'} prompts of "
        f"{given['length']} tokens, {asked['new_tokens']} new tokens, "
        + (
            f"imposed acceptance {asked['synthetic_acceptance']}"
            if asked["synthetic_acceptance"]
            else "real acceptance"
        ),
        f"{head['processor']}, {head['cores']} cores, {head['device']}, jax {head['jax']}, "
        + "".join(f"{name} {head[name]}, " for name in _VERSIONS if name in head)
        + f"{head['date']}; "
        + ", ".join(f"{k} {v:.0f}" for k, v in report["ceilings"].items())
        + f"; reading every weight takes {report['floor_seconds'] * 1e3:.3f} ms; "
        f"{report['dropped']} samples dropped",
        *(f"left out: {each}" for each in report["left_out"]),
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for row in report["rows"]:
        cells = [_cell(row.get(name), form) for name, form in _COLUMNS.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: object, form: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return show(value, form)
    return "" if value is None else format(value, form)
