"""`python -m bench.constraints`: JSON of a log line, with forced tokens and without, in turns.

Both decode under the same constraint on the shipped target, and write the same tokens.  The report
has the seconds of each round's fastest and median run.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from typing import Any

import specjax
from bench.command import run
from specjax.measure import describe

LINES = (
    "ERROR parser.tokens:118 unexpected indent", "INFO server: 3 workers are ready",
    "WARNING cache: 12 entries were dropped", "DEBUG io.reader:7 opened data.csv",
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-drafts", type=int, default=8)
    parser.add_argument("--whitespace", nargs="+", default=["", "[ ]?"])
    asked = parser.parse_args()
    shipped = pathlib.Path(specjax.__file__).parent.parent / "checkpoints" / "pycode"
    target = specjax.load(shipped / "target")
    prompts = [f"{line}\n# The same line as JSON:\n" for line in LINES]
    head = describe()
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {asked.rounds} rounds\n")
    print("| whitespace | canonical | plain ms | forced ms | speed-up | tau | same tokens |")
    print("|---|---|---|---|---|---|---|")
    for whitespace in asked.whitespace:
        for canonical in (False, True):
            constraint = specjax.JSONSchema(SCHEMA, whitespace, canonical=canonical)
            ways: dict[str, dict[str, Any]] = {
                "plain": {"proposer": "none"},
                "forced": {"proposer": "forced", "num_drafts": asked.num_drafts},
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            outputs: dict[str, list[specjax.Output]] = {name: [] for name in ways}
            for index in range(asked.rounds + 1):
                for name, how in ways.items():
                    made = [
                        specjax.generate(
                            target, prompt, constraint=constraint, max_new_tokens=96, **how
                        )
                        for prompt in prompts
                    ]
                    outputs[name] = made
                    if index:  # the first round compiles
                        seconds[name].append(sum(one.stats.seconds for one in made))
            best = {name: min(each) for name, each in seconds.items()}
            middle = {name: statistics.median(each) for name, each in seconds.items()}
            same = all(a.tokens == b.tokens for a, b in zip(*outputs.values(), strict=True))
            passes = sum(one.stats.target_passes for one in outputs["forced"])
            tau = sum(one.stats.tokens for one in outputs["forced"]) / passes
            cells = [f"{1e3 * best[name]:.1f} (median {1e3 * middle[name]:.1f})" for name in ways]
            print(
                f"| `{whitespace!r}` | {canonical} | {cells[0]} | {cells[1]} | "
                f"{best['plain'] / best['forced']:.2f} (median "
                f"{middle['plain'] / middle['forced']:.2f}) | {tau:.2f} | {same} |"
            )


if __name__ == "__main__":
    run(main)
