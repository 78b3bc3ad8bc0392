"""`specjax audit`: is decoding lossless with this target, this proposer and this rule?"""

from __future__ import annotations

import argparse
import sys

from specjax.audit import audit
from specjax.decoding import Decoder
from specjax.flags import (
    add_model_arguments,
    add_proposer_arguments,
    add_rule_arguments,
    add_sampling_arguments,
    choose,
    load_models,
    make_drafter,
    make_rule,
    read_prompts,
    sampling,
)
from specjax.parallel import add_process_arguments
from specjax.prompts import encode
from specjax.types import Params

HELP = "compare a proposer and a rule with plain decoding; exit status 1 if a claim is broken"

_PROMPTS = ["def ", "import os\n", "class Stack:\n", "The "]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_proposer_arguments(parser)
    add_rule_arguments(parser)
    add_sampling_arguments(parser)
    add_process_arguments(parser)
    parser.add_argument(
        "--samples",
        type=int,
        default=4096,
        help="number of texts sampled with speculation, and also without it",
    )
    parser.add_argument(
        "--num-tokens",
        type=int,
        default=3,
        help="how many tokens at the start of each text are compared",
    )
    parser.add_argument("--rows", type=int, default=64, help="rows per batch")
    parser.add_argument(
        "--significance",
        type=float,
        default=1e-4,
        help="probability that a lossless decoder fails the audit",
    )
    parser.set_defaults(temperature=1.0, max_new_tokens=32)


def run(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments) if arguments.prompt or arguments.prompt_file else _PROMPTS
    kind = choose(arguments)
    target, draft = load_models(arguments, [kind], [arguments.rule])
    rule = make_rule(arguments, arguments.rule)
    options = sampling(arguments, target)
    drafter = make_drafter(arguments, kind, target, draft)
    weights = drafter.arrays(target, arguments.rows)
    ids = encode(target, prompts)
    capacity = max(map(len, ids)) + max(arguments.max_new_tokens, 1)
    decoder = Decoder(target.model, drafter.proposer, rule, target.eos, capacity)
    names = ("samples", "num_tokens", "rows", "significance")
    numbers = {name: getattr(arguments, name) for name in names}
    report = audit(decoder, Params(target.params, weights), ids, **numbers, **options)
    print(report)
    if not report.passed:
        sys.exit(1)
