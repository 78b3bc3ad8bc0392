"""python -m bench: compare specjax with transformers on the same weights, in one process."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

import specjax
from bench import machine, prompts
from bench.command import Report, run
from bench.contestants import IN_FEW_BITS, ROUNDED, Contestant, Imposition, ours, theirs
from bench.drawing import draw
from bench.imposed import coins
from bench.options import BenchOptions, ReportOptions
from bench.peers.engines import Engine, Setting, interpreter
from bench.report import floor_seconds, rows_of, table
from bench.timing import alternate
from bench.weights import Pair, from_folders, random_folders, random_on_device
from specjax import LanguageModel
from specjax.measure import describe
from specjax.models import round_activations
from specjax.options.command import parse
from specjax.plot import new_figure
from specjax.rounding import in_int4


def main(argv: list[str] | None = None) -> None:
    arguments = parse(BenchOptions, argv, __doc__, "python -m bench")
    check(arguments)
    if arguments.plot:
        new_figure()  # fails before the measurement, not after it, if matplotlib is missing
    reports = []
    for batch, length, vocab_size in itertools.product(
        arguments.batch, arguments.prompt_length or [None], arguments.vocab_size
    ):
        setting = {
            **vars(arguments),
            "batch": batch,
            "prompt_length": length,
            "vocab_size": vocab_size,
        }
        reports.append(measure(ReportOptions(**setting)))
        print(table(reports[-1]) + "\n", flush=True)
        if arguments.json:  # after each report: the next one may fail
            pathlib.Path(arguments.json).write_text(json.dumps(reports, indent=1))
        if arguments.plot:
            draw(reports).savefig(arguments.plot)


def check(arguments: BenchOptions) -> None:
    """Raises ValueError for a number that is out of range."""
    for name in ("vocab_size", "num_drafts", "batch", "prompt_length", "new_tokens", "rounds"):
        given = getattr(arguments, name)
        if given != () and np.min(given) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} is {np.min(given)}; it must be at least 1"
            )
    if not 0 <= (arguments.synthetic_acceptance or 0) <= 1:
        raise ValueError(
            f"--synthetic-acceptance is {arguments.synthetic_acceptance}; "
            "it is a probability, 0 to 1"
        )


def measure(arguments: ReportOptions) -> Report:
    """The report for one batch size, one prompt length and one vocabulary size."""
    began, top = time.perf_counter(), machine.ceilings()
    names = ("size", "vocab_size", "dtype", "weights", "target", "draft")
    pair = _pair(*(getattr(arguments, name) for name in names))
    target, draft = pair.target, pair.draft
    path = arguments.prompt_file or (
        None if arguments.size or arguments.target else prompts.SHIPPED
    )
    length, limit = arguments.prompt_length, arguments.limit_prompts
    batches = prompts.batches(
        target, pathlib.Path(path) if path else None, arguments.batch, length, limit
    )

    new, width = arguments.new_tokens, max(arguments.num_drafts) + 1
    if arguments.synthetic_acceptance is not None:
        del batches[1:]  # an imposed text belongs to one batch

    def imposed(target: LanguageModel) -> Imposition | None:
        """Returns the drafts of a target's own text."""
        if arguments.synthetic_acceptance is None:
            return None
        # At the width of a speculative step: sums of other widths round differently, and a near
        # tie between two tokens may then be decided otherwise.
        text = ours(target, None, "plain", width=width).run(batches[0], new)
        right = coins(arguments.batch, new, arguments.synthetic_acceptance, arguments.num_drafts)
        text, length = np.concatenate([batches[0], text], axis=1), batches[0].shape[1]
        return np.pad(text, ((0, 0), (0, width))), np.pad(right, ((0, 0), (length, width)))

    script = imposed(target)
    entries = [*_our_entries(pair, arguments, script), *_their_entries(pair, arguments, script)]
    for precision in _rounded(arguments):
        entries += _in_few_bits(precision, pair, arguments, script, imposed)
    engines = _start_engines(pair, arguments, script)
    entries += [entry for engine in engines for entry in engine.contestants()]
    until = began + arguments.seconds
    try:
        timed, left_out = alternate(entries, batches, new, arguments.rounds, until)
    finally:
        for engine in engines:
            engine.close()
    return {
        "machine": describe() | {engine.name: engine.version for engine in engines},
        "ceilings": top,
        "arguments": {
            k: v
            for k, v in vars(arguments).items()
            if k not in ("json", "weights", "plot", "seconds")
        },
        "parameters": {"target": target.num_params, "draft": draft.num_params if draft else None},
        "prompts": {
            "real": path is not None,
            "number": len(batches) * arguments.batch,
            "length": batches[0].shape[1],
        },
        "floor_seconds": floor_seconds(target, arguments.dtype, top),
        "dropped": sum(t.dropped for t in timed),
        "left_out": left_out,
        "rows": rows_of(timed, target, arguments, top),
    }


