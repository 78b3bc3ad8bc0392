"""`specjax audit` checks that decoding is lossless with a target, a proposer and a rule.

With `--url` it audits another server by its texts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import specjax
from specjax._internal.checks import settle
from specjax.auditing import Endpoint, Plan, Report, audit, audit_endpoint
from specjax.decoding import Decoder
from specjax.generation import bad_word_ids, encode
from specjax.options.command import parse
from specjax.options.fields import Options, flag, option
from specjax.options.models import DeviceOptions, ModelOptions, choose, load_models, make_drafter
from specjax.options.processes import ProcessOptions
from specjax.options.prompts import PromptOptions
from specjax.options.sampling import ProcessorOptions, SamplingOptions
from specjax.options.speculation import ProposerOptions, RuleOptions, given, make_rule
from specjax.parallel import leader
from specjax.types import Params

_PROMPTS = ["def ", "import os\n", "class Stack:\n", "The "]
_SAMPLES, _FOREIGN = 16384, 2048
_LOCAL = (
    "draft", "drafter", "proposer", "mesh", "top_k", "min_p", "rule", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_new_tokens", "logit_bias", "bad_word", "stop",
)  # fmt: skip
"""Options that do not apply to a foreign server."""


@dataclasses.dataclass(frozen=True)
class ServerOptions(Options):
    """A foreign server, audited only by its texts."""

    group = "server"

    url: str | None = option(
        None,
        "an OpenAI-compatible server, such as http://localhost:8000/v1, which is audited by its "
        "texts",
    )
    model: str | None = option(None, "the name of the model there")
    baseline_url: str | None = option(
        None, "a server of the same model without speculation; or pass --target with its folder"
    )
    baseline_model: str | None = option(None, "its name there; default: that of --model")
    api_key_variable: str = option(
        "OPENAI_API_KEY", "environment variable with the API key of the servers", metavar="NAME"
    )
    timeout: float = option(60.0, "seconds for one request")
    concurrency: int = option(8, "requests at the same time")


@dataclasses.dataclass(frozen=True)
class AuditOptions(
    ServerOptions, DeviceOptions, ProcessOptions, ProcessorOptions, SamplingOptions, RuleOptions,
    ProposerOptions, ModelOptions, PromptOptions,
):  # fmt: skip
    """The options of `specjax audit`."""

    group = "audit"

    temperature: float | None = option(1.0, "0 is greedy")
    max_new_tokens: int = option(32, "limit per prompt, in tokens")
    samples: int | None = option(
        None, f"number of sampled texts; default: {_SAMPLES}, or {_FOREIGN} with --url"
    )
    num_tokens: int = option(3, "how many tokens at the start of each text are compared")
    rows: int = option(64, "rows per batch")
    significance: float = option(
        1e-3,
        "a smaller p-value must be confirmed by fresh samples, so a lossless decoder fails the "
        "audit less often than this",
    )
    json: str | None = option(None, "write the report to FILE too", metavar="FILE")


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(AuditOptions, argv, prog=prog)
    report = _own(arguments) if arguments.url is None else _foreign(arguments)
    print(report)
    if arguments.json is not None and leader():
        report.write(arguments.json)
    if not report.passed:
        sys.exit(1)


def _own(arguments: AuditOptions) -> Report:
    """Audits a decoder of this library."""
    for name in ("model", "baseline_url", "baseline_model"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"{flag(name)} is used with --url only; add --url")
    if arguments.stop:
        raise ValueError(
            f"--stop {arguments.stop[0]!r} cuts texts after they were decoded, and an audit "
            "compares tokens: leave it out"
        )
    kind = choose(arguments)
    prompts = arguments.prompts(default=_PROMPTS)
    models = load_models(arguments, [kind], [arguments.rule], arguments.devices())
    target = models.target
    rule = make_rule(arguments, arguments.rule)
    options = arguments.sampled(target, arguments.temperature)
    drafter = make_drafter(kind, models, given(arguments))
    weights = drafter.arrays(target, arguments.rows)
    ids = encode(target, prompts)
    capacity = max(map(len, ids)) + max(arguments.max_new_tokens, 1)
    decoder = Decoder(target.model, drafter.proposer, rule, target.eos, capacity)
    names = ("num_tokens", "rows", "significance")
    numbers = {name: getattr(arguments, name) for name in names}
    numbers["samples"] = _SAMPLES if arguments.samples is None else arguments.samples
    processors: dict[str, Any] = dict(arguments.processing(target))
    del processors["stop"]
    ends = [list(target.eos)]
    processors["bad_words"] = bad_word_ids(target, processors["bad_words"], ends)
    params = Params(target.params, weights)
    return audit(decoder, params, ids, **numbers, **options, **processors)


def _foreign(arguments: AuditOptions) -> Report:
    """Audits another server."""
    both = arguments.baseline_url is not None and arguments.target is not None
    settle(
        (arguments.model is None, "--url needs --model with the name of the model on that server"),
        (both, "pass either --baseline-url or --target as the baseline, not both"),
    )
    assert arguments.url is not None and arguments.model is not None
    assert arguments.temperature is not None
    for field in dataclasses.fields(arguments):
        if field.name in _LOCAL and getattr(arguments, field.name) != field.default:
            raise ValueError(
                f"{flag(field.name)} is not used with --url: a server has its own settings"
            )
    key = os.environ.get(arguments.api_key_variable, "")
    timing = arguments.timeout, arguments.concurrency
    endpoint = Endpoint(arguments.url, arguments.model, key, *timing)
    plan = Plan(
        arguments.prompts(default=_PROMPTS),
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
