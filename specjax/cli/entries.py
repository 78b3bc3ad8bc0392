"""`Entry`: a row of `specjax bench`, which runs each prompt or question with its own options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import specjax
from specjax.cli.report import Facts, label
from specjax.generation import Options
from specjax.measure import Sample, Timed


@dataclasses.dataclass(frozen=True)
class Work:
    """What an entry does with an item, and the items of each category."""

    items: int
    run: Callable[[int, Options, str | None], list[specjax.Output]]
    # Raises ValueError if a model, whose role is named first, cannot read an item.
    check: Callable[[str, specjax.LanguageModel], None]
    categories: dict[str, list[int]]  # empty for prompts


class Entry(Timed):
    """A row to be measured: `generate` with these options, on each prompt or question."""

    def __init__(self, work: Work, options: Options, facts: Facts) -> None:
        super().__init__(f"{label(facts)} with {facts['rule']}", work.items)
        self.facts, self.outputs = facts, dict[int, list[specjax.Output]]()
        self.options, self._work = options, work

    def run(self, item: int) -> Sample:
        outputs = self._work.run(item, self.options, self.facts.get("thinking"))
        self.outputs[item] = outputs
        stats = [output.stats for output in outputs]
        return Sample(sum(s.seconds for s in stats), sum(s.compile_seconds for s in stats))