def _our_entries(
    pair: Pair, arguments: ReportOptions, script: Imposition | None
) -> list[Contestant]:
    target, draft = pair.target, pair.draft if "draft" in arguments.proposers else None
    entries = [ours(target, None, "plain")]
    entries += [ours(target, None, "plain", width=gamma + 1) for gamma in arguments.num_drafts]
    if draft is not None:
        entries.append(ours(draft, None, "plain", name="draft alone"))
    for gamma in arguments.num_drafts:
        if draft is not None:
            entries.append(ours(target, draft, "draft", gamma, script))
        if "ngram" in arguments.proposers:
            entries.append(ours(target, None, "ngram", gamma, script))
    return entries


def _their_entries(
    pair: Pair, arguments: ReportOptions, script: Imposition | None
) -> list[Contestant]:
    peers = arguments.peers
    entries: list[Contestant] = []
    if "plain" in peers:
        entries.append(theirs(pair, "plain"))
        if arguments.compiled:
            entries.append(theirs(pair, "plain", compiled=True))
    if "loop" in peers:
        from bench.torch_loop import loop

        entries.append(loop(pair))
        entries += [
            loop(pair, gamma, script) for gamma in arguments.num_drafts if pair.draft is not None
        ]
    # Assisted generation of transformers supports batch 1 only.
    for gamma in arguments.num_drafts if arguments.batch == 1 else ():
        if pair.draft is not None and "draft" in peers:
            entries.append(theirs(pair, "draft", gamma, script))
        if "ngram" in peers:
            entries.append(theirs(pair, "ngram", gamma, script))
    return entries


def _start_engines(pair: Pair, arguments: ReportOptions, script: Imposition | None) -> list[Engine]:
    """Each engine in the measured precision and, with --int8 and --int4, in these."""
    if not arguments.engines:
        return []
    if pair.folders is None:
        raise ValueError("--weights device writes no files, which --engines need; name a folder")
    setting = Setting(
        *pair.folders,
        work=pathlib.Path(arguments.weights),
        python=interpreter(arguments.engine_python),
        ways=arguments.peers,
        num_drafts=arguments.num_drafts,
        alone=arguments.batch == 1,
        script=script,
    )
    precisions = [arguments.dtype, *_rounded(arguments)]
    return [
        Engine(name, setting, precision) for name in arguments.engines for precision in precisions
    ]


def _rounded(arguments: ReportOptions) -> list[str]:
    """The precisions of rounded weights that were asked for."""
    return [precision for precision in ROUNDED if getattr(arguments, precision)]


def _in_few_bits(
    precision: str,
    pair: Pair,
    arguments: ReportOptions,
    script: Imposition | None,
    imposed: Callable[[LanguageModel], Imposition | None],
) -> list[Contestant]:
    """In int8 or int4: the target, whose text differs; the draft; the target as its own draft.

    A target in few bits has drafts too, of the draft in few bits; imposed ones are of its own text.
    """
    in_few = {"int8": specjax.quantise, "int4": _in_int4}[precision]
    target, draft = pair.target, pair.draft if "draft" in arguments.proposers else None
    small, small_draft = in_few(target), None if draft is None else in_few(draft)
    entries = [ours(small, None, "plain", name=ROUNDED[precision])]
    name, own = f"draft {precision}", imposed(small)
    if small_draft is not None:
        entries.append(ours(small_draft, None, "plain", name=f"{name} alone"))
    for gamma in arguments.num_drafts:
        if small_draft is not None:
            entries.append(ours(target, small_draft, "draft", gamma, script, name=name))
            (both,) = (way for way, plain in IN_FEW_BITS.items() if plain == ROUNDED[precision])
            entries.append(ours(small, small_draft, "draft", gamma, own, name=both))
        # This row measures its acceptance, so it is never imposed.
        entries.append(ours(target, small, "draft", gamma, name=f"self-{precision}"))
    return entries


def _in_int4(model: LanguageModel) -> LanguageModel:
    """Returns the model with activations rounded too, as other engines' are in 4 bits."""
    return round_activations(in_int4(model)) if jax.default_backend() == "cpu" else in_int4(model)


@functools.lru_cache(1)
def _pair(
    size: str, vocab_size: int, dtype: str, weights: str, target: str | None, draft: str | None
) -> Pair:
    if size and weights == "device":
        return random_on_device(size, vocab_size, dtype)
    if size:
        return from_folders(*random_folders(size, vocab_size, pathlib.Path(weights), dtype), dtype)
    if target:
        return from_folders(pathlib.Path(target), pathlib.Path(draft) if draft else None, dtype)
    shipped = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode"
    return from_folders(shipped / "target", shipped / "draft", dtype)


if __name__ == "__main__":
    run(main)
