"""`specjax generate "prompt"`: text with speculation, and beside it what plain decoding would have cost."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import specjax
from specjax.commands.inputs import add_model_arguments, add_sampling_arguments, load_models, read_prompts, sampling
from specjax.commands.progress import progress

HELP = "continue a prompt with speculation, and compare with plain decoding"

_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--proposer", choices=sorted(specjax.PROPOSERS), help="by default draft where there is one, else ngram"
    )
    parser.add_argument(
        "--num-drafts", "--num-speculative-tokens", type=int, default=4, help="guesses per target pass (gamma)"
    )
    add_sampling_arguments(parser)
    parser.add_argument("--no-compare", action="store_true", help="do not time plain decoding")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments)
    target, draft, proposer = load_models(arguments, arguments.num_drafts)
    options = sampling(arguments)
    speculation = {"draft": draft, "proposer": proposer, "num_drafts": arguments.num_drafts}
    if arguments.json:
        with progress("generating"):
            output = specjax.generate(target, prompts, **options, **speculation)
    else:
        output = _stream(target, prompts, {**options, **speculation})
    with progress("timing"):
        output, baseline = _time(target, prompts, options, speculation, not arguments.no_compare)

    stats = output.stats.to_json()
    stats["baseline_tokens_per_second"] = stats["speedup"] = stats["same_tokens"] = None
    if baseline is not None:
        stats["baseline_tokens_per_second"] = baseline.stats.tokens_per_second
        stats["speedup"] = output.stats.tokens_per_second / baseline.stats.tokens_per_second
        stats["same_tokens"] = output.tokens == baseline.tokens
    if arguments.json:
        result = {"text": output.text, "tokens": output.tokens, "finish": output.finish, "exact": output.exact}
        print(json.dumps({**result, "stats": stats}))
    else:
        _print_table(stats, output, arguments)


def _stream(target: specjax.LanguageModel, prompts: list[str], options: dict[str, Any]) -> specjax.Output:
    """Print the text as it comes; several prompts one after the other, each when it is whole."""
    if len(prompts) > 1:
        with progress("generating"):
            output = specjax.generate(target, prompts, **options)
        for prompt, text in zip(prompts, output.text, strict=True):
            print(f"{prompt}{text}\n{'-' * 80}")
        return output
    stream = specjax.generate(target, prompts[0], stream=True, **options)
    print(prompts[0], end="", flush=True)
    with progress("compiling"):
        first = next(stream, "")
    print(first, end="", flush=True)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    assert stream.output is not None
    return stream.output


def _time(
    target: specjax.LanguageModel, prompts: list[str], options: dict[str, Any], speculation: dict[str, Any], both: bool
) -> tuple[specjax.Output, specjax.Output | None]:
    """Speculation and plain decoding in turn, after a warm-up; of each the run of median time."""
    runs: tuple[list, list] = ([], [])
    for number in range(_ROUNDS + 1):
        found = [specjax.generate(target, prompts, **options, **speculation)]
        if both:
            found.append(specjax.generate(target, prompts, **options))
        if number > 0:  # the first round compiles
            for outputs, output in zip(runs, found, strict=False):
                outputs.append(output)

    def median(outputs):
        middle = statistics.median_low([o.stats.seconds for o in outputs])
        return next(o for o in outputs if o.stats.seconds == middle)

    return median(runs[0]), median(runs[1]) if both else None


def _print_table(stats: dict[str, Any], output: specjax.Output, arguments: argparse.Namespace) -> None:
    rows = [("tokens/s with speculation", f"{stats['tokens_per_second']:.1f}")]
    if stats["speedup"] is not None:
        same = "yes" if stats["same_tokens"] else "no"
        if not stats["same_tokens"] and arguments.rule != "match" and arguments.temperature > 0:
            same += " (this rule keeps the distribution, not the tokens)"
        rows = [
            ("tokens/s without speculation", f"{stats['baseline_tokens_per_second']:.1f}"),
            *rows,
            ("speed-up", f"{stats['speedup']:.2f} x"),
            ("same tokens", same),
        ]
    alpha = stats["acceptance_rate"]
    rows += [
        ("acceptance rate (alpha)", "no drafts" if alpha is None else f"{alpha:.3f}"),
        ("tokens per target pass (tau)", f"{stats['mean_accepted_length']:.2f}"),
        ("new tokens / target passes", f"{stats['tokens']} / {stats['target_passes']}"),
        ("lossless rule", "yes" if output.exact else "no"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<30} {value}")
    sys.stdout.flush()
