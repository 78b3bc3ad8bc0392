"""`specjax audit` checks that decoding is lossless with a target, a proposer and a rule.

With `--url` it audits another server by its texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import specjax
from specjax.auditing import Endpoint, Plan, Report, audit, audit_endpoint
from specjax.decoding import Decoder
from specjax.flags import (
    add_device_arguments,
    add_model_arguments,
    add_processor_arguments,
    add_prompt_arguments,
    add_proposer_arguments,
    add_rule_arguments,
    add_sampling_arguments,
    choose,
    load_models,
    make_drafter,
    make_rule,
    processing,
    read_prompts,
    sampling,
)
from specjax.generation import bad_word_ids, encode
from specjax.parallel import leader
from specjax.types import Params

HELP = "compare a proposer and a rule with plain decoding; exit status 1 if a claim is broken"

_PROMPTS = ["def ", "import os\n", "class Stack:\n", "The "]
_SAMPLES, _FOREIGN = 16384, 2048
_LOCAL = {
    **dict.fromkeys(("draft", "drafter", "proposer", "mesh", "top_k", "min_p")),
    "rule": "match",
    "repetition_penalty": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    **{name: [] for name in ("logit_bias", "bad_word", "stop")},
}
"""Options that do not apply to a foreign server, with their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    add_model_arguments(parser)
    add_proposer_arguments(parser)
    add_rule_arguments(parser)
    add_sampling_arguments(parser)
    add_processor_arguments(parser)
    add_device_arguments(parser, processes=True)
    parser.add_argument(
        "--samples",
        type=int,
        help=f"number of sampled texts; default: {_SAMPLES}, or {_FOREIGN} with --url",
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
        default=1e-3,
        help="a smaller p-value must be confirmed by fresh samples, so a lossless decoder fails "
        "the audit less often than this",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report to FILE too")
    foreign = parser.add_argument_group("a foreign server, audited by its texts alone")
    foreign.add_argument(
        "--url", help="an OpenAI-compatible server, such as http://localhost:8000/v1"
    )
    foreign.add_argument("--model", help="the name of the model there")
    foreign.add_argument(
        "--baseline-url",
        help="a server of the same model without speculation; or pass --target with its folder",
    )
    foreign.add_argument("--baseline-model", help="its name there; default: that of --model")
    foreign.add_argument(
        "--api-key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the API key of the servers",
    )
    foreign.add_argument("--timeout", type=float, default=60.0, help="seconds for one request")
    foreign.add_argument("--concurrency", type=int, default=8, help="requests at the same time")
    parser.set_defaults(temperature=1.0, max_new_tokens=32)


def run(arguments: argparse.Namespace) -> None:
    report = _own(arguments) if arguments.url is None else _foreign(arguments)
    print(report)
    if arguments.json is not None and leader():
        report.write(arguments.json)
    if not report.passed:
        sys.exit(1)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    given = arguments.prompt or arguments.prompt_file
    return read_prompts(arguments) if given else _PROMPTS


def _own(arguments: argparse.Namespace) -> Report:
    """Audits a decoder of this library."""
    for name in ("model", "baseline_url", "baseline_model"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is used with --url only; add --url")
    if arguments.stop:
        raise ValueError(
            f"--stop {arguments.stop[0]!r} cuts texts after they were decoded, and an audit "
            "compares tokens: leave it out"
        )
    kind = choose(arguments)
    prompts = _prompts(arguments)
    target, draft = load_models(arguments, [kind], [arguments.rule])
    rule = make_rule(arguments, arguments.rule)
    options = sampling(arguments, target)
    drafter = make_drafter(arguments, kind, target, draft)
    weights = drafter.arrays(target, arguments.rows)
    ids = encode(target, prompts)
    capacity = max(map(len, ids)) + max(arguments.max_new_tokens, 1)
    decoder = Decoder(target.model, drafter.proposer, rule, target.eos, capacity)
    names = ("num_tokens", "rows", "significance")
    numbers = {name: getattr(arguments, name) for name in names}
    numbers["samples"] = _SAMPLES if arguments.samples is None else arguments.samples
    processors: dict[str, Any] = dict(processing(arguments, target))
    del processors["stop"]
    ends = [list(target.eos)]
    processors["bad_words"] = bad_word_ids(target, processors["bad_words"], ends)
    params = Params(target.params, weights)
    return audit(decoder, params, ids, **numbers, **options, **processors)


def _foreign(arguments: argparse.Namespace) -> Report:
    """Audits another server."""
    if arguments.model is None:
        raise ValueError("--url needs --model with the name of the model on that server")
    if arguments.baseline_url is not None and arguments.target is not None:
        raise ValueError("pass either --baseline-url or --target as the baseline, not both")
    for name, default in _LOCAL.items():
        if getattr(arguments, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} is not used with --url: a server has its own settings"
            )
    key = os.environ.get(arguments.api_key_variable, "")
    timing = arguments.timeout, arguments.concurrency
    endpoint = Endpoint(arguments.url, arguments.model, key, *timing)
    plan = Plan(
        _prompts(arguments),
        arguments.max_new_tokens,
        _FOREIGN if arguments.samples is None else arguments.samples,
        arguments.num_tokens,
        arguments.temperature,
        1.0 if arguments.top_p is None else arguments.top_p,
        arguments.seed,
        arguments.significance,
    )
    baseline: Endpoint | _Local | None = None
    if arguments.baseline_url is not None:
        model = arguments.baseline_model or arguments.model
        baseline = Endpoint(arguments.baseline_url, model, key, *timing)
    elif arguments.target is not None:
        baseline = _Local(specjax.load(arguments.target, arguments.dtype), arguments.rows)
    return audit_endpoint(endpoint, baseline, plan)


@dataclasses.dataclass(frozen=True)
class _Local:
    """A baseline that decodes a local model plainly."""

    target: specjax.LanguageModel
    rows: int

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(prompts), self.rows):
            some = list(prompts[start : start + self.rows])
            # A full batch always, so that one program is enough.
            short = self.rows - len(some) if len(prompts) > self.rows else 0
            own = list(seeds[start : start + self.rows])
            output = specjax.generate(
                self.target,
                some + some[-1:] * short,
                proposer="none",
                temperature=settings["temperature"],
                top_k=0,
                top_p=settings.get("top_p", 1.0),
                min_p=0.0,
                repetition_penalty=1.0,
                max_new_tokens=settings["max_tokens"],
                seed=own + own[-1:] * short,
            )
            texts += output.text[: len(some)]
        return texts
