"""`python -m bench.first_call`: what the first call of `generate` costs in a new process.

The model is random, with many thin layers, so that what is counted is what users wait for before
the first token: JAX traces the programs, lowers them to XLA's language, and XLA compiles them.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tempfile
import time

import jax
import jax.monitoring
import jax.numpy as jnp

import specjax
from bench.command import run
from specjax.measure import describe
from specjax.models import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.options import fields
from specjax.options.command import parse

_PARTS = {
    "jaxpr_trace_duration": "tracing",
    "jaxpr_to_mlir_module_duration": "lowering",
    "backend_compile_duration": "XLA",
}
"""The events of JAX that are counted."""


@dataclasses.dataclass(frozen=True)
class FirstCallOptions(fields.Options):
    """The options of `python -m bench.first_call`."""

    proposer: str = fields.option("auto", "of the call", choices=("auto", "none", "ngram"))
    layers: int = fields.option(28, "of the target")
    hidden_size: int = fields.option(64, "of the target, a multiple of 16")
    prompt_tokens: int = fields.option(40, "of each prompt")
    batch: int = fields.option(1, "prompts")
    dtype: str = fields.option("float32", "of the weights", choices=("float32", "bfloat16"))
    max_new_tokens: int = fields.option(32, "of each prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("layers", "hidden_size", "prompt_tokens", "batch", "max_new_tokens")
        fields.inside(self, "[1, inf)", *sizes)
        if self.hidden_size % 16:
            raise ValueError(f"--hidden-size is {self.hidden_size}; it must be a multiple of 16")


def target(options: FirstCallOptions) -> LanguageModel:
    """A random target, loaded from a folder as a user's is."""
    size = options.hidden_size
    config = TransformerConfig(
        vocab_size=512, hidden_size=size, mlp_size=2 * size, num_layers=options.layers,
        num_heads=size // 16, num_kv_heads=size // 16, head_dim=16, max_positions=4096,
    )  # fmt: skip
    model = LinenModel(Transformer(config))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "target"
        specjax.save(
            LanguageModel(model, model.init(jax.random.key(0)), None, (), "random"), folder
        )
        return specjax.load(folder, options.dtype)


def main(argv: list[str] | None = None) -> None:
    o = parse(FirstCallOptions, argv, __doc__, "python -m bench.first_call")
    loaded = target(o)
    jax.block_until_ready(jnp.zeros(3) + 1)  # a device is there
    jax.clear_caches()
    seconds: dict[str, float] = collections.defaultdict(float)

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        seconds[_PARTS.get(event.rpartition("/")[2], "")] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    prompts = [[1 + (i + row) % 500 for i in range(o.prompt_tokens)] for row in range(o.batch)]
    started, cpu = time.perf_counter(), time.process_time()
    specjax.generate(loaded, prompts, proposer=o.proposer, max_new_tokens=o.max_new_tokens)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    head = describe()
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {o.dtype}")
    print("| proposer | layers | rows | s of CPU | s | tracing | lowering | XLA |")
    print("|---" * 8 + "|")
    parts = " | ".join(f"{seconds[part]:.2f}" for part in _PARTS.values())
    print(f"| {o.proposer} | {o.layers} | {o.batch} | {cpu:.1f} | {wall:.2f} | {parts} |")


if __name__ == "__main__":
    run(main)
