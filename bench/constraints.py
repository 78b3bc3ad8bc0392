"""`python -m bench.constraints`: JSON of log lines, with forced tokens and without, in turns.

Both decode under the same constraint on the shipped target, and write the same tokens.  Samples
that other processes disturbed are dropped.  The intervals are 95 % intervals over the lines.
"""

from __future__ import annotations

import argparse

import specjax
from bench.command import run
from bench.report import ratio
from specjax.measure import Sample, Timed, describe, show, take_turns

LINES = (
    "ERROR parser.tokens:118 unexpected indent", "INFO server: 3 workers are ready",
    "WARNING cache: 12 entries were dropped", "DEBUG io.reader:7 opened data.csv",
    "ERROR db.pool:52 no connection is free", "INFO train.loop:310 saved step 4000",
    "WARNING tokenizer: unknown token", "ERROR http: 404 for /index.html",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "level": {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]},
        "module": {"type": "string", "pattern": "^[a-z_.]{1,24}$"},
        "line": {"type": ["integer", "null"]},
        "message": {"type": "string", "maxLength": 40},
    },
    "required": ["level", "module", "line", "message"],
}


class Writer(Timed):
    """One way to write every line as JSON."""

    def __init__(
        self, target: specjax.LanguageModel, constraint: specjax.JSONSchema, num_drafts: int
    ) -> None:
        super().__init__(f"{constraint.whitespace!r}, {num_drafts} drafts", len(LINES))
        self.target, self.constraint, self.num_drafts = target, constraint, num_drafts
        self.outputs: dict[int, specjax.Output] = {}

    def run(self, item: int) -> Sample:
        made = self.outputs[item] = specjax.generate(
            self.target,
            f"{LINES[item]}\n# The same line as JSON:\n",
            proposer="forced" if self.num_drafts else "none",
            num_drafts=self.num_drafts or None,
            constraint=self.constraint,
            max_new_tokens=96,
        )
        return Sample(made.stats.seconds)


def row(
    target: specjax.LanguageModel, constraint: specjax.JSONSchema, asked: argparse.Namespace
) -> str:
    """A line of the table: the medians, their ratio, and what was written."""
    plain = Writer(target, constraint, 0)
    forced = Writer(target, constraint, asked.num_drafts)
    for each in (plain, forced):
        each.run_first()
    take_turns([plain, forced], asked.rounds)
    same = all(plain.outputs[item].tokens == made.tokens for item, made in forced.outputs.items())
    stats = [made.stats for made in forced.outputs.values()]
    tau = sum(one.tokens for one in stats) / sum(one.target_passes for one in stats)
    cells = [f"`{constraint.whitespace!r}`", constraint.canonical]
    cells += [f"{1e3 * (each.median or 0):.1f}" for each in (plain, forced)]
    cells += [show(ratio(plain.seconds, forced.seconds), ".2f"), f"{tau:.2f}", same]
    cells += [plain.dropped + forced.dropped]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-drafts", type=int, default=8)
    parser.add_argument("--whitespace", nargs="+", default=["", "[ ]?"])
    asked = parser.parse_args()
    target = specjax.load(specjax.shipped("pycode/target"))
    head = describe()
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {asked.rounds} rounds\n")
    print(
        "| whitespace | canonical | plain ms | forced ms | speed-up | tau | same tokens | dropped |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for whitespace in asked.whitespace:
        for canonical in (False, True):
            constraint = specjax.JSONSchema(SCHEMA, whitespace, canonical=canonical)
            print(row(target, constraint, asked), flush=True)


if __name__ == "__main__":
    run(main)
