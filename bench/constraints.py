"""`python -m bench.constraints`: JSON of log lines, with forced tokens and without, in turns.

The shipped target decodes plainly, with forced tokens as drafts, and with prompt lookup where no
token is forced.  All three have the same constraint, so they write the same tokens.  Samples that
other processes disturbed are dropped.  The intervals are 95 % intervals over the lines.
"""

from __future__ import annotations

import dataclasses

import specjax
from bench.command import run
from bench.report import ratio
from specjax.contract import Proposer
from specjax.measure import Sample, Timed, describe, show, take_turns
from specjax.options import fields
from specjax.options.command import parse
from specjax.proposers import FirstOf, Forced, NGram

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

COLUMNS = (
    "whitespace", "canonical", "drafts", "plain ms", "ms", "speed-up", "tau", "same tokens",
    "dropped",
)  # fmt: skip


class Writer(Timed):
    """One way to write every line as JSON."""

    def __init__(
        self,
        target: specjax.LanguageModel,
        constraint: specjax.JSONSchema,
        name: str,
        proposer: str | Proposer,
    ) -> None:
        super().__init__(name, len(LINES))
        self.target, self.constraint, self.proposer = target, constraint, proposer
        self.outputs: dict[int, specjax.Output] = {}

    def run(self, item: int) -> Sample:
        made = self.outputs[item] = specjax.generate(
            self.target,
            f"{LINES[item]}\n# The same line as JSON:\n",
            proposer=self.proposer,
            constraint=self.constraint,
            max_new_tokens=96,
        )
        return Sample(made.stats.seconds)

    @property
    def tau(self) -> float:
        """Tokens for each pass of the target."""
        stats = [made.stats for made in self.outputs.values()]
        return sum(one.tokens for one in stats) / sum(one.target_passes for one in stats)


def rows(
    target: specjax.LanguageModel, constraint: specjax.JSONSchema, asked: ConstraintsOptions
) -> list[str]:
    """Lines of the table: the medians, their ratios to plain decoding, and what was written."""
    forced = Forced(asked.num_drafts)
    ways: dict[str, str | Proposer] = {
        "plain": "none",
        "forced": forced,
        "forced, then lookup": FirstOf(forced, NGram(asked.num_drafts)),
    }
    plain, *others = writers = [
        Writer(target, constraint, name, proposer) for name, proposer in ways.items()
    ]
    for each in writers:
        each.run_first()
    take_turns(writers, asked.rounds)
    lines = []
    for each in others:
        same = all(plain.outputs[item].tokens == made.tokens for item, made in each.outputs.items())
        cells = [f"`{constraint.whitespace!r}`", constraint.canonical, each.name]
        cells += [f"{1e3 * (one.median or 0):.1f}" for one in (plain, each)]
        cells += [show(ratio(plain.seconds, each.seconds), ".2f"), f"{each.tau:.2f}", same]
        cells += [plain.dropped + each.dropped]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


@dataclasses.dataclass(frozen=True)
class ConstraintsOptions(fields.Options):
    """The options of `python -m bench.constraints`."""

    rounds: int = fields.option(15, "measured turns")
    num_drafts: int = fields.option(4, "draft tokens per step")
    whitespace: tuple[str, ...] = fields.option(
        ("", "[ ]?"), "white space between the tokens of JSON, as expressions"
    )


def main() -> None:
    asked = parse(ConstraintsOptions, None, __doc__, "python -m bench.constraints")
    target = specjax.load(specjax.shipped("pycode/target"))
    head = describe()
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {asked.rounds} rounds\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for whitespace in asked.whitespace:
        for canonical in (False, True):
            constraint = specjax.JSONSchema(SCHEMA, whitespace, canonical=canonical)
            print("\n".join(rows(target, constraint, asked)), flush=True)


if __name__ == "__main__":
    run(main)
