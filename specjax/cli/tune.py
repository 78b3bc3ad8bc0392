"""`specjax tune` finds the fastest way to decode on this machine, for these models and prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json

import specjax
from specjax.flags import (
    add_device_arguments,
    add_model_arguments,
    add_prompt_arguments,
    load_models,
    progress,
    read_prompts,
)
from specjax.generation import tune
from specjax.parallel import leader

HELP = "measure what drafts cost and gain, and write a plan that generate starts from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    add_model_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument("--batch", type=int, default=1, help="rows that are decoded together")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="limit per prompt")
    parser.add_argument("--rounds", type=int, default=5, help="measured turns")
    parser.add_argument(
        "--no-save", action="store_true", help="do not write the plan to the cache directory"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(arguments: argparse.Namespace) -> None:
    given = arguments.prompt or arguments.prompt_file
    prompts = read_prompts(arguments) if given else None
    # The plan is for the first drafter, so the shipped draft model is not added to another one.
    with_draft = arguments.draft is not None or (
        arguments.target is None and arguments.drafter is None
    )
    kinds = ["draft"] * with_draft + ["drafter"] * (arguments.drafter is not None)
    target, draft = load_models(arguments, kinds or ["ngram"])
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
            save=not arguments.no_save,
        )
    if not leader():
        return
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(plan), "best": plan.best.name}))
        return
    print(plan)
    if not arguments.no_save:
        print(f"written to {plan.path}")
