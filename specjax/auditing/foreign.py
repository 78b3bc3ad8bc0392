"""Audits a foreign server by its texts.

    repeat         greedy: the texts are equal with one request at a time and with many
    greedy         greedy: the texts are those of the baseline
    distribution   sampled: a chi-square test of two samples, the server's and the baseline's

The baseline is the same model without speculation: another server, or a local model.  Servers that
round otherwise in other batches differ from themselves, too.  So `greedy` fails only if more texts
differ from the baseline than rounding explains, by the result of `repeat`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specjax._internal.checks import real, within
from specjax.auditing import chisquare
from specjax.auditing.endpoint import Endpoint, Writer
from specjax.auditing.report import POWER, Check, Distribution, Report
from specjax.types import Json

_LEAST = 10
"""The least texts of a cell in both samples together, so that about 5 are expected in each."""

_AGAIN = 4
_BLOCK = 512  # requests that are made before their texts are counted


@dataclasses.dataclass(frozen=True)
class Plan:
    """The texts that an audit requests from the servers.

    Attributes:
      prompts: texts; those after which the model is uncertain are the most sensitive.
      greedy_tokens: length of the greedy texts.
      samples: sampled texts of each side, over all prompts.
      sampled_tokens: length of the sampled texts.
      temperature, top_p: of the sampled texts.
      seed: of the first request; each has another one.
      significance: the p-value s below which the distribution fails.  From s^2 to sqrt(s) / 3
        four times as many fresh samples are drawn, and their p-value decides.
    """

    prompts: Sequence[str]
    greedy_tokens: int = 32
    samples: int = 2048
    sampled_tokens: int = 3
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    significance: float = 1e-3

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("audit needs at least one prompt, and none may be empty")
        for name in ("greedy_tokens", "samples", "sampled_tokens"):
            within(name, getattr(self, name), 1)
        real(
            "temperature",
            self.temperature,
            "(0, inf)",
            ", since 0 draws nothing to compare (it is checked too)",
        )
        real("top_p", self.top_p, "(0, 1]")
        real("significance", self.significance, "(0, 1)")


def audit_endpoint(endpoint: Endpoint, baseline: Writer | None, plan: Plan) -> Report:
    """Compares a server with a baseline, or with itself if there is none.

    Raises:
      ValueError: as `Endpoint.__call__`, if all texts are empty, and if neither server samples.
    """
    greedy = {"temperature": 0.0, "max_tokens": plan.greedy_tokens}
    seeds = [plan.seed] * len(plan.prompts)
    alone = endpoint.alone()(plan.prompts, seeds, greedy)
    if not any(alone):
        raise ValueError(
            f"{endpoint.url} answered every prompt with an empty text: pass other prompts"
        )
    # Every prompt is sent several times at once, so that batches mix.
    crowd = [*plan.prompts] * max(1, endpoint.concurrency // len(plan.prompts))
    together = endpoint(crowd, [plan.seed] * len(crowd), greedy)
    again = [text == alone[n % len(alone)] for n, text in enumerate(together)]
    checks = [_repeat(again, endpoint.concurrency)]
    if baseline is not None:
        wanted = baseline(plan.prompts, seeds, greedy)
        checks.append(_greedy(alone, wanted, again.count(False), len(again)))
        checks.append(_distribution(endpoint, baseline, plan))
    other = "alone" if baseline is None else "beside a baseline"
    subject = (
        f"{endpoint.model} at {endpoint.url}, {other}; {len(plan.prompts)} prompts, "
        f"temperature {plan.temperature:g}, top-p {plan.top_p:g}"
    )
    return Report(subject, tuple(checks), plan.significance)


def _repeat(same: Sequence[bool], concurrency: int) -> Check:
    """Checks that not all texts change with the load; rounding may change some of them."""
    equal = sum(same)
    detail = f"{equal} of {len(same)} greedy texts are the same with {concurrency} requests at once"
    return Check("repeat", True, equal > 0, detail, "" if equal == len(same) else "float noise?")


def _greedy(texts: list[str], wanted: list[str], unstable: int, repeats: int) -> Check:
    """Checks the greedy texts against the baseline, except for as many as change by themselves."""
    differ = [n for n, (a, b) in enumerate(zip(texts, wanted, strict=True)) if a != b]
    rate = unstable / repeats
    # With an unstable share of r, the baseline and the server differ in up to 2 r of the texts.
    allowed = len(texts) * min(1.0, 2 * rate)
    most = 0.0 if not unstable else allowed + 3 * math.sqrt(allowed)
    detail = f"{len(texts) - len(differ)} of {len(texts)} greedy texts are those of the baseline"
    if differ:
        a, b = texts[differ[0]], wanted[differ[0]]
        at = next(
            (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        detail += (
            f"; prompt {differ[0]} differs from character {at} on: "
            f"{a[at : at + 20]!r}, the baseline has {b[at : at + 20]!r}"
        )
    return Check("greedy", True, len(differ) <= most, detail, "float noise?" if differ else "")


def _distribution(endpoint: Endpoint, baseline: Writer, plan: Plan) -> Distribution:
    """Runs a chi-square test of two samples of texts; fresh ones decide a suspicion."""
    check = _sampled(endpoint, baseline, plan, plan.samples, plan.seed + 1)
    if not chisquare.is_suspicious(check.p_value, plan.significance):
        return check
    return _sampled(
        endpoint, baseline, plan, _AGAIN * plan.samples, plan.seed + 1 + 2 * plan.samples
    )


def _sampled(
    endpoint: Endpoint, baseline: Writer, plan: Plan, samples: int, seed: int
) -> Distribution:
    settings: Mapping[str, Json] = {
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "max_tokens": plan.sampled_tokens,
    }
    each = -(-samples // len(plan.prompts))
    size = each * len(plan.prompts)
    prompt_of = [n % len(plan.prompts) for n in range(size)]
    drawn = []
    for side, writer in enumerate((endpoint, baseline)):
        texts: list[tuple[object, ...]] = []
        # The two sides use different seeds, so that the samples are independent.
        for block in _blocks(size):
            prompts = [plan.prompts[prompt_of[n]] for n in block]
            seeds = [seed + side * size + n for n in block]
            written = writer(prompts, seeds, settings)
            texts += [(prompt_of[n], *text) for n, text in zip(block, written, strict=True)]
        drawn.append(texts)
    found = two_samples(drawn[0], drawn[1], plan.significance)
    frozen = [_is_frozen(texts) for texts in drawn]
    if all(frozen) and each > 1:
        raise ValueError(
            f"both sides wrote one text for each prompt, {each} times at temperature "
            f"{plan.temperature:g}, so there is nothing to compare: {_SAMPLE}, or pass prompts "
            "after which the model is uncertain"
        )
    if any(frozen) and each > 1:
        side = "the server" if frozen[0] else "the baseline"
        detail = f"{found.detail}; {side} wrote one text for each prompt: {_SAMPLE}"
        return dataclasses.replace(found, detail=detail)
    return found


_SAMPLE = "switch sampling on in the server (transformers: do_sample in generation_config.json)"


def _is_frozen(texts: Sequence[tuple[object, ...]]) -> bool:
    """Checks that each prompt has one text, whatever the seed."""
    return len(set(texts)) == len({text[0] for text in texts})


def _blocks(size: int) -> list[range]:
    return [range(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]


def two_samples(
    first: Sequence[tuple[object, ...]], second: Sequence[tuple[object, ...]], significance: float
) -> Distribution:
    """Tests two samples of equal size, of texts as (number of the prompt, *characters)."""
    cells = cells_of([*first, *second])
    order = sorted(set(cells.values()))
    counts = [collections.Counter(cells[text] for text in side) for side in (first, second)]
    found, wanted = (np.array([count[cell] for cell in order], float) for count in counts)
    size = len(first)
    # Both samples have equally many texts of each prompt, which costs one degree of freedom.
    degrees = len(order) - len({cell[0] for cell in order})
    x = chisquare.statistic(found, wanted)
    p_value = chisquare.survival(x, degrees)
    distance = float(np.abs(found - wanted).sum() / (2 * size))
    expected = float(np.sqrt(2 / math.pi * (found + wanted)).sum() / (2 * size))
    detail = (
        f"2 x {size} texts, chi-square {x:.1f} on {degrees} degrees of freedom, "
        f"p = {p_value:.2g}; total variation {distance:.3f}, {expected:.3f} by chance"
    )
    return Distribution(
        "distribution",
        True,
        p_value >= significance,
        detail,
        samples=size,
        p_value=p_value,
        total_variation=distance,
        expected=expected,
        detectable=chisquare.detectable(size, degrees, significance, POWER),
    )


def cells_of(texts: Sequence[tuple[object, ...]]) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Returns the cell of each text: its longest prefix that is frequent enough.

    The first entry of a text is the number of its prompt, so texts of different prompts are never
    in one cell.
    """
    cells: dict[tuple[object, ...], tuple[object, ...]] = {}
    left = list(texts)
    for size in range(max(map(len, left)), 0, -1):
        counts = collections.Counter(text[:size] for text in left)
        cells |= {text: text[:size] for text in left if counts[text[:size]] >= _LEAST or size == 1}
        left = [text for text in left if text not in cells]
    return cells
