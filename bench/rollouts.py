"""python -m bench.rollouts: samples under weights that change, with old texts as drafts.

Weights move by steps of Adam on the files of --data.  The same sampler without drafts takes turns
with one that expects the texts of the first weights.  Rollouts that were stopped half-way (--half)
are refreshed, which takes them to where they were under the new weights; then they are completed,
which can at most halve the time, as nothing is known of the other half.  With --fresh the new
samples have other keys, and the old texts of their prompt are documents to look up in; plain
decoding is then also timed against itself, which tells what the machine does to a ratio.  Ratios
are medians over turns, with intervals of 95 % from a bootstrap over these.  With --tail most
samples are short and a few are long, so the last ones are alone.  With --peer transformers'
`generate`, which trl samples with, too, takes turns as well, with as many rows at once; its texts
are other samples, and a batch of them ends with its longest.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from bench.command import Report, run
from bench.weights import SIZES, from_folders, random_folders
from specjax._internal.checks import settle
from specjax.models import LanguageModel
from specjax.options import fields
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.rollouts import Rollouts, Sampler, rollout_keys
from specjax.types import Weights

LENGTH, BATCH = 128, 8
"""Tokens and texts of a step of training."""


_MEDIAN, _SPREAD = 0.2, 1.0
"""Of the lengths of --tail: the median as a share of the longest, and of a log-normal distribution.
"""

_FIRST = 4
"""Turns before those that count: they compile, and learn what steps take."""


class Given(TypedDict, total=False):
    """What the sampler with drafts gets of the old texts."""

    expected: list[list[int]]
    documents: list[list[list[int]]]


@dataclasses.dataclass(frozen=True)
class RolloutOptions(fields.Options):
    """The options of `python -m bench.rollouts`."""

    target: str = fields.option(
        "checkpoints/pycode/target", "the model; packed matrices are dequantised, as training needs"
    )
    size: str | None = fields.option(
        None, "a size of random weights instead (110m); the tokens are still those of --target"
    )
    peer: bool = fields.option(False, "also time transformers' generate")
    data: str = fields.option("specjax", "a folder of Python files to train on, and for prompts")
    prompts: int = fields.option(16, "number of prompts")
    samples: int = fields.option(4, "samples of a prompt")
    slots: int = fields.option(8, "rows at once")
    prompt_tokens: int = fields.option(64, "tokens of a prompt")
    new_tokens: int = fields.option(128, "tokens of a sample")
    num_drafts: int = fields.option(15, "the most drafts")
    temperature: float = fields.option(1.0, "of the samples")
    rates: tuple[float, ...] = fields.option((1e-6, 1e-5), "learning rates")
    steps: tuple[int, ...] = fields.option((1, 4), "numbers of steps that the weights are apart")
    half: bool = fields.option(False, "refresh texts of half the length, and complete them")
    fresh: bool = fields.option(False, "draw with fresh keys, as training does")
    tail: bool = fields.option(False, "draw the lengths of samples, of which few are long")
    rounds: int = fields.option(3, "turns of each sampler")
    json: str | None = fields.option(None, "write the report to this file")


def main(argv: list[str] | None = None) -> None:
    description = (__doc__ or "").split("\n")[0]
    options = parse(RolloutOptions, argv, description, "python -m bench.rollouts")
    counts = ("prompts", "samples", "slots", "prompt_tokens", "new_tokens", "num_drafts", "rounds")
    settle(
        *(
            (getattr(options, name) < 1, f"--{name.replace('_', '-')} must be at least 1")
            for name in counts
        )
    )
    report = measure(options)
    names = ["what", "rate", "steps", "tokens kept", "tokens a pass", "plain, s", "drafts, s",
             "over plain", *["plain over itself"] * options.fresh,
             *["transformers, s"] * options.peer]  # fmt: skip
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for row in report["rows"]:
        print(f"| {' | '.join(str(cell) for cell in row.values())} |")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))


def measure(options: RolloutOptions) -> Report:
    """Returns the report of every rate and number of steps."""
    folder = pathlib.Path(options.target)
    ids = python_ids(specjax.load(folder), pathlib.Path(options.data))
    if options.size is not None:
        folder = _random(options.size, max(ids) + 1)
    target = specjax.load(folder, "float32", dequantise=True)
    starts = np.linspace(0, len(ids) - options.prompt_tokens, options.prompts, dtype=int)
    prompts = [ids[start : start + options.prompt_tokens] for start in starts]
    keys = rollout_keys(0, prompts, options.samples, refresh="never")
    plain, drafting = (
        Sampler(
            target,
            slots=options.slots,
            max_new_tokens=options.new_tokens,
            num_drafts=depth,
            temperature=options.temperature,
        )
        for depth in (0, options.num_drafts)
    )
    most = _lengths(options)
    old = plain.sample(prompts, keys, samples=options.samples, max_new_tokens=most).texts
    name = "tail" if options.tail else "all"
    kinds: list[tuple[str, np.ndarray, Given]] = [(name, most, {"expected": old})]
    if options.half:
        given: Given = {"expected": [text[: -(-len(text) // 2)] for text in old]}
        lengths = np.array([max(len(text), 1) for text in given["expected"]])
        kinds = [("refreshed", lengths, given), ("completed", most, given)]
    if options.fresh:
        keys = rollout_keys(1, prompts, options.samples, refresh="never")
        some = options.samples
        texts = [old[n * some : (n + 1) * some] for n in range(len(prompts))]
        kinds = [("fresh", most, {"documents": texts})]
    rows, order = [], np.random.default_rng(0)
    for rate in options.rates:
        for steps in options.steps:
            say(f"rate {rate}, {steps} steps")
            params = moved(target, ids, rate, steps)
            for kind, most, given in kinds:
                peer = _peer(folder, options, prompts, most) if options.peer else None
                turns, others = [], []
                ways = [(plain, Given()), (drafting, given)] + [(plain, Given())] * options.fresh
                for _ in range(options.rounds + _FIRST):
                    turn: list[tuple[Rollouts, float] | None] = [None] * len(ways)
                    for way in order.permutation(len(ways)):
                        sampler, texts = ways[way]
                        turn[way] = _timed(
                            sampler, prompts, keys, options.samples, params, most, texts
                        )
                    turns.append([each for each in turn if each is not None])
                    if peer is not None and len(turns) > _FIRST:
                        others.append(peer())
                wanted, made = turns[-1][0][0], turns[-1][1][0]
                texts = made.texts
                if texts != wanted.texts:
                    raise ValueError("a text with drafts differs from plain decoding")
                plainly, drafted, *again = np.array(
                    [[each[1] for each in turn] for turn in turns[_FIRST:]]
                ).T
                rows.append(
                    {
                        "what": kind,
                        "rate": rate,
                        "steps": steps,
                        "kept": round(_kept(old, texts), 3),
                        "tokens_per_pass": round(sum(map(len, texts)) / made.passes, 2),
                        "plain": round(float(np.median(plainly)), 3),
                        "drafts": round(float(np.median(drafted)), 3),
                        "over_plain": _over(plainly / drafted),
                        **({"plain_again": _over(plainly / again[0])} if again else {}),
                        **({"transformers": round(float(np.median(others)), 2)} if others else {}),
                    }
                )
    return {"arguments": {k: str(v) for k, v in vars(options).items()}, "rows": rows}


def _timed(
    sampler: Sampler,
    prompts: list[list[int]],
    keys: jax.Array,
    samples: int,
    params: Weights,
    most: np.ndarray,
    texts: Given,
) -> tuple[Rollouts, float]:
    began = time.perf_counter()
    made = sampler.sample(
        prompts, keys, samples=samples, max_new_tokens=most, params=params, **texts
    )
    jax.block_until_ready(made.tokens)
    return made, time.perf_counter() - began


def _random(size: str, vocab_size: int) -> pathlib.Path:
    """Returns a folder with a random target of a size, written once for each process."""
    if size not in SIZES:
        raise ValueError(f"--size {size} is not one of {', '.join(SIZES)}")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="specjax-rollouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return random_folders(size, vocab_size, folder, "float32")[0]


def _peer(
    folder: pathlib.Path, options: RolloutOptions, prompts: list[list[int]], most: np.ndarray
) -> Callable[[], float]:
    """Returns a function that has transformers draw the same number of samples, and its seconds.

    Rows are decoded `slots` at a time, each batch until its longest row ends.
    """
    import torch

    model = from_folders(folder, None, "float32").peer("target")
    rows = [prompt for prompt in prompts for _ in range(options.samples)]

    def run() -> float:
        began = time.perf_counter()
        for at in range(0, len(rows), options.slots):
            count = int(most[at : at + options.slots].max())
            tokens = torch.tensor(rows[at : at + options.slots])
            with torch.inference_mode():
                model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0,
                    temperature=options.temperature, max_new_tokens=count, pad_token_id=0,
                )  # fmt: skip
        return time.perf_counter() - began

    return run


def _lengths(options: RolloutOptions) -> np.ndarray:
    """Returns the most new tokens of each sample."""
    count, longest = options.prompts * options.samples, options.new_tokens
    if not options.tail:
        return np.full(count, longest)
    drawn = np.random.default_rng(2).lognormal(np.log(_MEDIAN * longest), _SPREAD, count)
    return np.clip(drawn, 1, longest).astype(int)


def python_ids(target: LanguageModel, folder: pathlib.Path) -> list[int]:
    """Returns the tokens of the Python files of a folder."""
    if target.tokenizer is None:
        raise ValueError(f"--target {target.name} has no tokenizer, which --data needs")
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    ids = [token for text in texts for token in target.tokenizer.encode(text).ids]
    if len(ids) < 2 * LENGTH * BATCH:
        raise ValueError(f"--data {folder} has {len(ids)} tokens of Python; pass a larger folder")
    return ids


def moved(target: LanguageModel, ids: Sequence[int], rate: float, steps: int) -> Weights:
    """Returns the weights after some steps of Adam on text."""
    optimizer = optax.adam(rate)

    def loss(params: Weights, tokens: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        logits = target.model.apply(params, tokens, places).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    slope = jax.jit(jax.grad(loss))
    params: Any = target.params
    state = optimizer.init(params)
    drawn = np.random.default_rng(1)
    for _ in range(steps):
        starts = drawn.integers(len(ids) - LENGTH, size=BATCH)
        tokens = jnp.array([ids[start : start + LENGTH] for start in starts])
        change, state = optimizer.update(slope(params, tokens), state, params)
        params = optax.apply_updates(params, change)
    return params


def _over(ratios: np.ndarray) -> str:
    """Returns the median with its interval."""
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return f"{np.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _kept(old: list[list[int]], new: list[list[int]]) -> float:
    """Returns the share of the new tokens that are those of the old text at the same place."""
    same = sum(a == b for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=False))
    return same / sum(map(len, new))


if __name__ == "__main__":
    run(main)
