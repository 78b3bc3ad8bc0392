"""`specjax tune` finds the fastest way to decode on this machine, for these models and prompts."""

from __future__ import annotations

import dataclasses
import json

import specjax
from specjax.generation import tune
from specjax.options.command import parse
from specjax.options.fields import option
from specjax.options.models import DeviceOptions, ModelOptions, load_models
from specjax.options.prompts import PromptOptions
from specjax.options.waiting import progress
from specjax.parallel import leader


@dataclasses.dataclass(frozen=True)
class TuneOptions(DeviceOptions, ModelOptions, PromptOptions):
    """The options of `specjax tune`."""

    group = "measurement"

    batch: int = option(1, "rows that are decoded together")
    temperature: float = option(0.0, "0 is greedy")
    max_new_tokens: int = option(64, "limit per prompt")
    rounds: int = option(5, "measured turns")
    save: bool = option(True, "do not write the plan to the cache directory")
    json: bool = option(False, "print one JSON object and nothing else")


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(TuneOptions, argv, prog=prog)
    prompts = arguments.prompts(default=[]) or None
    # The plan is for the first drafter, so the shipped draft model is not added to another one.
    with_draft = arguments.draft is not None or (
        arguments.target is None and arguments.drafter is None
    )
    kinds = ["draft"] * with_draft + ["drafter"] * (arguments.drafter is not None)
    models = load_models(arguments, kinds or ["ngram"], devices=arguments.devices())
    target, draft = models.target, models.draft
    drafters: list[specjax.LanguageModel | specjax.Drafter] = [] if draft is None else [draft]
    if arguments.drafter is not None:
        drafters.append(specjax.load_drafter(arguments.drafter, target))
    with progress("measuring"):
        plan = tune(
            target,
            drafters,
            prompts,
            batch=arguments.batch,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            rounds=arguments.rounds,
            save=arguments.save,
        )
    if not leader():
        return
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(plan), "best": plan.best.name}))
        return
    print(plan)
    if arguments.save:
        print(f"written to {plan.path}")
