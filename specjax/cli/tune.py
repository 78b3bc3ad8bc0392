"""`specjax tune` finds the fastest way to decode on this machine, for these models and prompts."""

from __future__ import annotations

import dataclasses
import json

import specjax
from specjax.generation import tune
from specjax.methods import PublishedDrafter
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
    mtp: bool = option(
        False, "measure 2 drafts of the MTP layer in the target's folder, with each of its switches"
    )
    save: bool = option(True, "do not write the plan to the cache directory")
    json: bool = option(False, "print one JSON object and nothing else")


def _forms(target: specjax.LanguageModel) -> list[specjax.Drafter]:
    """Returns chains of two drafts of the MTP layer, with each switch that changes the second."""
    made = []
    for feeds_normed, zeroes_first in ((True, False), (False, False), (True, True), (False, True)):
        one = specjax.load_mtp(
            target,
            specjax.Chain,
            num_drafts=2,
            feeds_normed=feeds_normed,
            zeroes_first=zeroes_first,
        )
        assert isinstance(one, PublishedDrafter)
        if feeds_normed or one.source.network.has_norm:  # type: ignore[attr-defined]
            made.append(one)
    return made


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(TuneOptions, argv, prog=prog)
    prompts = arguments.prompts(default=[]) or None
    # The plan is for the first drafter, so the shipped draft model is not added to another one.
    with_draft = arguments.draft is not None or (
        arguments.target is None and arguments.drafter is None and not arguments.mtp
    )
    kinds = ["draft"] * with_draft + ["drafter"] * (arguments.drafter is not None)
    models = load_models(arguments, kinds or ["ngram"], devices=arguments.devices())
    target, draft = models.target, models.draft
    drafters: list[specjax.LanguageModel | specjax.Drafter] = [] if draft is None else [draft]
    if arguments.drafter is not None:
        drafters.append(models.read(arguments.drafter))
    if arguments.mtp:
        drafters += _forms(target)
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
