"""python -m train.bench: time training steps beside a plain PyTorch loop, and measure their memory.

The jobs are distillation and Medusa heads.  All contestants run in one process on the same weights
and the same batch, in turn, and samples that other processes disturbed are dropped.  MFU is the
share of the machine's peak that the model's own products need, without recomputation: 2 operations
per parameter and token forward, twice that backward, plus causal attention.

Memory is what XLA's compiled program of a loss and its gradients needs beside its arguments and
results, per token.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from bench import machine, torch_training
from bench.contestants import Contestant
from bench.timing import Timed, alternate
from bench.weights import SIZES, random_folders
from specjax.contract import Arrays
from specjax.files import load
from specjax.measure import describe
from specjax.methods import MedusaAdapter
from specjax.models import LanguageModel, LinenModel, TransformerConfig, attend
from specjax.options.command import parse
from specjax.options.fields import Options, inside, option
from specjax.training import accepted
from specjax.training.divergences import forward_kl
from specjax.training.jobs.distill import Distill, DistillOptions
from specjax.training.jobs.medusa import MedusaOptions, TrainMedusa
from specjax.training.losses import Teacher, against, chunked, chunked_rows, cross_entropy
from specjax.training.material import Material
from specjax.training.mesh import lay_batch
from specjax.training.optimizer import make_optimizer, start, update
from specjax.training.precision import mixed_dot_general
from specjax.training.written import Written

_RATE, _DECAY = 1e-4, 0.8
_JOBS = ("distill", "medusa", "memory")


class Speed(TypedDict):
    """The speed of one contestant; None where other processes left too few samples."""

    job: str
    library: str
    name: str
    tokens_per_second: float | None
    flops_per_token: float
    mfu: float | None
    peak: float
    spread: float | None
    samples: int
    dropped: int
    first_call_seconds: float
    first_losses: list[float]


class Memory(TypedDict):
    """The memory of one loss, in bytes per token."""

    loss: str
    vocab_size: int
    plain: float
    chunked: float
    ratio: float


class Report(TypedDict):
    """The `--out` file."""

    machine: dict[str, str | int | None]
    options: dict[str, object]
    speed: list[Speed]
    memory: list[Memory]


@dataclasses.dataclass(frozen=True)
class BenchOptions(Options):
    """What is measured, and how often."""

    only: tuple[str, ...] = option(_JOBS, "what to measure", choices=_JOBS)
    size: str = option("15m", "random target and draft of this size", choices=sorted(SIZES))
    target: str | None = option(None, "folder of a target to use instead")
    draft: str | None = option(None, "folder of its draft")
    vocab_size: int = option(4096, "vocabulary size of the random models")
    dtype: str = option(
        "float32", "type of the frozen target's weights", choices=("float32", "bfloat16")
    )
    num_heads: int = option(4, "Medusa heads")
    batch_size: int = option(4, "sequences")
    sequence_length: int = option(256, "tokens per sequence")
    steps: int = option(2, "steps per sample")
    rounds: int = option(5, "samples")
    precisions: tuple[str, ...] = option(
        ("float32", "bfloat16"), "precisions of PyTorch's products", choices=("float32", "bfloat16")
    )
    compiled: bool = option(False, "run PyTorch's models under torch.compile")
    peak: float = option(
        0.0, "peak of the machine in TFLOP/s, for MFU; 0: measured with a matrix product"
    )
    memory_vocab: tuple[int, ...] = option(
        (4096, 32000, 128256), "vocabulary sizes of the memory table"
    )
    memory_size: int = option(1024, "hidden size of the memory table")
    memory_tokens: int = option(4096, "tokens of the memory table")
    weights: str = option(
        str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"), "folder for the random models"
    )
    out: str | None = option(None, "a .json file for the figures")

    def __post_init__(self):
        super().__post_init__()
        inside(self, "[1, inf)", "vocab_size", "num_heads", "batch_size", "steps", "rounds")
        inside(self, "[1, inf)", "memory_tokens", "memory_size")
        inside(self, f"[{4 + self.num_heads}, inf)", "sequence_length")
        inside(self, "[0, inf)", "peak")
        if (self.target is None) != (self.draft is None):
            raise ValueError("pass --target and --draft, or neither")


def forward_flops(
    config: TransformerConfig, params: Arrays, length: int, head: bool = True
) -> float:
    """Floating-point operations per token of a forward pass over sequences of `length` tokens.

    A token sees half of its sequence on average.  `head` includes the map to the vocabulary.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    inner = sum(
        x.size for path, x in leaves if x.ndim == 2 and "layer_" in jax.tree_util.keystr(path)
    )
    attention = length * config.num_heads * config.head_dim * config.num_layers
    return 2.0 * (inner + attention + head * config.vocab_size * config.hidden_size)


