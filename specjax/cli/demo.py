"""`specjax demo` shows the effect of speculation, on the shipped models, in less than a minute."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

import specjax
from specjax.cli.colours import LEGEND, depths_of, painted
from specjax.drafters import on_demand
from specjax.generation import Prepared, Request, decode, prepare, read_file, warm_up
from specjax.measure import Sample, Timed, medians, take_turns
from specjax.options.command import parse
from specjax.options.fields import option
from specjax.options.models import DeviceOptions, ModelOptions, load_models, make_drafter
from specjax.options.prompts import PromptOptions
from specjax.options.speculation import DRAFTED
from specjax.options.waiting import progress

KINDS = ("none", "auto", "drafter", "ngram", "draft", "tree", "early-exit")
"""The proposers of the second table."""

_ROUNDS = 3

_DRAFTS = 3
"""The drafts of an EAGLE-3 head, whose default is a tree that is too wide for a CPU."""


class _Way(Timed):
    """Decodes one prompt with one option."""

    def __init__(self, name: str, prepared: Prepared) -> None:
        super().__init__(name, 1)
        self.prepared = prepared
        self.output: specjax.Output | None = None

    def run(self, item: int) -> Sample:
        output = decode(self.prepared)
        assert isinstance(output, specjax.Output)
        self.output = output
        return Sample(output.stats.seconds, output.stats.compile_seconds)

    @property
    def tokens(self) -> list[int]:
        assert self.output is not None
        return self.output.tokens[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids as int32, little endian."""
        return hashlib.sha256(np.array(self.tokens, "<i4").tobytes()).hexdigest()[:16]

    @property
    def disturbed(self) -> bool:
        """Returns whether other processes disturbed every sample."""
        return not all(self.seconds)

    @property
    def rate(self) -> float:
        """Returns the median tokens/s of the undisturbed samples, or else of the last one."""
        assert self.output is not None
        last = self.output.stats.seconds
        return len(self.tokens) / (last if self.disturbed else medians(self.seconds)[0])

    @property
    def passes(self) -> int:
        assert self.output is not None
        return self.output.stats.target_passes


@dataclasses.dataclass(frozen=True)
class _Part:
    """Options that are compared with the first of them."""

    temperature: float
    ways: list[_Way]

    @property
    def same(self) -> bool:
        return len({way.digest for way in self.ways}) == 1

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "proposer": way.name,
                "temperature": self.temperature,
                "tokens_per_second": way.rate,
                "disturbed": way.disturbed,
                "target_passes": way.passes,
                "tokens": len(way.tokens),
                "sha256": way.digest,
            }
            for way in self.ways
        ]

    def table(self) -> str:
        """Returns the rows as text."""
        lines = [f"  {'':<16} tokens/s  speed-up  passes  tokens  sha256 of the tokens"]
        plain = self.ways[0].rate
        for way in self.ways:
            about = "~" if way.disturbed else ""
            lines.append(
                f"  {way.name:<16} {about + format(way.rate, '.0f'):>8}  {way.rate / plain:>6.2f} x"
                f"  {way.passes:>6}  {len(way.tokens):>6}  {way.digest}"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DemoOptions(DeviceOptions, ModelOptions, PromptOptions):
    """The options of `specjax demo`."""

    group = "output"

    max_new_tokens: int = option(96, "length of the texts")
    seed: int = option(1, "of the texts at temperature 1")
    colour: bool = option(True, "print the text without colours", names=("--color",))
    json: bool = option(False, "print one JSON object and nothing else")


def _shipped(given: DemoOptions) -> dict[str, Any]:
    """Returns the options of the shipped models, in float32, that are not given."""
    head = {"drafter": str(specjax.shipped("pycode-20m/eagle3")), "drafter_dtype": "int8"}
    return {
        "target": str(specjax.shipped("pycode-20m/target")),
        "dequantise": True,
        **({} if given.draft else {"draft": str(specjax.shipped("pycode/draft"))}),
        **({} if given.drafter else head),
    }


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(DemoOptions, argv, prog=prog)
    if arguments.target is None:
        arguments = dataclasses.replace(arguments, **_shipped(arguments))
    # With a target of one's own, a proposer whose weights are not given is left out.
    missing = [] if arguments.draft is not None else [*DRAFTED]
    if arguments.drafter is None:
        missing.append("drafter")
    kinds = [kind for kind in KINDS if kind not in missing]
    models = load_models(arguments, kinds, devices=arguments.devices())
    target, undrafted = models.target, dataclasses.replace(models, draft=None)
    shipped = read_file(specjax.shipped("pycode/prompt.txt"))
    prompt = arguments.prompts(default=[str(each) for each in shipped])[0]

    def way(kind: str, temperature: float) -> _Way:
        own = models if kind in DRAFTED else undrafted
        numbers = {"num_drafts": _DRAFTS} if kind == "drafter" else {}
        drafter = on_demand(make_drafter(kind, own, numbers), False)
        request = Request(
            prompts=prompt, drafter=drafter, temperature=temperature, seed=arguments.seed,
            max_new_tokens=arguments.max_new_tokens,
        )  # fmt: skip
        return _Way(kind, prepare(target, request))

    first = _Part(0.0, [way("none", 0.0), way("auto", 0.0)])
    others = _Part(1.0, [way(kind, 1.0) for kind in kinds])
    ways = [*first.ways, *others.ways]
    with progress(f"compiling {len(ways)} programs"):
        for each in ways:
            warm_up(each.prepared)
            each.run(0)
    with progress("measuring"):
        take_turns(ways, _ROUNDS)
    if arguments.json:
        rows = first.rows() + others.rows()
        print(json.dumps({"same_tokens": first.same and others.same, "rows": rows}))
        return
    auto = first.ways[1]
    assert auto.output is not None
    text = auto.output.text[0]
    if arguments.colour:
        text = painted(auto.prepared, 0, auto.tokens, depths_of(auto.prepared)[0])
    print(f"{prompt}{text}\n")
    if arguments.colour:
        print(f"{LEGEND}\n")
    print("Temperature 0: plain decoding, and the default, which drafts where it pays.\n")
    print(first.table())
    seed = arguments.seed
    print(f"\nTemperature 1, seed {seed}: every proposer writes the same tokens.\n")
    print(others.table())
    same = first.same and others.same
    print(f"\nThe same tokens in every row of a table: {'yes' if same else 'NO'}")
    if any(each.disturbed for each in ways):
        print("~ other processes were busy in every turn, so this speed is a rough one")
