"""`specjax generate "prompt"` generates with speculation, and compares with plain decoding."""

from __future__ import annotations

import json

import jax

import specjax
from specjax import plot, tree
from specjax._internal.checks import settle
from specjax.cli.colours import LEGEND, depths_of, painted
from specjax.cli.generate_options import GenerateOptions
from specjax.cli.offline import write_file
from specjax.generation import Options, Prepared, Request, decode, prepare, warm_up
from specjax.options.command import parse
from specjax.options.models import (
    choose,
    drafting,
    load_models,
)
from specjax.options.speculation import given, make_rule
from specjax.options.waiting import progress
from specjax.parallel import leader, mesh_of


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(GenerateOptions, argv, prog=prog)
    if arguments.out is not None:
        write_file(arguments, arguments.out)
        return
    prompts = arguments.prompts()
    settle(
        (arguments.ray_workers is not None, "--ray-workers writes a file: add --out FILE"),
        (
            arguments.logprobs is not None and not arguments.json,
            "--logprobs is printed as JSON; add --json",
        ),
        (
            arguments.colour and (arguments.json or arguments.stop),
            "--colour colours a text up to its end: leave --json and --stop out",
        ),
    )
    kind = choose(arguments, arguments.rule, arguments.draft_mesh is not None)
    models = load_models(arguments, [kind], [arguments.rule], arguments.devices())
    target, draft = models.target, models.draft
    settings = arguments.sampled(target, arguments.temperature)
    options: Options = {
        **settings,
        **arguments.processing(target),
        "constraint": arguments.constraint(),
        "logprobs": arguments.logprobs,
        "rule": make_rule(arguments, arguments.rule),
    }
    if arguments.chat:
        options["messages"] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    asked = None if arguments.chat else prompts
    # A comparison does not stream, since the time for reading the text every few steps would count
    # as decoding time.
    stream = not (arguments.json or arguments.colour or arguments.compare) and len(prompts) == 1
    drafted: Options = {**options, **drafting(kind, models, given(arguments), arguments.rule)}
    draft_mesh = mesh_of(draft.params) if arguments.draft_mesh and draft is not None else None
    request = Request(prompts=asked, **drafted)
    prepared = prepare(target, request, stream=stream, draft_mesh=draft_mesh)
    undrafted: Options = {**options, "proposer": "none"}
    # A process with only the draft has no shard of the target to decode with.
    apart = draft_mesh is not None and jax.process_count() > 1
    compares = arguments.compare and not apart
    plain = None
    if compares:
        plain = prepare(target, Request(prompts=asked, **undrafted), stream=stream)
    if arguments.plot:
        _plot(drafted.get("drafter"), arguments.plot)
    # Compile first, so that each call decodes once and its figures do not include compilation.
    with progress("compiling"):
        warm_up(prepared)
    output = _show(prepared, prompts, arguments)
    baseline = None
    if plain is not None:
        with progress("plain decoding, for comparison"):
            warm_up(plain)
            baseline = _whole(decode(plain))

    stats = output.stats.to_json()
    stats["baseline_tokens_per_second"] = stats["speedup"] = stats["same_tokens"] = None
    if baseline is not None:
        stats["baseline_tokens_per_second"] = baseline.stats.tokens_per_second
        stats["speedup"] = output.stats.tokens_per_second / baseline.stats.tokens_per_second
        stats["same_tokens"] = output.tokens == baseline.tokens
    if arguments.json:
        result = {
            "text": output.text,
            "tokens": output.tokens,
            "finish": output.finish,
            "exact": output.exact,
        }
        if output.logprobs is not None:
            names = ("raw", "warped", "top_ids", "top")
            result["logprobs"] = [
                {name: getattr(row, name).tolist() for name in names} for row in output.logprobs
            ]
        print(json.dumps({**result, "stats": stats}))
    else:
        _print_table(output, baseline, arguments.rule, settings["temperature"])


def _plot(drafter: specjax.Drafter | None, path: str) -> None:
    if not isinstance(drafter, specjax.MedusaAdapter):
        raise ValueError("--plot draws the tree of Medusa heads: use it with --proposer medusa")
    choices = drafter.proposer.choices
    figure = plot.tree(
        tree.from_choices(choices),
        (1.0, *drafter.acceptance) if drafter.acceptance else None,
        ["pending", *(f"{choice[-1] + 1}" for choice in choices)],
    )
    if leader():
        figure.savefig(path)


def _show(prepared: Prepared, prompts: list[str], arguments: GenerateOptions) -> specjax.Output:
    """Decode, and without --json print the texts; a streamed text is printed as it grows."""
    gap = "\n\n" if arguments.chat else ""  # an answer does not continue the question
    if prepared.stream:
        print(prompts[0], end=gap, flush=True)
        stream = decode(prepared)
        assert isinstance(stream, specjax.TextStream)
        for (piece,) in stream:
            print(piece, end="", flush=True)
        print()
        return _whole(stream)
    with progress("generating"):
        output = _whole(decode(prepared))
    if not arguments.json:
        end = f"\n{'-' * 80}" if len(prompts) > 1 else ""
        texts = output.text
        if arguments.colour:
            texts = [
                painted(prepared, row, tokens, depths)
                for row, (tokens, depths) in enumerate(
                    zip(output.tokens, depths_of(prepared), strict=True)
                )
            ]
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{gap}{text}{end}")
        if arguments.colour:
            print(f"\n{LEGEND}")
    return output


def _whole(decoded: specjax.Output | specjax.TextStream) -> specjax.Output:
    """Returns the output; a stream is read to its end."""
    if isinstance(decoded, specjax.Output):
        return decoded
    for _ in decoded:
        pass
    assert decoded.output is not None
    return decoded.output


def _print_table(
    output: specjax.Output, baseline: specjax.Output | None, rule: str, temperature: float
) -> None:
    stats = output.stats
    rows = [("tokens/s with speculation", f"{stats.tokens_per_second:.1f}")]
    if baseline is not None:
        is_same = output.tokens == baseline.tokens
        same = "yes" if is_same else "no"
        if not is_same and not output.exact:
            same += " (this rule changes the distribution)"
        elif not is_same and rule != "match" and temperature > 0:
            same += " (this rule keeps the distribution, not the tokens)"
        rows = [
            ("tokens/s without speculation", f"{baseline.stats.tokens_per_second:.1f}"),
            *rows,
            ("speed-up", f"{stats.tokens_per_second / baseline.stats.tokens_per_second:.2f} x"),
            ("same tokens", same),
        ]
    alpha = stats.acceptance_rate
    rows += [
        ("acceptance rate (alpha)", "no drafts" if alpha is None else f"{alpha:.3f}"),
        ("tokens per target pass (tau)", f"{stats.mean_accepted_length:.2f}"),
        ("new tokens / target passes", f"{stats.tokens} / {stats.target_passes}"),
        ("lossless rule", "yes" if output.exact else "no"),
    ]
    if stats.hit_rate is not None:
        rows.append(("drafted in time (hit rate)", f"{stats.hit_rate:.3f}"))
    if output.choices is not None:
        rows.append(("chosen from, in every step", str(output.choices)))
    print()
    for name, value in rows:
        print(f"  {name:<30} {value}")
