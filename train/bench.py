"""python -m train.bench: steps of distillation and of Medusa heads, beside a plain PyTorch loop, and what losses keep.

One process, the same weights and the same batch; contestants take turns, and samples that other processes disturbed are
dropped.  MFU is the share of the peak that the model's own products would need, without what is computed twice: 2 a
parameter and token forward, twice that backward, and causal attention.  From a checkout, since it measures with bench/.

Memory is what XLA's compiled program of a loss and its gradients holds beside arguments and results, a token.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import machine
from bench.contestants import Contestant
from bench.timing import Timed, alternate
from bench.weights import SIZES, random_folders
from specjax.drafters import MedusaAdapter
from specjax.files import load
from specjax.measure import describe
from specjax.models import LanguageModel, LinenModel, TransformerConfig
from specjax.training import accepted
from specjax.training.dataset import Written
from specjax.training.divergences import forward_kl
from specjax.training.jobs.distill import Distill, DistillOptions
from specjax.training.jobs.medusa import MedusaOptions, TrainMedusa
from specjax.training.losses import against, chunked, chunked_rows, cross_entropy
from specjax.training.material import Material
from specjax.training.optimizer import make_optimizer, start, update
from specjax.training.options import at_least, option, parse, run
from specjax.training.precision import mixed_dot_general
from train import peers

_RATE, _DECAY = 1e-4, 0.8
_JOBS = ("distill", "medusa", "memory")


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    only: tuple[str, ...] = option(_JOBS, "what to measure", choices=_JOBS)
    size: str = option("15m", "random target and draft of this size", choices=sorted(SIZES))
    target: str | None = option(None, "folder of a target instead")
    draft: str | None = option(None, "folder of its draft")
    vocab_size: int = option(4096, "of random weights")
    dtype: str = option("float32", "of the frozen target", choices=("float32", "bfloat16"))
    num_heads: int = option(4, "Medusa heads")
    batch_size: int = option(4, "sequences")
    sequence_length: int = option(256, "tokens of each")
    steps: int = option(2, "steps of a sample")
    rounds: int = option(5, "samples")
    precisions: tuple[str, ...] = option(
        ("float32", "bfloat16"), "of PyTorch's products", choices=("float32", "bfloat16")
    )
    compiled: bool = option(False, "PyTorch's models under torch.compile")
    peak: float = option(
        0.0, "of the machine in TFLOP/s, for MFU; 0: a matrix product, as measured here"
    )
    memory_vocab: tuple[int, ...] = option(
        (4096, 32000, 128256), "vocabularies of the table of memory"
    )
    memory_size: int = option(1024, "features in it")
    memory_tokens: int = option(4096, "tokens in it")
    weights: str = option(
        str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"), "folder of random weights"
    )
    out: str | None = option(None, "a .json file for the figures")

    def __post_init__(self):
        at_least(
            self,
            1,
            "vocab_size",
            "num_heads",
            "batch_size",
            "steps",
            "rounds",
            "memory_tokens",
            "memory_size",
        )
        at_least(self, 4 + self.num_heads, "sequence_length")
        at_least(self, 0, "peak")
        if (self.target is None) != (self.draft is None):
            raise ValueError("pass --target and --draft, or neither")


def forward_flops(config: TransformerConfig, params: Any, length: int, head: bool = True) -> float:
    """Floating-point operations a token of a forward pass over sequences of so many tokens, which see half of them."""
    found = jax.tree_util.tree_leaves_with_path(params)
    inner = sum(
        x.size for path, x in found if x.ndim == 2 and "layer_" in jax.tree_util.keystr(path)
    )
    attention = length * config.num_heads * config.head_dim * config.num_layers
    return 2.0 * (inner + attention + head * config.vocab_size * config.hidden_size)


def step_flops(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> float:
    """Of a step, a token: the frozen target forward, what learns forward and backward."""
    wide, length = target.model.module.config, options.sequence_length
    if job == "distill":
        small = draft.model.module.config
        return forward_flops(wide, target.params, length) + 3 * forward_flops(
            small, draft.params, length
        )
    size, vocab = wide.hidden_size, wide.vocab_size
    # The shared map is passed forward and back, and does not learn.
    head = 3 * 2 * size * size + 2 * 2 * size * vocab
    return forward_flops(wide, target.params, length, head=False) + options.num_heads * head


def our_job(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> tuple[Any, Any]:
    """A job of the trainer with the batch to come, and its options."""
    o = options
    common: dict[str, Any] = {
        "target": "", "data": (), "batch_size": o.batch_size, "sequence_length": o.sequence_length,
        "learning_rate": _RATE, "warmup_steps": 0, "decay_fraction": 0.0, "steps": 1 << 20,
    }  # fmt: skip
    nothing = Written(
        np.zeros((o.batch_size, o.sequence_length + 1), np.int32),
        np.zeros((o.batch_size, o.sequence_length), np.float32),
        np.full(o.batch_size, o.sequence_length, np.int32),
    )
    if job == "medusa":
        asked = MedusaOptions(**common, num_heads=o.num_heads, head_decay=_DECAY, written_prompt=1)
        adapter = MedusaAdapter.create(target, o.num_heads)
        return TrainMedusa(asked, target, adapter, Material(None, nothing, nothing, {})), asked
    asked = DistillOptions(**common, sampled_fraction=1.0, sampled_prompt=1, num_drafts=1)
    reader = LinenModel(draft.model.module.clone(dot_general=mixed_dot_general))
    return Distill(asked, reader, target, None, nothing, nothing, None, {}), asked


def ours(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> Contestant:
    made, asked = our_job(job, options, target, draft)
    params = (
        made.init()
        if job == "medusa"
        else {name: draft.params[name] for name in jax.eval_shape(made.init)}
    )
    optimizer = make_optimizer(asked)
    states = [start(optimizer, asked, jax.tree.map(jnp.copy, params))]

    def steps(tokens: np.ndarray, count: int) -> np.ndarray:
        losses = []
        for number in range(count):
            batch = {**made.batch(number), "tokens": tokens}
            state, values = update(made, optimizer, asked, states.pop(), made.frozen, batch)
            states.append(state)
            losses.append(values["loss"])
        return np.asarray(jax.block_until_ready(jnp.stack(losses)))

    return Contestant(job, "specjax", 0, steps)


def theirs(
    job: str, precision: str, options: BenchOptions, folders: tuple[pathlib.Path, pathlib.Path]
) -> Contestant:
    o = options
    if job == "distill":
        steps = peers.distill(*folders, o.dtype, precision, _RATE, o.compiled)
    else:
        steps = peers.medusa(folders[0], o.num_heads, _DECAY, o.dtype, precision, _RATE, o.compiled)
    return Contestant(f"{job} {precision}", "torch", 0, steps)


def speed(options: BenchOptions) -> list[dict[str, Any]]:
    """A row a contestant."""
    o = options
    if o.target is not None and o.draft is not None:
        folders = pathlib.Path(o.target), pathlib.Path(o.draft)
    else:
        found = random_folders(o.size, o.vocab_size, pathlib.Path(o.weights), "float32")
        assert found[1] is not None
        folders = found[0], found[1]
    target, draft = load(folders[0], o.dtype), load(folders[1])
    shape = (o.batch_size, o.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(1, target.model.vocab_size, shape, dtype=np.int32)
    peak = o.peak * 1e12 or 1e9 * max(machine.ceilings()[name] for name in ("float32", "bfloat16"))
    rows = []
    for job in [job for job in ("distill", "medusa") if job in o.only]:
        contestants = [
            ours(job, o, target, draft),
            *(theirs(job, p, o, folders) for p in o.precisions),
        ]
        flops = step_flops(job, o, target, draft)
        timed, left = alternate(contestants, [tokens], o.steps, o.rounds)
        rows += [_row(one, job, o, flops, peak) for one in timed]
        print(
            "\n".join(f"left out: {job}: {why}" for why in left),
            end="\n" * bool(left),
            file=sys.stderr,
        )
    return rows


def _row(
    timed: Timed, job: str, options: BenchOptions, flops: float, peak: float
) -> dict[str, Any]:
    count = options.batch_size * options.sequence_length * options.steps
    rate = count / timed.median if timed.median else None
    return {
        "job": job, "library": timed.contestant.library, "name": timed.contestant.name, "tokens_per_second": rate,
        "flops_per_token": flops, "mfu": rate and rate * flops / peak, "peak": peak, "spread": timed.spread,
        "samples": len(timed.seconds[0]), "dropped": timed.dropped, "first_call_seconds": timed.first,
        "first_losses": timed.tokens[0][:2].tolist(),
    }  # fmt: skip


def memory(vocab: int, size: int, tokens: int) -> list[dict[str, Any]]:
    """A row a loss: bytes a token of a plain loss and its gradients, and of the chunked one."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, labels, weight = array(tokens, size), array(tokens, dtype=jnp.int32), array(tokens)
    head = array(size, vocab)
    losses: dict[str, tuple[Any, Any, Any]] = {
        "cross-entropy": (cross_entropy, (weight, labels), ()),
        "forward-kl": (against(forward_kl), (weight, rows), (head,)),
        "accepted-length": (accepted.statistics, (labels, rows), (head,)),
    }
    found = []
    for name, (loss, each, shared) in losses.items():

        def plain(hidden, matrix, each, shared, loss=loss):
            return loss(
                mixed_dot_general(hidden, matrix, (((1,), (0,)), ((), ()))), *each, *shared
            ).sum()

        def cut(hidden, matrix, each, shared, name=name, loss=loss):
            return (chunked_rows if name == "accepted-length" else chunked)(loss)(
                hidden, matrix, each, shared
            ).sum()

        held = {}
        for kind, function in (("plain", plain), ("chunked", cut)):
            made: Any = (
                jax.jit(jax.value_and_grad(function, (0, 1)))
                .lower(rows, head, each, shared)
                .compile()
            )
            held[kind] = made.memory_analysis().temp_size_in_bytes / tokens
        found.append(
            {"loss": name, "vocab_size": vocab, **held, "ratio": held["plain"] / held["chunked"]}
        )
    return found


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = []
    if report["speed"]:
        lines = [
            "| job | library | products | tokens/s | MFU | spread | samples | first loss |",
            "|" + "---|" * 8,
        ]
    for row in report["speed"]:
        products = row["name"].removeprefix(row["job"]).strip() or "bfloat16"
        lines.append(
            f"| {row['job']} | {row['library']} | {products} | {cell(row['tokens_per_second'], '.0f')} "
            f"| {cell(row['mfu'], '.1%')} | {cell(row['spread'], '.2f')} | {row['samples']} "
            f"| {row['first_losses'][0]:.4f} |"
        )
    if report["memory"]:
        lines += [
            "",
            "| loss | vocabulary | plain, KB a token | chunked, KB a token | ratio |",
            "|" + "---|" * 5,
        ]
    for row in report["memory"]:
        lines.append(
            f"| {row['loss']} | {row['vocab_size']} | {row['plain'] / 1e3:.1f} | {row['chunked'] / 1e3:.1f} "
            f"| {row['ratio']:.1f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(BenchOptions, argv, __doc__)
    # On an accelerator both libraries must fit; this is read when JAX first touches it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = {
        "machine": describe(),
        "options": dataclasses.asdict(options),
        "speed": speed(options) if {"distill", "medusa"} & set(options.only) else [],
        "memory": [
            row
            for vocab in options.memory_vocab * ("memory" in options.only)
            for row in memory(vocab, options.memory_size, options.memory_tokens)
        ],
    }
    print(table(report), flush=True)
    if options.out is not None:
        pathlib.Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
