"""Many mixed calls of `generate` in one process:

    python -m tests.soak --calls 5000 --seed 1

Each call draws a proposer, a rule, a number of rows, lengths, settings, stops, log-probabilities,
adapters and seeds.  Some calls stream, and some run in two threads at once.  The text must be that
of plain decoding wherever the rule promises it, the compiled programs must stay bounded, and the
memory must stay flat.  A failure prints the seed of its call, and `--only SEED` repeats that call.

Most of the time is spent on compiling, since structures are dropped and come back.  With XLA_FLAGS
as in `tests/conftest.py`, and these two, a call takes 0.7 seconds of CPU once the folder holds its
programs (151 calls, 103 s):

    JAX_COMPILATION_CACHE_DIR=FOLDER JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

A structure that comes back is then read and not compiled; it is traced, kept and freed as before.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import gc
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from preparing import prepared

import specjax
from specjax.decoding.decoder import _run
from specjax.decoding.prefill import _begin, _read_prompts

TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny"
PROPOSERS = (
    "draft", "ngram", "tree", "bank", "first-of", "early-exit", "dynamic-tree", "medusa",
    "self-int8", "self-int4",
)  # fmt: skip
RULES = ("match", "rejection", "block", "typical", "threshold")
KEEP = 64
EVERY = 50
"""After so many calls the memory is looked at."""
ENOUGH = 1000
"""Fewer calls say nothing about the memory of a long process."""
GROWTH = 1.1
"""The last quarter may hold this much more than the second one."""


@dataclasses.dataclass(frozen=True)
class Models:
    """What the calls decode with."""

    target: specjax.LanguageModel
    draft: specjax.LanguageModel
    heads: specjax.MedusaAdapter
    bank: specjax.MedusaBank
    text: list[int]  # tokens to take prompts from


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a program is compiled for."""

    proposer: str
    rule: str
    rows: int
    depth: int
    longest: int  # tokens of a prompt
    penalties: bool
    logprobs: int | None


def load() -> Models:
    """The shipped tiny pair, and untrained heads for it."""
    target, draft = (specjax.load(TINY / name, "float32") for name in ("target", "draft"))
    heads = specjax.MedusaAdapter.create(target, 2)
    heads = dataclasses.replace(heads, choices=((0,), (1,), (0, 0)))
    bank = specjax.MedusaBank.create({"one": heads, "two": heads})
    source = pathlib.Path(specjax.__file__).parent / "tree.py"
    assert target.tokenizer is not None
    return Models(target, draft, heads, bank, target.tokenizer.encode(source.read_text()).ids)


def structure(seed: int, number: int) -> Structure:
    """The structure of this number; the first ones have every proposer."""
    drawn = np.random.default_rng((seed, number, 0))
    proposer = PROPOSERS[number % len(PROPOSERS)]
    chain = proposer in ("draft", "ngram", "early-exit", "first-of", "self-int8", "self-int4")
    rules = [rule for rule in RULES if chain or rule != "block"]
    return Structure(
        proposer,
        "match" if drawn.random() < 0.6 else str(drawn.choice(rules)),
        int(drawn.integers(1, 5)),
        int(drawn.integers(1, 5)),
        int(drawn.choice([14, 30, 60])),
        bool(drawn.random() < 0.3),
        int(drawn.integers(0, 3)) if drawn.random() < 0.3 else None,
    )  # fmt: skip


Drawn = tuple[Structure, list[list[int]], dict[str, Any], dict[str, Any]]
"""A structure, prompts, the options that plain decoding takes too, and how the call drafts."""