def step_flops(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> float:
    """Operations of a step per token: the target forward, the trained part forward and backward."""
    wide, length = target.model.module.config, options.sequence_length
    if job == "distill":
        small = draft.model.module.config
        once = forward_flops(wide, target.params, length)
        return once + 3 * forward_flops(small, draft.params, length)
    size, vocab = wide.hidden_size, wide.vocab_size
    # Gradients flow through the target's output matrix, but it has none of its own.
    head = 3 * 2 * size * size + 2 * 2 * size * vocab
    return forward_flops(wide, target.params, length, head=False) + options.num_heads * head


def our_job(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> tuple[Distill, DistillOptions] | tuple[TrainMedusa, MedusaOptions]:
    """A job of the trainer, whose data are placeholders, and its options."""
    o = options
    common: dict[str, Any] = {
        "target": "",
        "data": (),
        "batch_size": o.batch_size,
        "sequence_length": o.sequence_length,
        "learning_rate": _RATE,
        "warmup_steps": 0,
        "decay_fraction": 0.0,
        "steps": 1 << 20,
    }
    nothing = Written(
        np.zeros((o.batch_size, o.sequence_length + 1), np.int32),
        np.zeros((o.batch_size, o.sequence_length), np.float32),
        np.full(o.batch_size, o.sequence_length, np.int32),
    )
    data = Material(None, nothing, nothing, {})
    if job == "medusa":
        asked = MedusaOptions(**common, num_heads=o.num_heads, head_decay=_DECAY, written_prompt=1)
        return TrainMedusa(asked, target, data, MedusaAdapter.create(target, o.num_heads)), asked
    asked = DistillOptions(**common, sampled_fraction=1.0, sampled_prompt=1, num_drafts=1)
    reader = LinenModel(draft.model.module.clone(dot_general=mixed_dot_general, attend=attend))
    return Distill(asked, target, data, reader), asked


def ours(
    job: str, options: BenchOptions, target: LanguageModel, draft: LanguageModel
) -> Contestant:
    """A job of this library."""
    made, asked = our_job(job, options, target, draft)
    if job == "medusa":
        params = made.init()
    else:
        params = {name: draft.params[name] for name in jax.eval_shape(made.init)}
    optimizer = make_optimizer(asked)
    states = [start(optimizer, asked, jax.tree.map(jnp.copy, params))]

    def steps(tokens: np.ndarray, count: int) -> np.ndarray:
        losses = []
        for number in range(count):
            batch = lay_batch({**made.batch(number), "tokens": tokens}, None)
            state, values = update(made, optimizer, asked, states.pop(), made.frozen, batch)
            states.append(state)
            losses.append(values["loss"])
        return np.asarray(jax.block_until_ready(jnp.stack(losses)))

    return Contestant(job, "specjax", 0, steps)


def theirs(
    job: str, precision: str, options: BenchOptions, folders: tuple[pathlib.Path, pathlib.Path]
) -> Contestant:
    """The same job as a PyTorch loop."""
    o = options
    if job == "distill":
        steps = torch_training.distill(*folders, o.dtype, precision, _RATE, o.compiled)
    else:
        steps = torch_training.medusa(
            folders[0], o.num_heads, _DECAY, o.dtype, precision, _RATE, o.compiled
        )
    return Contestant(f"{job} {precision}", "torch", 0, steps)


def speed(options: BenchOptions) -> list[Speed]:
    """A row for each contestant."""
    o = options
    if o.target is not None and o.draft is not None:
        folders = pathlib.Path(o.target), pathlib.Path(o.draft)
    else:
        folders = random_folders(o.size, o.vocab_size, pathlib.Path(o.weights), "float32")
    target, draft = load(folders[0], o.dtype), load(folders[1], "float32")
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


def _row(timed: Timed, job: str, options: BenchOptions, flops: float, peak: float) -> Speed:
    count = options.batch_size * options.sequence_length * options.steps
    rate = count / timed.median if timed.median else None
    return {
        "job": job,
        "library": timed.contestant.library,
        "name": timed.contestant.name,
        "tokens_per_second": rate,
        "flops_per_token": flops,
        "mfu": rate and rate * flops / peak,
        "peak": peak,
        "spread": timed.spread,
        "samples": len(timed.seconds[0]),
        "dropped": timed.dropped,
        "first_call_seconds": timed.first,
        "first_losses": timed.tokens[0][:2].tolist(),
    }


Args = tuple[jax.ShapeDtypeStruct | Teacher, ...]
Loss = Callable[..., Array]


def memory(vocab: int, size: int, tokens: int) -> list[Memory]:
    """A row for each loss: bytes per token of the plain and of the chunked loss, with gradients."""

    def array(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, labels, weight = array(tokens, size), array(tokens, dtype=jnp.int32), array(tokens)
    head = array(size, vocab)
    teacher = Teacher(cast(Array, head))
    losses: dict[str, tuple[Loss, Args, Args]] = {
        "cross-entropy": (cross_entropy, (weight, labels), ()),
        "forward-kl": (against(forward_kl), (weight, rows), (teacher,)),
        "accepted-length": (accepted.statistics, (labels, rows), (teacher,)),
    }
    measured = []
    for name, (loss, each, shared) in losses.items():
        chunk = chunked_rows if name == "accepted-length" else chunked

        needed = [
            _temporary_bytes(_total(function), rows, head, each, shared) / tokens
            for function in (_whole(loss), chunk(loss))
        ]
        measured.append(
            Memory(
                loss=name,
                vocab_size=vocab,
                plain=needed[0],
                chunked=needed[1],
                ratio=needed[0] / needed[1],
            )
        )
    return measured


def _whole(loss: Loss) -> Loss:
    """The loss of all logits at once, with the arguments of a chunked one."""

    def of_hidden(hidden: Array, matrix: Array, each: Arrays, shared: Arrays) -> Array:
        logits = mixed_dot_general(hidden, matrix, (((1,), (0,)), ((), ())))
        return loss(logits, *each, *shared)

    return of_hidden


def _total(loss: Loss) -> Loss:
    return lambda *arguments: loss(*arguments).sum()


def _temporary_bytes(loss: Loss, *arguments: Arrays) -> int:
    """What the compiled loss and its gradients need beside arguments and results."""
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def table(report: Report) -> str:
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
        rate, mfu = cell(row["tokens_per_second"], ".0f"), cell(row["mfu"], ".1%")
        lines.append(
            f"| {row['job']} | {row['library']} | {products} | {rate} | {mfu} "
            f"| {cell(row['spread'], '.2f')} | {row['samples']} | {row['first_losses'][0]:.4f} |"
        )
    if report["memory"]:
        lines += [
            "",
            "| loss | vocabulary | plain, KB a token | chunked, KB a token | ratio |",
            "|" + "---|" * 5,
        ]
    for row in report["memory"]:
        lines.append(
            f"| {row['loss']} | {row['vocab_size']} | {row['plain'] / 1e3:.1f} "
            f"| {row['chunked'] / 1e3:.1f} | {row['ratio']:.1f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(BenchOptions, argv, __doc__)
    # Both libraries must fit into an accelerator's memory; JAX reads this when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report: Report = {
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