def call_of(models: Models, seed: int, structures: int) -> Drawn:
    """The call of a seed.

    Structures are drawn by Zipf's law, so some are rare, and are compiled again.
    """
    drawn = np.random.default_rng(seed)
    weights = 1 / np.arange(1, structures + 1)
    form = structure(seed >> 32, int(drawn.choice(structures, p=weights / weights.sum())))
    lengths = drawn.integers(1, form.longest + 1, form.rows)
    starts = drawn.integers(0, len(models.text) - form.longest, form.rows)
    prompts = [
        models.text[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    greedy = form.rule != "match" and drawn.random() < 0.5
    heat = np.zeros(form.rows) if greedy else drawn.choice([0.0, 0.7, 1.0, 1.3], form.rows)
    options: dict[str, Any] = {
        "max_new_tokens": int(drawn.integers(1, 25)),
        "temperature": heat.tolist(),
        "top_k": drawn.choice([0, 5, 40], form.rows).tolist(),
        "top_p": drawn.choice([1.0, 0.9], form.rows).tolist(),
        "min_p": drawn.choice([0.0, 0.05], form.rows).tolist(),
        "seed": int(drawn.integers(2**32)),
        "logprobs": form.logprobs,
        "stop": [["def", "\n\n"], [], [], []][drawn.integers(4)],
        "eos": [None, [], [[5]] * form.rows][drawn.integers(3)],
    }
    if form.penalties:
        options["repetition_penalty"] = drawn.choice([1.0, 1.2], form.rows).tolist()
        options["presence_penalty"] = float(drawn.choice([0.1, 0.5]))
        options["logit_bias"] = {7: float(drawn.choice([-1.0, 1.0]))}
    how: dict[str, Any] = {"rule": form.rule}
    target, draft, size = models.target, models.draft, models.target.model.vocab_size
    if form.proposer == "draft":
        how |= {"draft": draft, "num_drafts": form.depth}
    elif form.proposer in ("tree", "dynamic-tree", "first-of"):
        how |= {"draft": draft, "proposer": form.proposer}
        if form.proposer == "tree":
            how["proposer"] = specjax.DraftTree(draft.model, size, (2, 1))
    elif form.proposer == "medusa":
        how["drafter"] = models.heads
    elif form.proposer == "bank":
        names = np.array(["one", "two", None], object)
        how |= {"drafter": models.bank, "adapter": drawn.choice(names, form.rows).tolist()}
    else:
        how |= {"proposer": form.proposer, "num_drafts": form.depth}
    if form.proposer not in ("draft", "ngram", "early-exit", "self-int8", "self-int4"):
        how["num_drafts"] = drawn.integers(1, 4, form.rows).tolist()
    del target
    return form, prompts, options, how


def same_width(models: Models, prompts: Any, options: dict[str, Any], how: dict[str, Any]) -> bool:
    """Does decoding agree with plain decoding in passes of the same width?

    Then a difference from plain decoding is a near tie of two tokens in floating point.
    """
    proposer = prepared(models.target, prompts, **options, **how).decoder.proposer
    wide = specjax.NoProposer(proposer.num_nodes)
    if isinstance(proposer, specjax.NGram):
        how = {**how, "proposer": dataclasses.replace(proposer, may_abstain=False)}
    one = specjax.generate(models.target, prompts, **options, **how)
    two = specjax.generate(models.target, prompts, **options, proposer=wide)
    return one.tokens == two.tokens


def run_call(models: Models, seed: int, structures: int) -> str:
    """One call with its checks.

    Returns:
      How it was checked.

    Raises:
      AssertionError: a check failed.
    """
    form, prompts, options, how = call_of(models, seed, structures)
    streams = np.random.default_rng((seed, 1)).random() < 0.2
    if streams:
        stream = specjax.generate(models.target, prompts, stream=True, **options, **how)
        pieces = list(stream)
        output = stream.output
        assert output is not None
        joined = ["".join(parts) for parts in zip(*pieces, strict=True)] or [""] * form.rows
        assert joined == output.text, (joined, output.text)
    else:
        output = specjax.generate(models.target, prompts, **options, **how)
    assert all(len(row) <= options["max_new_tokens"] for row in output.tokens)
    if form.logprobs is not None:
        assert output.logprobs is not None
        for row, tokens in zip(output.logprobs, output.tokens, strict=True):
            assert len(row.raw) == len(tokens) and np.isfinite(row.raw).all()
    promised = form.rule == "match" or not any(options["temperature"])
    if not promised:
        again = specjax.generate(models.target, prompts, **options, **how)
        assert again.tokens == output.tokens, "a seed gave two texts"
        return "the same text twice"
    plain = specjax.generate(models.target, prompts, **options)
    if output.tokens == plain.tokens:
        assert (output.text, output.finish) == (plain.text, plain.finish)
        return "plain decoding"
    assert same_width(models, prompts, options, how), (output.tokens, plain.tokens)
    return "plain decoding of the same width"


def programs() -> int:
    """The programs of decoding that are kept."""
    return sum(f._cache_size() for table in (_run, _begin, _read_prompts) for f in table.jitted())


def resident() -> float:
    """Megabytes of memory that this process holds."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def seed_of(seed: int, number: int) -> int:
    """The seed of a call: the run's seed, and the number of the call."""
    return (seed << 32) + number


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--structures", type=int, default=160, help="kinds of calls")
    parser.add_argument("--keep", type=int, default=KEEP, help="structures whose programs are kept")
    parser.add_argument("--only", type=int, help="repeat the call of this seed")
    asked = parser.parse_args(argv)
    models = load()
    if asked.only is not None:
        print(call_of(models, asked.only, asked.structures))
        print(run_call(models, asked.only, asked.structures))
        return
    specjax.keep_programs(asked.keep)
    specjax.clear_programs()
    counts: collections.Counter[str] = collections.Counter()
    memory, most, began = [], 0, time.perf_counter()
    threads, number = concurrent.futures.ThreadPoolExecutor(2), 0
    drawn = np.random.default_rng(asked.seed)
    while number < asked.calls:
        together = 2 if drawn.random() < 0.1 else 1
        seeds = [seed_of(asked.seed, number + n) for n in range(together)]
        number += together
        if together == 1:
            done = [_checked(models, seeds[0], asked)]
        else:
            done = list(threads.map(lambda seed: _checked(models, seed, asked), seeds))
            counts["in two threads"] += 2
        counts.update(done)
        most = max(most, programs())
        for table in (_run, _begin, _read_prompts):
            assert len(table.jitted()) <= asked.keep, f"{len(table.jitted())} structures are kept"
        if number % EVERY < together:
            gc.collect()
            memory.append(resident())
            line = f"{number} calls, {memory[-1]:.0f} MB, {programs()} programs of decoding"
            print(f"{line}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    living = len(jax.devices()[0].client.live_executables())
    print(f"| calls | {number} |\n|---|---|")
    for name, count in sorted(counts.items()):
        print(f"| {name if name.startswith('in') else 'equal to ' + name} | {count} |")
    print(f"| structures, of which programs were kept | {asked.structures}, {asked.keep} |")
    print(f"| most programs of decoding, and all programs at the end | {most}, {living} |")
    if number < ENOUGH or len(memory) < 8:
        print(f"| memory | not judged below {ENOUGH} calls |")
        return
    second, last = (np.median(part) for part in np.array_split(memory, 4)[1::2])
    print(f"| memory in the second quarter and in the last, MB | {second:.0f}, {last:.0f} |")
    assert last <= GROWTH * second, f"the memory grew from {second:.0f} to {last:.0f} MB"


def _checked(models: Models, seed: int, asked: argparse.Namespace) -> str:
    try:
        return run_call(models, seed, asked.structures)
    except Exception:
        more = f"--structures {asked.structures} --only {seed}"
        print(f"failed: python -m tests.soak {more}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
